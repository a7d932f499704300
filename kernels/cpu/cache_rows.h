/* Keys or values where they lie. A processor cannot guess the next block of a block table: while some are read, those
 * that come next are fetched.
 */

#ifndef CACHE_ROWS_H
#define CACHE_ROWS_H

#include "element.h"

/* Rows of a cache, `stride` bytes from one slot to the next. */
typedef struct {
    const char *rows;
    int64_t stride;
    const int64_t *slots;
    int64_t count;
} Slots;

INLINE const void *row_of(const Slots *s, int64_t i) { return s->rows + s->slots[i] * s->stride; }

/* Some that will be wanted soon, of each row so many bytes; and how many of them, in 65,536ths, for each that is read. */
typedef struct {
    Slots slots;
    int64_t bytes, pace;
} Wanted;

/* While rows from `begin` to `end` are read. */
INLINE void fetch_rows(const Wanted *w, int64_t begin, int64_t end) {
    const int64_t last = end * w->pace >> 16;
    for (int64_t i = begin * w->pace >> 16; i < last; i++) {
        const char *row = row_of(&w->slots, i);
        for (int64_t at = 0; at < w->bytes; at += 64)
            __builtin_prefetch(row + at, 0, 2);
    }
}

/* A step (element.h) of values, as operands: 32 dimensions of two keys. */
#if ELEMENT_BF16 && defined(__AVX512BF16__)

INLINE void load_value_step(operand step[PANEL_VECTORS], const element *even, const element *odd) {
    static const uint16_t order[2][32] = {
        {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63},
    };
    const __m512i x = _mm512_loadu_si512(even), y = _mm512_loadu_si512(odd);
    for (int v = 0; v < PANEL_VECTORS; v++)
        step[v] = (operand)_mm512_permutex2var_epi16(x, _mm512_loadu_si512(order[v]), y);
}

#elif ELEMENT_BF16

INLINE void load_value_step(operand step[PANEL_VECTORS], const element *even, const element *odd) {
    for (int v = 0; v < PANEL_VECTORS; v++)
        step[v] = (operand){load(even + v * LANES), load(odd + v * LANES)};
}

#else

/* A step is of one key only. */
INLINE void load_value_step(operand step[PANEL_VECTORS], const element *x, const element *same) {
    (void)same;
    for (int v = 0; v < PANEL_VECTORS; v++)
        step[v] = load_operand(x + v * LANES);
}

#endif

#endif
