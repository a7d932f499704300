/* What the kernels for bfloat16 on CPUs with AVX512-BF16 have in common. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define INLINE static inline __attribute__((always_inline))

/* Whether this CPU has the instructions. Those with tile registers (AMX) are left to libraries that use them. */
INLINE int cpu_is_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           !__builtin_cpu_supports("amx-bf16");
}

TARGET INLINE __m512bh broadcast(const uint16_t *x, int bytes) {
    uint32_t pair = 0;
    memcpy(&pair, x, bytes);
    return (__m512bh)_mm512_set1_epi32((int)pair);
}

#endif
