/* Gumbel noise of a request, as kernels/gumbel.py derives it. */

#ifndef GUMBEL_H
#define GUMBEL_H

#include "element.h"

static const uint64_t GAMMA = 0x9E3779B97F4A7C15, MULTIPLIER_1 = 0xBF58476D1CE4E5B9, MULTIPLIER_2 = 0x94D049BB133111EB;

/* Half as many lanes as a `vector` has, and as wide. */
typedef uint64_t longs __attribute__((vector_size(4 * LANES)));

/* SplitMix64's finalizer, of numbers and of vectors. */
#define MIX(z)                                                                                                         \
    ((z) = ((z) ^ ((z) >> 30)) * MULTIPLIER_1, (z) = ((z) ^ ((z) >> 27)) * MULTIPLIER_2, (z) = (z) ^ ((z) >> 31))

INLINE uint64_t noise_key(int64_t seed, int64_t position) {
    uint64_t key = (uint64_t)seed + GAMMA;
    MIX(key);
    key = (key ^ (uint64_t)position) + GAMMA;
    MIX(key);
    return key;
}

INLINE double noise(uint64_t key, int64_t token) {
    uint64_t bits = key + ((uint64_t)token + 1) * GAMMA;
    MIX(bits);
    /* The very last of the 2^53 would be rounded to 1. */
    const double uniform = ((double)(bits >> 11) + 0.5) * 0x1p-53, below_one = 1 - 0x1p-53;
    return -log(-log(uniform < below_one ? uniform : below_one));
}

/* The high halves of the hashes of LANES tokens. Even tokens are hashed beside each other, and odd ones, so that no
 * lane changes its place. */
typedef struct {
    longs even, odd;
} Hashing;

INLINE Hashing hashing_from(uint64_t key, int64_t token) {
    uint64_t hashed[2][LANES / 2];
    for (int i = 0; i < LANES; i++)
        hashed[i % 2][i / 2] = key + ((uint64_t)token + i + 1) * GAMMA;
    Hashing h;
    memcpy(&h, hashed, sizeof h);
    return h;
}

INLINE words high_halves(Hashing h) {
    MIX(h.even);
    MIX(h.odd);
    return (words)((h.even >> 32) | (h.odd & 0xffffffff00000000));
}

INLINE Hashing next_tokens(Hashing h) { return (Hashing){h.even + LANES * GAMMA, h.odd + LANES * GAMMA}; }

#endif
