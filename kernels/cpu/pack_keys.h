/* Keys and values of some slots, as panels: a panel's step (element.h) is of 32 keys, INPUTS_PER_STEP dimensions each,
 * or of 32 dimensions of INPUTS_PER_STEP keys' values.
 */

#ifndef PACK_KEYS_H
#define PACK_KEYS_H

#include "cache_rows.h"
#include "transpose.h"

INLINE words load_words(const void *x) {
    words y;
    memcpy(&y, x, sizeof y);
    return y;
}

INLINE void store_words(void *x, words y) { memcpy(x, &y, sizeof y); }

/* As many of LANES steps as there are in `left` elements; zero behind them. */
INLINE words load_steps(const element *x, int64_t left) {
    element y[LANES * INPUTS_PER_STEP] = {0};
    if (left >= LANES * INPUTS_PER_STEP)
        return load_words(x);
    memcpy(y, x, left * sizeof *y);
    return load_words(y);
}

/* Keys of `dim` dimensions as panels one behind the other; zero beyond the last one. */
static void pack_keys(char *packed, const Slots *keys, int64_t dim, const Wanted *wanted) {
    const int64_t steps = (dim + INPUTS_PER_STEP - 1) / INPUTS_PER_STEP;
    const int64_t end = (keys->count + PANEL - 1) / PANEL * PANEL;
    for (int64_t key = 0; key < end; key += LANES) {
        char *to = packed + key / PANEL * steps * STEP_BYTES + key % PANEL * 4;
        for (int64_t step = 0; step < steps; step += LANES) {
            words rows[LANES];
            if (key + LANES <= keys->count && step + LANES <= dim / INPUTS_PER_STEP) {
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    rows[i] = load_words((const element *)row_of(keys, key + i) + step * INPUTS_PER_STEP);
            } else {
                for (int i = 0; i < LANES; i++)
                    rows[i] = key + i < keys->count
                                  ? load_steps((const element *)row_of(keys, key + i) + step * INPUTS_PER_STEP,
                                               dim - step * INPUTS_PER_STEP)
                                  : (words){};
            }
            transpose(rows);
            if (step + LANES <= steps) {
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    store_words(to + (step + i) * STEP_BYTES, rows[i]);
            } else {
                for (int i = 0; i < steps - step; i++)
                    store_words(to + (step + i) * STEP_BYTES, rows[i]);
            }
        }
        fetch_rows(wanted, key, key + LANES);
    }
}

INLINE void pack_value_step(char *to, const element *even, const element *odd) {
    operand step[PANEL_VECTORS];
    load_value_step(step, even, odd);
    for (int v = 0; v < PANEL_VECTORS; v++)
        store_operand(to + v * LANES * 4, step[v]);
}

/* Values of `dim` dimensions as panels that begin `panel_bytes` apart; zero beyond the last dimension, and in the last
 * step beyond the last key. */
static void pack_values(char *packed, int64_t panel_bytes, const Slots *values, int64_t dim, const Wanted *wanted) {
    static const element none[PANEL] = {0};
    const int64_t whole = dim / PANEL * PANEL;
    for (int64_t key = 0; key < values->count; key += INPUTS_PER_STEP, packed += STEP_BYTES) {
        const int is_whole = key + INPUTS_PER_STEP <= values->count;
        const element *x = row_of(values, key), *y = is_whole ? row_of(values, key + INPUTS_PER_STEP - 1) : none;
        const int64_t y_stride = is_whole ? 1 : 0;
        char *to = packed;
        for (int64_t from = 0; from < whole; from += PANEL, to += panel_bytes)
            pack_value_step(to, x + from, y + from * y_stride);
        if (whole < dim) {
            element last[2][PANEL] = {0};
            memcpy(last[0], x + whole, (dim - whole) * sizeof(element));
            memcpy(last[1], y + whole * y_stride, (dim - whole) * sizeof(element));
            pack_value_step(to, last[0], last[1]);
        }
        fetch_rows(wanted, key, key + INPUTS_PER_STEP);
    }
}

#endif
