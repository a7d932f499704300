/* Codes of a cache as elements, rows one behind the other, while others are fetched. */

#ifndef DECODE_H
#define DECODE_H

#include "cache_rows.h"
#include "codes.h"

enum { FETCHED_AFTER_ROWS = 8 };

/* How codes of a type are decoded: by tables, of both bytes of an element by its code without the sign, or by computing
 * it. */
typedef struct {
    CacheType type;
    int by_tables;
    _Alignas(64) uint8_t low[128], high[128];
} Decoding;

#if ELEMENT_BF16 && defined(__AVX512F__)
#define TABLES 1
#endif

static inline Decoding decoding_of(CacheType type) {
    Decoding d = {.type = type};
#if TABLES
    d.by_tables = __builtin_cpu_supports("avx512vbmi");
    element elements_[128];
    uint8_t codes[128];
    for (int i = 0; i < 128; i++)
        codes[i] = (uint8_t)i;
    decode_row(elements_, type, codes, 128);
    for (int i = 0; i < 128; i++) {
        d.low[i] = (uint8_t)elements_[i];
        d.high[i] = (uint8_t)(elements_[i] >> 8);
    }
#endif
    return d;
}

INLINE void decode_rows_one_by_one(const Decoding *d, element *rows, const Slots *codes, int64_t begin, int64_t end,
                                   int64_t dim, const Wanted *wanted) {
    const CacheType type = d->type;
    for (int64_t i = begin; i < end; begin = i) {
        for (; i < end && i < begin + FETCHED_AFTER_ROWS; i++, rows += dim)
            if (type == INT8_CODES)
                decode_row(rows, INT8_CODES, row_of(codes, i), dim);
            else
                decode_row(rows, FP8_CODES, row_of(codes, i), dim);
        fetch_rows(wanted, begin, i);
    }
}

#if TABLES

/* Instructions that not every CPU with AVX-512 and bfloat16 has. */
__attribute__((target("avx512vbmi"))) static inline void
decode_rows_by_tables(const Decoding *d, element *rows, const Slots *codes, int64_t begin, int64_t end, int64_t dim,
                      const Wanted *wanted) {
    const __m512i low = _mm512_load_si512(d->low), later_low = _mm512_load_si512(d->low + 64);
    const __m512i high = _mm512_load_si512(d->high), later_high = _mm512_load_si512(d->high + 64);
    /* Bytes are interleaved within 128 bits: so this is where the codes must be before. */
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8((char)0x80);
    const int64_t whole = dim / 64 * 64;
    for (int64_t i = begin; i < end; begin = i) {
        for (; i < end && i < begin + FETCHED_AFTER_ROWS; i++, rows += dim) {
            const uint8_t *row = row_of(codes, i);
            for (int64_t at = 0; at < whole; at += 64) {
                const __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(row + at));
                const __m512i size = d->type == INT8_CODES ? _mm512_abs_epi8(x) : x;
                const __m512i first = _mm512_permutex2var_epi8(low, size, later_low);
                const __m512i second = _mm512_permutex2var_epi8(high, size, later_high);
                const __m512i with_sign = _mm512_ternarylogic_epi64(second, x, sign, 0xf8);
                _mm512_storeu_si512(rows + at, _mm512_unpacklo_epi8(first, with_sign));
                _mm512_storeu_si512(rows + at + 32, _mm512_unpackhi_epi8(first, with_sign));
            }
            if (whole < dim)
                decode_row(rows + whole, d->type, row + whole, dim - whole);
        }
        fetch_rows(wanted, begin, i);
    }
}

#endif

/* `rows` [end - begin, dim] from some of the codes. */
static inline void decode_rows(const Decoding *d, element *rows, const Slots *codes, int64_t begin, int64_t end,
                               int64_t dim, const Wanted *wanted) {
#if TABLES
    if (d->by_tables) {
        decode_rows_by_tables(d, rows, codes, begin, end, dim, wanted);
        return;
    }
#endif
    decode_rows_one_by_one(d, rows, codes, begin, end, dim, wanted);
}

#endif
