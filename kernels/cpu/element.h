/* What the kernels compute with: `element` is what a library was compiled for (bfloat16 with ELEMENT_BF16, else
 * float32), `vector` as many floats as a register of the instruction set holds. Everything else is plain C.
 *
 * A product of a matrix is made a step at a time: a step is INPUTS_PER_STEP inputs of every one of PANEL outputs, side
 * by side in STEP_BYTES. `operand` is what a register holds of it, or a row's inputs of that step in every lane.
 */

#ifndef ELEMENT_H
#define ELEMENT_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

enum {
#if defined(__AVX512F__)
    LANES = 16,
    GROUP_ROWS = 9, /* rows whose sums of a panel stay in registers; with more, addresses no longer do */
#elif defined(__AVX2__)
    LANES = 8,
    GROUP_ROWS = 2,
#else
    LANES = 4,
    GROUP_ROWS = 2,
#endif
    PANEL = 32,
    PANEL_VECTORS = PANEL / LANES,
    STEP_BYTES = PANEL * 4,
#if ELEMENT_BF16
    INPUTS_PER_STEP = 2
#else
    INPUTS_PER_STEP = 1
#endif
};

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

INLINE vector spread(float x) { return x - (vector){}; }

INLINE vector load_floats(const float *x) {
    vector y;
    memcpy(&y, x, sizeof y);
    return y;
}

INLINE void store_floats(float *x, vector y) { memcpy(x, &y, sizeof y); }

/* Lanes of `x` where `mask`, a comparison's result, holds, else of `y`. */
INLINE vector choose(integers mask, vector x, vector y) { return (vector)((mask & (integers)x) | (~mask & (integers)y)); }

/* A bit for each lane where `mask` holds, lane 0 in the lowest. */
INLINE uint32_t lanes_of(integers mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
    return (mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8);
#endif
}

INLINE vector larger_of(vector x, vector y) { return choose(x > y, x, y); }

#if ELEMENT_BF16

typedef uint16_t element;
typedef uint16_t elements __attribute__((vector_size(2 * LANES)));

INLINE float to_float(element x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

INLINE vector load(const element *x) {
    elements y;
    memcpy(&y, x, sizeof y);
    return (vector)(__builtin_convertvector(y, words) << 16);
}

/* Rounded to the nearest, ties to even. */
INLINE elements rounded(vector x) {
#if defined(__AVX512BF16__)
    return (elements)_mm512_cvtneps_pbh((__m512)x);
#else
    const words bits = (words)x;
    const words up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const words is_nan = (words)(x != x);
    return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & up), elements);
#endif
}

#else

typedef float element;
typedef vector elements;

INLINE float to_float(element x) { return x; }
INLINE vector load(const element *x) { return load_floats(x); }
INLINE elements rounded(vector x) { return x; }

#endif

INLINE void store(element *x, vector y) {
    const elements z = rounded(y);
    memcpy(x, &z, sizeof z);
}

/* The first `count` lanes, all if there are more. */
INLINE void store_some(element *x, vector y, int64_t count) {
    const elements z = rounded(y);
    if (count >= LANES)
        memcpy(x, &z, sizeof z);
    else if (count > 0)
        memcpy(x, &z, count * sizeof(element));
}

INLINE vector load_some(const element *x, int64_t count) {
    element y[LANES] = {0};
    if (count >= LANES)
        return load(x);
    if (count > 0)
        memcpy(y, x, count * sizeof(element));
    return load(y);
}

INLINE vector load_some_floats(const float *x, int64_t count) {
    float y[LANES] = {0};
    if (count >= LANES)
        return load_floats(x);
    if (count > 0)
        memcpy(y, x, count * sizeof(float));
    return load_floats(y);
}

#if ELEMENT_BF16 && defined(__AVX512BF16__)

typedef __m512bh operand;

INLINE operand load_operand(const void *x) { return (operand)_mm512_loadu_si512(x); }
INLINE void store_operand(void *x, operand y) { _mm512_storeu_si512(x, (__m512i)y); }

/* What is behind `count` inputs counts as zero. */
INLINE operand spread_operand(const element *x, int count) {
    uint32_t pair = 0;
    memcpy(&pair, x, count * sizeof(element));
    return (operand)_mm512_set1_epi32((int)pair);
}

INLINE vector multiply_add(vector sum, operand x, operand y) { return (vector)_mm512_dpbf16_ps((__m512)sum, x, y); }

#elif ELEMENT_BF16

typedef struct {
    vector even, odd;
} operand;

INLINE operand split(words pairs) { return (operand){(vector)(pairs << 16), (vector)(pairs & 0xffff0000u)}; }

INLINE operand load_operand(const void *x) {
    words pairs;
    memcpy(&pairs, x, sizeof pairs);
    return split(pairs);
}

INLINE void store_operand(void *x, operand y) {
    const words pairs = (words)y.even >> 16 | ((words)y.odd & 0xffff0000u);
    memcpy(x, &pairs, sizeof pairs);
}

INLINE operand spread_operand(const element *x, int count) {
    return (operand){spread(to_float(x[0])), spread(count > 1 ? to_float(x[1]) : 0)};
}

INLINE vector multiply_add(vector sum, operand x, operand y) { return sum + x.even * y.even + x.odd * y.odd; }

#else

typedef vector operand;

INLINE operand load_operand(const void *x) { return load_floats(x); }
INLINE void store_operand(void *x, operand y) { store_floats(x, y); }
INLINE operand spread_operand(const element *x, int count) { return spread(count > 0 ? *x : 0); }
INLINE vector multiply_add(vector sum, operand x, operand y) { return sum + x * y; }

#endif

/* Of all lanes, halves of them at a time. */
INLINE float sum_of(vector x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] += x[i + half];
    return x[0];
#endif
}

INLINE float largest_of(vector x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
#endif
}

/* 2^x, to the last bits of a float; 0 below 2^-126, infinite from 2^128 on, NaN of NaN. */
INLINE vector power_of_two(vector x) {
    const vector low = spread(-126), high = spread(128);
#if defined(__AVX512F__)
    const vector inside = (vector)_mm512_min_ps((__m512)high, (__m512)x); /* NaN where x is */
    const vector whole = (vector)_mm512_roundscale_ps((__m512)inside, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vector rest = inside - whole;
#else
    const vector inside = choose(x > low, choose(x < high, x, high), low);
    const vector shifted = inside + 12582912.0f; /* 1.5 · 2^23: what remains are whole numbers */
    const integers whole = (integers)shifted - 0x4b400000;
    const vector rest = inside - (shifted - 12582912.0f);
#endif
    /* Taylor's series of 2^rest, |rest| <= 1/2. */
    vector y = spread(1.5252734e-5f);
    y = y * rest + 1.5403530e-4f;
    y = y * rest + 1.3333558e-3f;
    y = y * rest + 9.6181291e-3f;
    y = y * rest + 5.5504109e-2f;
    y = y * rest + 2.4022651e-1f;
    y = y * rest + 6.9314718e-1f;
    y = y * rest + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 is_seen = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ);
    return (vector)_mm512_maskz_scalef_ps(is_seen, (__m512)y, (__m512)whole);
#else
    /* In two factors, since the exponent of one alone does not reach 2^128. */
    const integers half = whole >> 1;
    y = y * (vector)((half + 127) << 23) * (vector)((whole - half + 127) << 23);
    y = choose(x < low, (vector){}, y);
    return choose(x == x, y, x);
#endif
}

INLINE vector exponential(vector x) { return power_of_two(x * 1.44269504f); }

#endif
