/* A row's result is the same in any batch: each sum is added up in the order of inputs, and what is shrunk is rounded to
 * an element wherever it is computed.
 *
 * An adapter's rows are shrunk together, wherever they lie, so that A is read once for them. A panel of B is fetched
 * before the weight's own is multiplied, and is there when it is wanted.
 */

#include "lora.h"

#include "panel.h"

enum {
    BLOCK_INPUTS = 256, /* of scattered rows are brought together at a time */
    CHUNK_ROWS = 64,
    RUN_AHEAD_BYTES = 4096,
    RANK_VECTORS = RANK_PANEL / LANES
};
static const int64_t MIN_PARALLEL_PRODUCTS = 1 << 18; /* about what starting the threads takes */
static const float ONES[GROUP_ROWS] = {[0 ... GROUP_ROWS - 1] = 1};

INLINE int64_t rank_panels_of(Adapters adapters, int64_t slot) {
    return adapters && adapters[slot] ? adapters[slot]->num_rank_panels : 0;
}

INLINE int64_t steps_of(int64_t inputs) { return (inputs + INPUTS_PER_STEP - 1) / INPUTS_PER_STEP; }

/* `rows` of at most GROUP_ROWS of `x`, wherever they are. */
static void shrink_rows(float *sums, const char *panel, const element *x, int64_t x_stride, int64_t inputs,
                        const int32_t *places, int64_t rows) {
    if (places[rows - 1] - places[0] == rows - 1) {
        multiply_group_of(sums, RANK_PANEL, NULL, NULL, x + places[0] * x_stride, x_stride, panel, inputs, rows,
                          (Fetching){panel + RUN_AHEAD_BYTES, RANK_PANEL * 4}, RANK_VECTORS);
        return;
    }
    _Alignas(64) element block[GROUP_ROWS * BLOCK_INPUTS];
    for (int64_t input = 0; input < inputs; input += BLOCK_INPUTS) {
        const int64_t count = inputs - input < BLOCK_INPUTS ? inputs - input : BLOCK_INPUTS;
        for (int64_t r = 0; r < rows; r++)
            memcpy(block + r * BLOCK_INPUTS, x + places[r] * x_stride + input, count * sizeof(element));
        multiply_group_of(sums, RANK_PANEL, input ? ONES : NULL, NULL, block, BLOCK_INPUTS,
                          panel + input / INPUTS_PER_STEP * RANK_PANEL * 4, count, rows, (Fetching){0}, RANK_VECTORS);
    }
}

static void shrink_tile(const LoraBatch *b, const Lora *lora, int64_t panel, int64_t shrunk_panel, const int32_t *tile,
                        const element *x, int64_t x_stride, int64_t inputs) {
    const char *at = lora->rank_panels + panel * steps_of(inputs) * RANK_PANEL * 4;
    const int32_t *places = b->rows + tile[1];
    const int64_t rows = tile[2], groups = (rows + GROUP_ROWS - 1) / GROUP_ROWS;
    _Alignas(64) float sums[GROUP_ROWS][RANK_PANEL];
    for (int64_t group = 0, row = 0; group < groups; group++) {
        const int64_t end = (group + 1) * rows / groups;
        shrink_rows(sums[0], at, x, x_stride, inputs, places + row, end - row);
        for (int64_t r = row; r < end; r++) {
            element *to = b->shrunk + places[r] * b->shrunk_stride + shrunk_panel * RANK_PANEL;
            for (int v = 0; v < RANK_PANEL; v += LANES)
                store(to + v, load_floats(sums[r - row] + v) * load_floats(lora->scaling + panel * RANK_PANEL + v));
        }
        row = end;
    }
}

void shrink(Worker *w, const LoraBatch *b, Adapters adapters, Adapters more, const element *x, int64_t x_stride,
            int64_t inputs) {
    int64_t most = 0;
    for (int64_t tile = 0; tile < b->num_tiles; tile++) {
        const int32_t slot = b->tiles[3 * tile];
        const int64_t panels = rank_panels_of(adapters, slot) + rank_panels_of(more, slot);
        most = panels > most ? panels : most;
    }
    if (!most)
        return;
    Tasks tasks = tasks_of(w, b->num_tiles * most);
    for (int64_t task; (task = next_task(&tasks)) >= 0;) {
        const int32_t *tile = b->tiles + task / most * 3;
        const int64_t panel = task % most, own = rank_panels_of(adapters, tile[0]);
        if (panel < own)
            shrink_tile(b, adapters[tile[0]], panel, panel, tile, x, x_stride, inputs);
        else if (panel < own + rank_panels_of(more, tile[0]))
            shrink_tile(b, more[tile[0]], panel - own, panel, tile, x, x_stride, inputs);
    }
    end_phase(w);
}

/* What a slice has of a panel; NULL if nothing. */
INLINE const char *panel_of(const LoraSlice *s, int64_t panel) {
    if (panel < s->first_panel || panel >= s->end_panel)
        return NULL;
    return s->panels + (panel - s->first_panel) * steps_of(s->rank) * STEP_BYTES;
}

void fetch_expansion(const LoraBatch *b, Adapters adapters, int64_t panel, int64_t row, int64_t rows) {
    if (!adapters)
        return;
    for (int64_t r = row; r < row + rows; r++) {
        const int32_t slot = b->slots[r];
        if (slot < 0 || !adapters[slot] || (r > row && slot == b->slots[r - 1]))
            continue;
        const Lora *lora = adapters[slot];
        for (const LoraSlice *s = lora->slices; s < lora->slices + lora->num_slices; s++) {
            const char *at = panel_of(s, panel);
            for (int64_t i = 0; at && i < steps_of(s->rank) * STEP_BYTES; i += CACHE_LINE)
                __builtin_prefetch(at + i, 0, 2);
        }
    }
}

void expand(float *sums, const LoraBatch *b, Adapters adapters, Adapters before, int64_t panel, int64_t row,
            int64_t rows) {
    if (!adapters)
        return;
    for (int64_t r = 0, end; r < rows; r = end) {
        const int32_t slot = b->slots[row + r];
        for (end = r + 1; end < rows && end - r < GROUP_ROWS && b->slots[row + end] == slot;)
            end++;
        if (slot < 0 || !adapters[slot])
            continue;
        const Lora *lora = adapters[slot];
        const element *shrunk = b->shrunk + (row + r) * b->shrunk_stride + rank_panels_of(before, slot) * RANK_PANEL;
        for (const LoraSlice *s = lora->slices; s < lora->slices + lora->num_slices; s++) {
            const char *at = panel_of(s, panel);
            if (at)
                multiply_group(sums + r * PANEL, PANEL, ONES, NULL, shrunk + s->first_rank, b->shrunk_stride, at,
                               s->rank, end - r, (Fetching){0});
        }
    }
}

/* To what a linear layer of its own has made. */
typedef struct {
    Adapters adapters;
    const LoraBatch *batch;
    const element *x; /* [rows, inputs] */
    int64_t x_stride, inputs;
    element *y; /* [rows, outputs] */
    int64_t y_stride, outputs, rows;
} LoraAddition;

INLINE int has_adapter(const LoraAddition *a, int64_t row) {
    const int32_t slot = a->batch->slots[row];
    return slot >= 0 && a->adapters[slot];
}

static void add_expanded(Worker *w, const LoraAddition *a) {
    const int64_t panels = (a->outputs + PANEL - 1) / PANEL, chunks = (a->rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    _Alignas(64) float sums[CHUNK_ROWS][PANEL];
    Tasks tasks = tasks_of(w, chunks * panels);
    for (int64_t task; (task = next_task(&tasks)) >= 0;) {
        const int64_t chunk = task / panels, panel = task % panels, left = a->outputs - panel * PANEL;
        const int64_t row = chunk * a->rows / chunks, rows = (chunk + 1) * a->rows / chunks - row;
        element *y = a->y + row * a->y_stride + panel * PANEL;
        for (int64_t r = 0; r < rows; r++)
            if (has_adapter(a, row + r))
                for (int v = 0; v < PANEL; v += LANES)
                    store_floats(sums[r] + v, load_some(y + r * a->y_stride + v, left - v));
        expand(sums[0], a->batch, a->adapters, NULL, panel, row, rows);
        for (int64_t r = 0; r < rows; r++)
            if (has_adapter(a, row + r))
                for (int v = 0; v < PANEL; v += LANES)
                    store_some(y + r * a->y_stride + v, load_floats(sums[r] + v), left - v);
    }
    end_phase(w);
}

static void add_to_layer(Worker *w, const LoraAddition *a) {
    shrink(w, a->batch, a->adapters, NULL, a->x, a->x_stride, a->inputs);
    add_expanded(w, a);
}

/* For Python. */
EXPORT void add_lora(const LoraAddition *a, int num_threads) {
    if (a->rows * RANK_PANEL * (a->inputs + a->outputs) < MIN_PARALLEL_PRODUCTS)
        num_threads = 1;
    WITH_TEAM(num_threads, worker, add_to_layer(&worker, a));
}
