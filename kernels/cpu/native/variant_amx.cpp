// AVX-512 with matrix units for products of many rows.
#define BATON_AVX512
#define BATON_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "kernels.inl"

static bool is_supported() {
    if (!kVariantAvx512.is_supported()) return false;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool has_tiles = d >> 24 & 1, has_int8 = d >> 25 & 1;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return has_tiles && has_int8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
extern const Variant kVariantAmx = {"amx", is_supported, kOperations, 768 << 10};
