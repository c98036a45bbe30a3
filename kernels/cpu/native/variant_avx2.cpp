// AVX2 with FMA and F16C. Compiled with those flags; entered only where the processor has them.
#define BATON_AVX2
#include "kernels.inl"

static bool is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
extern const Variant kVariantAvx2 = {"avx2", is_supported, kOperations, 160 << 10};
