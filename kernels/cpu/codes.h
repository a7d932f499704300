/* Keys and values in 8 bits; kernels/quantize_kv.py says what they are. Codes are exact in every element type. */

#ifndef CODES_H
#define CODES_H

#include "element.h"

typedef enum { PLAIN, INT8_CODES, FP8_CODES } CacheType; /* as in kernels/kv_cache_in_c.py */

typedef uint8_t code_bytes __attribute__((vector_size(LANES)));
typedef int8_t signed_bytes __attribute__((vector_size(LANES)));

/* Of FP8 codes `from_halves` reads the bits as half precision has them, whose exponents begin at -15 and not at -7: a
 * 256th of what they stand for. */

#if defined(__AVX512F__)

INLINE integers from_signed(code_bytes x) { return (integers)_mm512_cvtepi8_epi32((__m128i)x); }
INLINE code_bytes lowest_bytes(integers x) { return (code_bytes)_mm512_cvtepi32_epi8((__m512i)x); }

INLINE vector from_halves(code_bytes x) {
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16((__m128i)x), 8);
    return (vector)_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbfff)));
}

#elif defined(__AVX2__)

INLINE __m128i in_register(code_bytes x) { return _mm_loadl_epi64((const __m128i *)&x); }
INLINE integers from_signed(code_bytes x) { return (integers)_mm256_cvtepi8_epi32(in_register(x)); }
INLINE code_bytes lowest_bytes(integers x) { return __builtin_convertvector((words)x, code_bytes); }

INLINE vector from_halves(code_bytes x) {
    const __m128i high = _mm_slli_epi16(_mm_cvtepu8_epi16(in_register(x)), 8);
    return (vector)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16((short)0xbfff)));
}

#else

INLINE integers from_signed(code_bytes x) { return __builtin_convertvector((signed_bytes)x, integers); }
INLINE code_bytes lowest_bytes(integers x) { return __builtin_convertvector((words)x, code_bytes); }

INLINE vector from_halves(code_bytes x) {
    const integers bits = __builtin_convertvector(x, integers), size = bits & 0x7f;
    /* Below the least exponent there is no hidden bit. */
    const vector usual = (vector)((size << 20) + (112 << 23));
    const vector small = __builtin_convertvector(size, vector) * 0x1p-17f;
    return (vector)((integers)choose(size < 8, small, usual) | (bits & 0x80) << 24);
}

#endif

INLINE int64_t bytes_of(CacheType type) { return type == PLAIN ? (int64_t)sizeof(element) : 1; }

INLINE vector numbers_of(const CacheType type, code_bytes codes) {
    return type == INT8_CODES ? __builtin_convertvector(from_signed(codes), vector) : from_halves(codes) * 256.0f;
}

/* `row` [dim] from codes. */
INLINE void decode_row(element *row, const CacheType type, const uint8_t *codes, int64_t dim) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        code_bytes some;
        memcpy(&some, codes + d, sizeof some);
        store(row + d, numbers_of(type, some));
    }
    if (d < dim) {
        code_bytes some = {0};
        memcpy(&some, codes + d, dim - d);
        store_some(row + d, numbers_of(type, some), dim - d);
    }
}

INLINE code_bytes codes_of(const CacheType type, vector x) {
    const vector magic = spread(12582912.0f); /* 1.5 · 2^23: what is added to it is rounded to a whole number */
    if (type == INT8_CODES) {
        x = choose(x > 127.0f, spread(127), choose(x < -127.0f, spread(-127), x));
        return lowest_bytes((integers)(x + magic));
    }
    const integers bits = (integers)x;
    vector size = (vector)(bits & 0x7fffffff);
    size = choose(size > 448.0f, spread(448), size);
    const integers usual = (((integers)size + 0x7ffff + (((integers)size >> 20) & 1)) >> 20) - (120 << 3);
    const integers small = (integers)(size * 512.0f + magic);
    const integers code = (integers)choose(size < 0x1p-6f, (vector)small, (vector)usual);
    return lowest_bytes((code & 0x7f) | (bits >> 24 & 0x80));
}

INLINE void encode_row_of(const CacheType type, uint8_t *codes, float *scale, const element *row, int64_t dim) {
    integers most = {0};
    for (int64_t d = 0; d < dim; d += LANES) {
        /* As integers NaN is the largest of all. */
        const integers size = (integers)load_some(row + d, dim - d) & 0x7fffffff;
        most = (integers)choose(size > most, (vector)size, (vector)most);
    }
    int32_t largest_bits = 0;
    for (int i = 0; i < LANES; i++)
        largest_bits = most[i] > largest_bits ? most[i] : largest_bits;
    float largest;
    memcpy(&largest, &largest_bits, sizeof largest);
    *scale = largest / (type == INT8_CODES ? 127.0f : 448.0f);
    const vector divisor = spread(*scale == 0 ? INFINITY : *scale);
    for (int64_t d = 0; d < dim; d += LANES) {
        const code_bytes some = codes_of(type, load_some(row + d, dim - d) / divisor);
        memcpy(codes + d, &some, dim - d < LANES ? dim - d : LANES);
    }
}

/* Codes and the scale of `row` [dim]. */
static inline void encode_row(CacheType type, uint8_t *codes, float *scale, const element *row, int64_t dim) {
    if (type == INT8_CODES)
        encode_row_of(INT8_CODES, codes, scale, row, dim);
    else
        encode_row_of(FP8_CODES, codes, scale, row, dim);
}

#endif
