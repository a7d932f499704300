/* Quantized weights on their way into a product. In panels as any weight, and there GROUP_INPUTS inputs in a group:
 *
 * INT8: codes in the order of elements, -127…127, exact in every element type. What they are multiplied with, one scale
 * for each output, waits for the sums.
 * INT4: PANEL scales and PANEL centres in bfloat16, then codes, 0…15. 128 of them, in the order of elements, are 16
 * words: the first 16 in their lowest four bits, and so on. An element is (code - 8) · scale + centre, rounded.
 */

#ifndef QUANTIZED_H
#define QUANTIZED_H

#include "linear.h"
#include "panel.h"

enum {
    GROUP_INPUTS = 32,
    INT8_GROUP_BYTES = GROUP_INPUTS * PANEL,
    INT4_CODES = 2 * PANEL * sizeof(uint16_t), /* where in a group they begin */
    INT4_GROUP_BYTES = INT4_CODES + GROUP_INPUTS * PANEL / 2,
    /* How far what is fetched is ahead. */
    AHEAD_OF_PRODUCT_BYTES = 2048,
    AHEAD_OF_EXPANSION_BYTES = 4096
};

INLINE int64_t group_bytes(const Format format) { return format == INT8 ? INT8_GROUP_BYTES : INT4_GROUP_BYTES; }

#if ELEMENT_BF16 && defined(__AVX512BF16__)

/* Of INT4: scales and centres for a step, in the order of elements. */
typedef struct {
    __m512 scales[4], centres[4];
} Grid;

INLINE Grid grid_of(const Format format, const char *group) {
    Grid g = {0};
    if (format == INT4) {
        const __m512i scales = _mm512_loadu_si512(group), centres = _mm512_loadu_si512(group + 2 * PANEL);
        /* Every bfloat16 becomes the upper half of two floats: a step has two elements for an output. */
        const __m512i twice = _mm512_set_epi16(7, 0, 7, 0, 6, 0, 6, 0, 5, 0, 5, 0, 4, 0, 4, 0, 3, 0, 3, 0, 2, 0, 2, 0, 1,
                                               0, 1, 0, 0, 0, 0, 0);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const __m512i place = _mm512_add_epi16(twice, _mm512_set1_epi16(8 * k));
            g.scales[k] = (__m512)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, place, scales);
            g.centres[k] = (__m512)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, place, centres);
        }
    }
    return g;
}

INLINE operand operand_of_int8(const char *codes) {
    const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes));
    const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + 16)));
    return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}

/* The `place`th of the four in 64 bytes. */
INLINE operand operand_of_int4(const Grid *g, __m512i codes, const int place) {
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const int l = 2 * (place % 2), h = l + 1;
    /* The lowest four bits of an index count: nothing has to be masked. */
    const __m512 low = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 8 * place), values);
    const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 8 * place + 4), values);
    return _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(high, g->scales[h], g->centres[h]),
                               _mm512_fmadd_ps(low, g->scales[l], g->centres[l]));
}

enum { STEPS_AT_ONCE = 2 };

/* As many steps as that from a group. */
INLINE void load_operands(operand y[STEPS_AT_ONCE][PANEL_VECTORS], const Format format, const char *group,
                          const Grid *g, int step) {
    if (format == INT8) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            y[i / 2][i % 2] = operand_of_int8(group + step * INPUTS_PER_STEP * PANEL + i * PANEL);
    } else {
        const __m512i x = _mm512_loadu_si512(group + INT4_CODES + step * PANEL);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            y[i / 2][i % 2] = operand_of_int4(g, x, i);
    }
}

/* The elements of a group, as `multiply_rows` reads them. */
INLINE void expand_group(element *y, const Format format, const char *group) {
    const Grid g = grid_of(format, group);
    for (int i = 0; i < group_bytes(format); i += 64)
        __builtin_prefetch(group + AHEAD_OF_EXPANSION_BYTES + i, 0, 2);
    for (int step = 0; step < GROUP_INPUTS / INPUTS_PER_STEP; step += STEPS_AT_ONCE) {
        operand w[STEPS_AT_ONCE][PANEL_VECTORS];
        load_operands(w, format, group, &g, step);
        memcpy(y + step * INPUTS_PER_STEP * PANEL, w, sizeof w);
    }
}

/* As `multiply_rows` over whole groups, with elements that are in registers only: for a few rows, storing them and
 * loading them again takes longer than the product. */
INLINE void multiply_codes(float *sums, const float *start, const element *x, int64_t x_stride, const Format format,
                           const char *panel, int64_t groups, const int rows) {
    vector s[GROUP_ROWS][PANEL_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECTORS; v++)
            s[r][v] = start ? load_floats(start + v * LANES) : (vector){};
    for (int64_t group = 0; group < groups; group++, panel += group_bytes(format)) {
        const Grid g = grid_of(format, panel);
        const int64_t step_bytes = group_bytes(format) / (GROUP_INPUTS / INPUTS_PER_STEP);
        for (int step = 0; step < GROUP_INPUTS / INPUTS_PER_STEP; step += STEPS_AT_ONCE) {
            operand w[STEPS_AT_ONCE][PANEL_VECTORS];
            load_operands(w, format, panel, &g, step);
            for (int64_t i = 0; i < STEPS_AT_ONCE * step_bytes; i += 64)
                __builtin_prefetch(panel + AHEAD_OF_PRODUCT_BYTES + step * step_bytes + i, 0, 3);
#pragma GCC unroll 2
            for (int i = 0; i < STEPS_AT_ONCE; i++, x += INPUTS_PER_STEP)
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) {
                    const operand y = spread_operand(x + r * x_stride, INPUTS_PER_STEP);
#pragma GCC unroll 2
                    for (int v = 0; v < PANEL_VECTORS; v++)
                        s[r][v] = multiply_add(s[r][v], w[i][v], y);
                }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECTORS; v++)
            store_floats(sums + r * PANEL + v * LANES, s[r][v]);
}

/* Beyond, making elements once is faster. */
INLINE int64_t max_rows_of_codes(const Format format) { return format == INT8 ? 4 * GROUP_ROWS : GROUP_ROWS; }

#define MULTIPLIES_CODES 1

#else

typedef int8_t signed_bytes __attribute__((vector_size(LANES)));
typedef int16_t signed_halves __attribute__((vector_size(2 * LANES)));

INLINE float float_of(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

INLINE void expand_group(element *y, const Format format, const char *group) {
    enum { ELEMENTS_IN_GROUP = GROUP_INPUTS * PANEL, ELEMENTS_IN_STEP = PANEL * INPUTS_PER_STEP };
    if (format == INT8) {
        for (int i = 0; i < ELEMENTS_IN_GROUP; i += LANES) {
            signed_bytes codes;
            memcpy(&codes, group + i, sizeof codes);
            /* A step at a time: of longer ones GCC 12 makes single elements. */
            const integers x = __builtin_convertvector(__builtin_convertvector(codes, signed_halves), integers);
            store(y + i, __builtin_convertvector(x, vector));
        }
        return;
    }
    uint16_t grid[2][PANEL];
    float scales[ELEMENTS_IN_STEP], centres[ELEMENTS_IN_STEP];
    memcpy(grid, group, sizeof grid);
    for (int i = 0; i < ELEMENTS_IN_STEP; i++) {
        scales[i] = float_of(grid[0][i / INPUTS_PER_STEP]);
        centres[i] = float_of(grid[1][i / INPUTS_PER_STEP]);
    }
    const char *codes = group + INT4_CODES;
    for (int i = 0; i < ELEMENTS_IN_GROUP; i += 128, codes += 64)
        for (int word = 0; word < 16; word += LANES) {
            words x;
            memcpy(&x, codes + 4 * word, sizeof x);
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++, x >>= 4) {
                const int place = 16 * k + word, in_step = place % ELEMENTS_IN_STEP;
                const vector code = __builtin_convertvector((integers)(x & 15) - 8, vector);
                store(y + i + place, code * load_floats(scales + in_step) + load_floats(centres + in_step));
            }
        }
}

#endif

#endif
