/* Attention of so few rows that packing keys and values would take longer than reading them where they lie.
 *
 * A score is then a sum over lanes, and a step of values is put together each time it is needed.
 */

#ifndef FEW_ROWS_H
#define FEW_ROWS_H

#include "cache_rows.h"
#include "transpose.h"

enum {
    SCORED_ROWS = 3,  /* at once: their sums for half as many keys as there are lanes stay in registers */
    FETCHED_AFTER = 8 /* so many values: there is only so much that can be on its way */
};

/* The sums of neighbouring lanes once x and y have been interleaved: half as many of each, by turns. */
INLINE vector fold(vector x, vector y) {
    words first, second;
    interleave((words)x, (words)y, &first, &second);
    return (vector)first + (vector)second;
}

/* Lane i and lane i + LANES / 2 together are the sum of the lanes of x[i]. Written out: of a loop, compilers make an
 * array in memory. */
INLINE vector half_sums(const vector x[LANES / 2]) {
    enum { MANY = LANES / 2 };
    if (LANES == 4)
        return fold(x[0], x[1]);
    if (LANES == 8)
        return fold(fold(x[0], x[2 % MANY]), fold(x[1], x[3 % MANY]));
    return fold(fold(fold(x[0], x[4 % MANY]), fold(x[2 % MANY], x[6 % MANY])),
                fold(fold(x[1], x[5 % MANY]), fold(x[3 % MANY], x[7 % MANY])));
}

/* Scores of `rows` rows, a constant, and as many keys as there are lanes. */
INLINE void score_rows(float *scores, int64_t stride, const element *queries, int64_t query_stride,
                       const element *const keys[LANES], int64_t dim, const int rows) {
    vector halves[SCORED_ROWS][2];
    for (int odd = 0; odd < 2; odd++) {
        vector sums[SCORED_ROWS][LANES / 2] = {};
        for (int64_t from = 0; from < dim; from += LANES * INPUTS_PER_STEP) {
            operand query[SCORED_ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                query[r] = load_operand(queries + r * query_stride + from);
#pragma GCC unroll 8
            for (int i = 0; i < LANES / 2; i++) {
                const operand key = load_operand(keys[2 * i + odd] + from);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    sums[r][i] = multiply_add(sums[r][i], key, query[r]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            halves[r][odd] = half_sums(sums[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        store_floats(scores + r * stride, fold(halves[r][0], halves[r][1]));
}

/* `scores` [rows, stride] of all keys, rounded up to LANES: what is beyond the last one is any number. `dim` is a
 * multiple of what an operand holds. */
INLINE void score_few(float *scores, int64_t stride, const element *queries, int64_t query_stride, int64_t rows,
                      const Slots *keys, int64_t dim, const Wanted *wanted) {
    const int64_t groups = (rows + SCORED_ROWS - 1) / SCORED_ROWS;
    for (int64_t key = 0; key < keys->count; key += LANES) {
        const element *at[LANES];
        for (int i = 0; i < LANES; i++)
            at[i] = row_of(keys, key + i < keys->count ? key + i : keys->count - 1);
        for (int64_t group = 0, row = 0; group < groups; group++) {
            const int64_t end = (group + 1) * rows / groups;
            float *to = scores + row * stride + key;
            const element *from = queries + row * query_stride;
            if (end - row == 1)
                score_rows(to, stride, from, query_stride, at, dim, 1);
            else if (end - row == 2)
                score_rows(to, stride, from, query_stride, at, dim, 2);
            else
                score_rows(to, stride, from, query_stride, at, dim, 3);
            /* Not all at once: there is only so much that can be on its way. */
            fetch_rows(wanted, key + group * LANES / groups, key + (group + 1) * LANES / groups);
            row = end;
        }
    }
}

/* `sums` [rows, PANEL], `rows` a constant, times `factors`, plus `weights` times the values' dimensions from `from` on.
 * Where the number of keys is odd, there is a weight of 0 behind them. */
INLINE void add_rows(float *sums, int64_t sums_stride, const float *factors, const element *weights,
                     int64_t weights_stride, const Slots *values, int64_t from, const int rows, const Wanted *wanted) {
    vector s[GROUP_ROWS][PANEL_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < PANEL_VECTORS; v++)
            s[r][v] = load_floats(sums + r * sums_stride + v * LANES) * factors[r];
    for (int64_t begin = 0; begin < values->count; begin += FETCHED_AFTER) {
        const int64_t end = begin + FETCHED_AFTER < values->count ? begin + FETCHED_AFTER : values->count;
        for (int64_t key = begin; key < end; key += INPUTS_PER_STEP) {
            const int64_t last = key + INPUTS_PER_STEP <= values->count ? key + INPUTS_PER_STEP - 1 : key;
            operand step[PANEL_VECTORS];
            load_value_step(step, (const element *)row_of(values, key) + from,
                            (const element *)row_of(values, last) + from);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const operand weight = spread_operand(weights + r * weights_stride + key, INPUTS_PER_STEP);
#pragma GCC unroll 8
                for (int v = 0; v < PANEL_VECTORS; v++)
                    s[r][v] = multiply_add(s[r][v], step[v], weight);
            }
        }
        fetch_rows(wanted, begin, end);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < PANEL_VECTORS; v++)
            store_floats(sums + r * sums_stride + v * LANES, s[r][v]);
}

/* The same for any number of rows up to GROUP_ROWS and all dimensions, a multiple of PANEL. */
static void add_few(float *sums, int64_t sums_stride, const float *factors, const element *weights,
                    int64_t weights_stride, const Slots *values, int64_t dim, int64_t rows, const Wanted *wanted) {
    static const Wanted nothing = {0};
    for (int64_t from = 0; from < dim; from += PANEL, wanted = &nothing)
        switch (rows) {
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        if (n <= GROUP_ROWS)                                                                                           \
            add_rows(sums + from, sums_stride, factors, weights, weights_stride, values, from,                         \
                     n <= GROUP_ROWS ? n : 1, wanted);                                                                 \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9)
#undef CASE
        }
}

#endif
