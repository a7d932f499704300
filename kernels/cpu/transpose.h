/* Words of 32 bits from rows to columns: so the steps (element.h) of a row come to where a panel has them. */

#ifndef TRANSPOSE_H
#define TRANSPOSE_H

#include "element.h"

/* The lanes of both by turns: of their first halves, and of their second ones. */
INLINE void interleave(words x, words y, words *first, words *second) {
#if defined(__AVX512F__)
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i later = _mm512_add_epi32(order, _mm512_set1_epi32(8));
    *first = (words)_mm512_permutex2var_epi32((__m512i)x, order, (__m512i)y);
    *second = (words)_mm512_permutex2var_epi32((__m512i)x, later, (__m512i)y);
#elif defined(__AVX2__)
    const __m256i low = _mm256_unpacklo_epi32((__m256i)x, (__m256i)y);
    const __m256i high = _mm256_unpackhi_epi32((__m256i)x, (__m256i)y);
    *first = (words)_mm256_permute2x128_si256(low, high, 0x20);
    *second = (words)_mm256_permute2x128_si256(low, high, 0x31);
#else
    *first = (words){x[0], y[0], x[1], y[1]};
    *second = (words){x[2], y[2], x[3], y[3]};
#endif
}

/* Rows half of all apart are interleaved. */
INLINE void turn(words rows[LANES]) {
    words turned[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++)
        interleave(rows[i], rows[i + LANES / 2], &turned[2 * i], &turned[2 * i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        rows[i] = turned[i];
}

/* LANES rows become what the columns were: each time, the places' bits turn by one, and when row and lane have changed
 * places, it is done. */
INLINE void transpose(words rows[LANES]) {
    turn(rows);
    turn(rows);
    if (LANES > 4)
        turn(rows);
    if (LANES > 8)
        turn(rows);
}

#endif
