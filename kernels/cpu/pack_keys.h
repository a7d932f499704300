/* Keys and values of some slots, as panels: a panel's step (element.h) is of 32 keys, INPUTS_PER_STEP dimensions each,
 * or of 32 dimensions of INPUTS_PER_STEP keys' values.
 *
 * A processor does not know the next block of a block table: what is packed next is fetched meanwhile.
 */

#ifndef PACK_KEYS_H
#define PACK_KEYS_H

#include "transpose.h"

/* Rows of a cache, one head's: `rows + slots[i] * stride`. */
typedef struct {
    const element *rows;
    int64_t stride;
    const int64_t *slots;
    int64_t count;
} Slots;

INLINE const element *row_of(const Slots *s, int64_t i) { return s->rows + s->slots[i] * s->stride; }

INLINE void fetch_row(const Slots *s, int64_t i, int64_t bytes) {
    if (i < s->count)
        for (int64_t at = 0; at < bytes; at += 64)
            __builtin_prefetch((const char *)row_of(s, i) + at, 0, 2);
}

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
INLINE void pack_keys(char *packed, const Slots *keys, int64_t dim, const Slots *next) {
    const int64_t steps = (dim + INPUTS_PER_STEP - 1) / INPUTS_PER_STEP, row_bytes = dim * (int64_t)sizeof(element);
    const int64_t end = (keys->count + PANEL - 1) / PANEL * PANEL;
    for (int64_t key = 0; key < end; key += LANES) {
        char *to = packed + key / PANEL * steps * STEP_BYTES + key % PANEL * 4;
        for (int64_t step = 0; step < steps; step += LANES) {
            words rows[LANES];
            if (key + LANES <= keys->count && step + LANES <= dim / INPUTS_PER_STEP) {
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    rows[i] = load_words(row_of(keys, key + i) + step * INPUTS_PER_STEP);
            } else {
                for (int i = 0; i < LANES; i++)
                    rows[i] = key + i < keys->count ? load_steps(row_of(keys, key + i) + step * INPUTS_PER_STEP,
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
        for (int i = 0; i < LANES; i++)
            fetch_row(next, key + i, row_bytes);
    }
}

#if ELEMENT_BF16

/* 32 dimensions of two keys, or of one, as a step of their panel. */
INLINE void store_value_step(char *to, const element *even, const element *odd) {
#if defined(__AVX512BW__)
    static const uint16_t order[2][32] = {
        {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63},
    };
    const __m512i x = _mm512_loadu_si512(even), y = odd ? _mm512_loadu_si512(odd) : _mm512_setzero_si512();
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(x, _mm512_loadu_si512(order[0]), y));
    _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi16(x, _mm512_loadu_si512(order[1]), y));
#else
    for (int v = 0; v < PANEL_VECTORS; v++) {
        elements x, y = {};
        memcpy(&x, even + v * LANES, sizeof x);
        if (odd)
            memcpy(&y, odd + v * LANES, sizeof y);
        store_words(to + v * LANES * 4, __builtin_convertvector(x, words) | __builtin_convertvector(y, words) << 16);
    }
#endif
}

#else

INLINE void store_value_step(char *to, const element *x, const element *none) {
    (void)none;
    memcpy(to, x, STEP_BYTES);
}

#endif

/* Values of `dim` dimensions as panels that begin `panel_bytes` apart; zero beyond the last dimension, and in the last
 * step beyond the last key. */
INLINE void pack_values(char *packed, int64_t panel_bytes, const Slots *values, int64_t dim, const Slots *next) {
    for (int64_t key = 0; key < values->count; key += INPUTS_PER_STEP, packed += STEP_BYTES) {
        const element *x = row_of(values, key);
        const element *y = INPUTS_PER_STEP == 2 && key + 1 < values->count ? row_of(values, key + 1) : NULL;
        char *to = packed;
        int64_t from = 0;
        for (; from + PANEL <= dim; from += PANEL, to += panel_bytes)
            store_value_step(to, x + from, y ? y + from : NULL);
        if (from < dim) {
            element last[2][PANEL] = {0};
            memcpy(last[0], x + from, (dim - from) * sizeof(element));
            if (y)
                memcpy(last[1], y + from, (dim - from) * sizeof(element));
            store_value_step(to, last[0], last[1]);
        }
        for (int i = 0; i < INPUTS_PER_STEP; i++)
            fetch_row(next, key + i, dim * (int64_t)sizeof(element));
    }
}

#endif
