/* Some rows times one panel: the innermost loop of every matrix product here. */

#ifndef PANEL_H
#define PANEL_H

#include "element.h"

/* What is fetched meanwhile: `stride` bytes from `ahead` on in every step. */
typedef struct {
    const char *ahead;
    int64_t stride;
} Fetching;

INLINE void fetch(Fetching *f) {
    /* Into the second-level cache where memory is what the step waits for, else (measured) into the first. */
    if (f->stride >= 64) {
        for (int64_t i = 0; i < f->stride; i += 64)
            __builtin_prefetch(f->ahead + i, 0, 2);
    } else {
        __builtin_prefetch(f->ahead, 0, 3);
    }
    f->ahead += f->stride;
}

/* `sums` [rows, outputs], `rows` a constant: what they are times `factors` (one per row; NULL is zero), or `start`
 * [outputs] where that is not NULL, plus the product of `x` [rows, inputs] with `panel`, whose outputs are `vectors`
 * (a constant) vectors. */
INLINE void multiply_rows(float *sums, int64_t sums_stride, const float *factors, const float *start, const element *x,
                          int64_t x_stride, const char *panel, int64_t inputs, const int rows, Fetching fetching,
                          const int vectors) {
    vector s[GROUP_ROWS][PANEL_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            s[r][v] = start     ? load_floats(start + v * LANES)
                      : factors ? load_floats(sums + r * sums_stride + v * LANES) * factors[r]
                                : (vector){};
    const int64_t whole = inputs / INPUTS_PER_STEP * INPUTS_PER_STEP;
    int64_t input = 0;
    for (; input < whole; input += INPUTS_PER_STEP, panel += vectors * LANES * 4) {
        operand w[PANEL_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            w[v] = load_operand(panel + v * LANES * 4);
        if (fetching.stride)
            fetch(&fetching);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const operand y = spread_operand(x + r * x_stride + input, INPUTS_PER_STEP);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                s[r][v] = multiply_add(s[r][v], w[v], y);
        }
    }
    if (input < inputs)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const operand y = spread_operand(x + r * x_stride + input, (int)(inputs - input));
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                s[r][v] = multiply_add(s[r][v], load_operand(panel + v * LANES * 4), y);
        }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            store_floats(sums + r * sums_stride + v * LANES, s[r][v]);
}

/* As `multiply_rows`, for any number of rows up to GROUP_ROWS. */
INLINE void multiply_group_of(float *sums, int64_t sums_stride, const float *factors, const float *start,
                              const element *x, int64_t x_stride, const char *panel, int64_t inputs, int64_t rows,
                              Fetching fetching, const int vectors) {
    switch (rows) {
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        if (n <= GROUP_ROWS)                                                                                           \
            multiply_rows(sums, sums_stride, factors, start, x, x_stride, panel, inputs, n <= GROUP_ROWS ? n : 1,      \
                          fetching, vectors);                                                                          \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9)
#undef CASE
    }
}

/* The same for a panel of PANEL outputs. */
INLINE void multiply_group(float *sums, int64_t sums_stride, const float *factors, const float *start,
                           const element *x, int64_t x_stride, const char *panel, int64_t inputs, int64_t rows,
                           Fetching fetching) {
    multiply_group_of(sums, sums_stride, factors, start, x, x_stride, panel, inputs, rows, fetching, PANEL_VECTORS);
}

#endif
