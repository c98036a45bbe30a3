// AVX-512 with matrix units for products of many rows.
#define BATON_AVX512
#define BATON_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(BATON_SOFT_TILES)
#include "soft_tiles.h"
#endif
#include "kernels.inl"

static bool has_tiles() {
#if defined(BATON_SOFT_TILES)
    return true;
#else
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool has_units = d >> 24 & 1, has_int8 = d >> 25 & 1;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return has_units && has_int8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}
static bool is_supported() { return kVariantAvx512.is_supported() && has_tiles(); }
extern const Variant kVariantAmx = {"amx", is_supported, kOperations, 768 << 10};
