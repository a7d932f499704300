/* A task is one panel for a chunk of rows. Sums stay in registers from the first input to the last, no lane is ever
 * added to another, and a panel stays in the second-level cache for all groups of rows; while they use it, the next one
 * is fetched.
 */

#include "linear.h"

#include "activation.h"
#include "panel.h"
#include "quantized.h"

enum {
    MAX_CHUNK_ROWS = 117, /* that are to stay in the second-level cache beside two panels */
    TASKS_PER_THREAD = 4,
    RUN_AHEAD_BYTES = 8192,
    BLOCK_INPUTS = 256 /* of which a panel's elements fit into the first-level cache */
};
static const int64_t MIN_PARALLEL_PRODUCTS = 1 << 18; /* about what starting the threads takes */

typedef float Sums[MAX_CHUNK_ROWS][PANEL];

INLINE int64_t panel_bytes(const Weight *w) {
    if (w->format != ELEMENTS)
        return (w->inputs + GROUP_INPUTS - 1) / GROUP_INPUTS * group_bytes(w->format);
    return (w->inputs + INPUTS_PER_STEP - 1) / INPUTS_PER_STEP * STEP_BYTES;
}

#if MULTIPLIES_CODES
static void multiply_group_of_codes(Sums sums, const Weight *w, const float *start, const element *x, const char *panel,
                                    int64_t groups, int64_t rows) {
    switch (rows) {
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        if (n <= GROUP_ROWS && w->format == INT8)                                                                      \
            multiply_codes(sums[0], start, x, w->inputs, INT8, panel, groups, n <= GROUP_ROWS ? n : 1);                \
        else if (n <= GROUP_ROWS)                                                                                      \
            multiply_codes(sums[0], start, x, w->inputs, INT4, panel, groups, n <= GROUP_ROWS ? n : 1);                \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9)
#undef CASE
    }
}
#endif

/* As `multiply_chunk` for a quantized weight. A row's sums are the same in any company: elements are the same whether
 * they are stored or not, and each sum is added up in the order of inputs. */
static void multiply_quantized_chunk(Sums sums, const Weight *w, int64_t panel, const element *x, int64_t rows) {
    static const float ones[GROUP_ROWS] = {[0 ... GROUP_ROWS - 1] = 1};
    const char *at = w->panels + panel * panel_bytes(w);
    const float *bias = w->bias ? w->bias + panel * PANEL : NULL;
    const float *start = w->format == INT8 ? NULL : bias;
    const int64_t row_groups = (rows + GROUP_ROWS - 1) / GROUP_ROWS;
    int64_t input = 0;
#if MULTIPLIES_CODES
    if (rows <= max_rows_of_codes(w->format)) {
        const int64_t groups = w->inputs / GROUP_INPUTS;
        for (int64_t group = 0, row = 0; group < row_groups; group++) {
            const int64_t end_row = (group + 1) * rows / row_groups;
            multiply_group_of_codes(sums + row, w, start, x + row * w->inputs, at, groups, end_row - row);
            row = end_row;
        }
        input = groups * GROUP_INPUTS;
        at += groups * group_bytes(w->format);
    }
#endif
    _Alignas(64) element elements[BLOCK_INPUTS * PANEL];
    for (; input < w->inputs; input += BLOCK_INPUTS) {
        const int64_t inputs = w->inputs - input < BLOCK_INPUTS ? w->inputs - input : BLOCK_INPUTS;
        for (int64_t i = 0; i < inputs; i += GROUP_INPUTS, at += group_bytes(w->format))
            if (w->format == INT8)
                expand_group(elements + i * PANEL, INT8, at);
            else
                expand_group(elements + i * PANEL, INT4, at);
        for (int64_t group = 0, row = 0; group < row_groups; group++) {
            const int64_t end_row = (group + 1) * rows / row_groups;
            multiply_group(sums[row], PANEL, input ? ones : NULL, input ? NULL : start, x + row * w->inputs + input,
                           w->inputs, (const char *)elements, inputs, end_row - row, (Fetching){0});
            row = end_row;
        }
    }
    if (w->format == INT8)
        for (int64_t r = 0; r < rows; r++)
            for (int v = 0; v < PANEL; v += LANES)
                store_floats(sums[r] + v, load_floats(sums[r] + v) * load_floats(w->scales + panel * PANEL + v) +
                                              (bias ? load_floats(bias + v) : (vector){}));
}

/* `x` [rows, inputs] times one panel, in groups of nearly the same size. A single one runs ahead in its own panel,
 * several share the fetching of the next one. */
static void multiply_chunk(Sums sums, const Weight *w, int64_t panel, const element *x, int64_t rows) {
    if (w->format != ELEMENTS) {
        multiply_quantized_chunk(sums, w, panel, x, rows);
        return;
    }
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

    const Adapters adapters = weight->adapters, of_gate = p->gate ? p->gate->adapters : NULL;
    if (p->lora)
        shrink(w, p->lora, adapters, of_gate, p->x, weight->inputs, weight->inputs);

    _Alignas(64) Sums sums, gates;
    Tasks tasks = tasks_of(w, chunks * panels);
    for (int64_t task; (task = next_task(&tasks)) >= 0;) {
        const int64_t chunk = task / panels, panel = task % panels;
        const int64_t row = chunk * p->rows / chunks, rows = (chunk + 1) * p->rows / chunks - row;
        if (p->lora) {
            fetch_expansion(p->lora, adapters, panel, row, rows);
            fetch_expansion(p->lora, of_gate, panel, row, rows);
        }
        if (p->gate)
            multiply_chunk(gates, p->gate, panel, p->x + row * weight->inputs, rows);
        multiply_chunk(sums, weight, panel, p->x + row * weight->inputs, rows);
        if (p->lora) {
            expand(sums[0], p->lora, adapters, NULL, panel, row, rows);
            expand(gates[0], p->lora, of_gate, adapters, panel, row, rows);
        }
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
