#include "element.h"

/* What it was compiled from: kernels/sources.py. */
EXPORT const char *compiled_from(void) { return SOURCES_DIGEST; }

/* Whether this CPU has the instructions that the library was compiled for. */
EXPORT int is_supported(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
#if defined(__AVX512BF16__)
    if (!__builtin_cpu_supports("avx512bf16"))
        return 0;
#endif
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx2") &&
           __builtin_cpu_supports("fma");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return 1;
#endif
}
