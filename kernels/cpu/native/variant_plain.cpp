// Plain C++: for machines without AVX2, and the yardstick that the other variants' bits are compared with.
#include "kernels.inl"

static bool is_supported() { return true; }
extern const Variant kVariantPlain = {"plain", is_supported, kOperations, 16 << 10};
