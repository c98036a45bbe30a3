// AVX-512 with byte products (VNNI).
#define BATON_AVX512
#include "kernels.inl"

static bool is_supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
}
extern const Variant kVariantAvx512 = {"avx512", is_supported, kOperations, 512 << 10};
