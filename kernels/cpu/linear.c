/* A task is one panel for a chunk of rows. Sums stay in registers from the first input to the last, no lane is ever
 * added to another, and a panel stays in the second-level cache for all groups of rows; while they use it, the next one
 * is fetched.
 */

#include "linear.h"

#include "activation.h"
#include "panel.h"

enum {
    MAX_CHUNK_ROWS = 117, /* that are to stay in the second-level cache beside two panels */
    TASKS_PER_THREAD = 4,
    RUN_AHEAD_BYTES = 8192
};
static const int64_t MIN_PARALLEL_PRODUCTS = 1 << 18; /* about what starting the threads takes */

typedef float Sums[MAX_CHUNK_ROWS][PANEL];

INLINE int64_t panel_bytes(const Weight *w) {
    return (w->inputs + INPUTS_PER_STEP - 1) / INPUTS_PER_STEP * STEP_BYTES;
}

/* `x` [rows, inputs] times one panel, in groups of nearly the same size. A single one runs ahead in its own panel,
 * several share the fetching of the next one. */
static void multiply_chunk(Sums sums, const Weight *w, int64_t panel, const element *x, int64_t rows) {
    const char *at = w->panels + panel * panel_bytes(w);
    const int64_t groups = (rows + GROUP_ROWS - 1) / GROUP_ROWS;
    Fetching fetching = {at + (groups > 1 ? panel_bytes(w) : RUN_AHEAD_BYTES), STEP_BYTES / groups};
    for (int64_t group = 0, row = 0; group < groups; group++, fetching.ahead += panel_bytes(w) / groups) {
        const int64_t end_row = (group + 1) * rows / groups;
        multiply_group(sums[row], PANEL, NULL, w->bias ? w->bias + panel * PANEL : NULL, x + row * w->inputs,
                       w->inputs, at, w->inputs, end_row - row, fetching);
        row = end_row;
    }
}

static void finish(const Product *p, const Sums sums, const Sums gates, int64_t panel, int64_t row, int64_t rows) {
    const int64_t outputs = p->weight->outputs, output = panel * PANEL;
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) {
            const int64_t place = (row + r) * outputs + output + v * LANES, left = outputs - output - v * LANES;
            vector x = load_floats(sums[r] + v * LANES);
            if (gates)
                x = activate(p->activation, load_floats(gates[r] + v * LANES)) * x;
            if (p->residual)
                x = x + load_some(p->residual + place, left);
            store_some(p->y + place, x, left);
        }
}

void multiply(Worker *w, const Product *p) {
    const Weight *weight = p->weight;
    const int64_t panels = (weight->outputs + PANEL - 1) / PANEL;
    /* As many chunks as the cache asks for, and more where panels alone are too few for the threads. */
    const int64_t most_chunks = (p->rows + GROUP_ROWS - 1) / GROUP_ROWS;
    int64_t chunks = (p->rows + MAX_CHUNK_ROWS - 1) / MAX_CHUNK_ROWS;
    if (w->num_threads > 1 && chunks * panels < (int64_t)TASKS_PER_THREAD * w->num_threads)
        chunks = (TASKS_PER_THREAD * w->num_threads + panels - 1) / panels;
    if (chunks > most_chunks)
        chunks = most_chunks;

    _Alignas(64) Sums sums, gates;
    Tasks tasks = tasks_of(w, chunks * panels);
    for (int64_t task; (task = next_task(&tasks)) >= 0;) {
        const int64_t chunk = task / panels, panel = task % panels;
        const int64_t row = chunk * p->rows / chunks, rows = (chunk + 1) * p->rows / chunks - row;
        if (p->gate)
            multiply_chunk(gates, p->gate, panel, p->x + row * weight->inputs, rows);
        multiply_chunk(sums, weight, panel, p->x + row * weight->inputs, rows);
        finish(p, sums, p->gate ? gates : NULL, panel, row, rows);
    }
    end_phase(w);
}

/* For Python: a product of its own. */
EXPORT void linear(const Product *p, int num_threads) {
    if (p->rows * p->weight->inputs * p->weight->outputs < MIN_PARALLEL_PRODUCTS)
        num_threads = 1;
    WITH_TEAM(num_threads, worker, multiply(&worker, p));
}
