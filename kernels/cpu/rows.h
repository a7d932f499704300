/* What is done with single rows of a batch between its matrix products. */

#ifndef ROWS_H
#define ROWS_H

#include "team.h"

/* Root mean square normalization. */
typedef struct {
    const float *weight; /* [size]; NULL where a layer has no such norm */
    int64_t size;
    float epsilon;
} Norm;

/* `y` [size] from `x`, which it may be, plus `residual` unless that is NULL. */
INLINE void normalize(element *y, const element *x, const element *residual, const Norm *n) {
    vector squares = {};
    for (int64_t i = 0; i < n->size; i += LANES) {
        const vector v = load_some(x + i, n->size - i);
        squares += v * v;
    }
    const float scale = 1 / sqrtf(sum_of(squares) / (float)n->size + n->epsilon);
    for (int64_t i = 0; i < n->size; i += LANES) {
        const int64_t left = n->size - i;
        vector v = load_some(x + i, left) * scale * load_some_floats(n->weight + i, left);
        if (residual)
            v += load_some(residual + i, left);
        store_some(y + i, v, left);
    }
}

/* Rotary embedding of the first `dim` values of a head, in place: pairs are half of them apart (Su et al., "RoFormer",
 * 2021, as GPT-NeoX orders them). */
INLINE void rotate(element *x, const float *cosines, const float *sines, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i, j = i + half;
        const vector a = load_some(x + i, left), b = load_some(x + j, left);
        store_some(x + i, a * load_some_floats(cosines + i, left) - b * load_some_floats(sines + i, left), left);
        store_some(x + j, b * load_some_floats(cosines + j, left) + a * load_some_floats(sines + j, left), left);
    }
}

/* The rows of a phase, dealt out in runs. */
typedef struct {
    Tasks tasks;
    int64_t num_rows, begin, end;
} Runs;

enum { MAX_RUN_ROWS = 16 };

INLINE Runs runs_of(Worker *w, int64_t num_rows) {
    const int64_t needed = (num_rows + MAX_RUN_ROWS - 1) / MAX_RUN_ROWS, wanted = (int64_t)4 * w->num_threads;
    return (Runs){tasks_of(w, needed > wanted ? needed : num_rows < wanted ? num_rows : wanted), num_rows, 0, 0};
}

/* Whether there is a run from `begin` to `end` left for this thread. */
INLINE int next_run(Runs *r) {
    const int64_t run = next_task(&r->tasks);
    if (run < 0)
        return 0;
    r->begin = run * r->num_rows / r->tasks.num_tasks;
    r->end = (run + 1) * r->num_rows / r->tasks.num_tasks;
    return 1;
}

#define FOR_ROWS(worker, num_rows, row)                                                                                \
    for (Runs runs_ = runs_of(worker, num_rows); next_run(&runs_);)                                                    \
        for (int64_t row = runs_.begin; row < runs_.end; row++)

#endif
