/* Attention of so few rows that packing keys and values would take longer than reading them where they lie.
 *
 * A score is then a sum over lanes, and a step of values is put together each time it is needed.
 */

#ifndef FEW_ROWS_H
#define FEW_ROWS_H

#include "cache_rows.h"
#include "transpose.h"

/* Lane i is the sum of the lanes of x[i]. */
INLINE vector sums_of_each(vector x[LANES]) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) {
            words first, second;
            interleave((words)x[i], (words)x[i + half], &first, &second);
            x[i] = (vector)first + (vector)second;
        }
    return x[0];
}

/* `scores` [rows, stride] of all keys, rounded up to LANES: what is beyond the last one is any number. `dim` is a
 * multiple of what an operand holds. */
INLINE void score_few(float *scores, int64_t stride, const element *queries, int64_t query_stride, int64_t rows,
                      const Slots *keys, int64_t dim, const Wanted *wanted) {
    for (int64_t key = 0; key < keys->count; key += LANES) {
        const element *at[LANES];
        for (int i = 0; i < LANES; i++)
            at[i] = row_of(keys, key + i < keys->count ? key + i : keys->count - 1);
        for (int64_t row = 0; row < rows; row++) {
            vector sums[LANES] = {};
            for (int64_t from = 0; from < dim; from += LANES * INPUTS_PER_STEP) {
                const operand query = load_operand(queries + row * query_stride + from);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    sums[i] = multiply_add(sums[i], load_operand(at[i] + from), query);
            }
            store_floats(scores + row * stride + key, sums_of_each(sums));
            /* Not all at once: there is only so much that can be on its way. */
            fetch_rows(wanted, key + row * LANES / rows, key + (row + 1) * LANES / rows);
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
    for (int64_t key = 0; key < values->count; key += INPUTS_PER_STEP) {
        const int64_t last = key + INPUTS_PER_STEP <= values->count ? key + INPUTS_PER_STEP - 1 : key;
        operand step[PANEL_VECTORS];
        load_value_step(step, row_of(values, key) + from, row_of(values, last) + from);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const operand weight = spread_operand(weights + r * weights_stride + key, INPUTS_PER_STEP);
#pragma GCC unroll 8
            for (int v = 0; v < PANEL_VECTORS; v++)
                s[r][v] = multiply_add(s[r][v], step[v], weight);
        }
        fetch_rows(wanted, key, key + INPUTS_PER_STEP);
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
