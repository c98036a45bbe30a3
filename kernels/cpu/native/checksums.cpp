// CRC-32C (Castagnoli) of bytes in memory, folded by carry-less products where the processor has wide ones.
//
// Bytes are a polynomial over GF(2) whose first bit has the highest power; bits are kept reflected, as the CRC is. To
// fold a 128-bit lane over D bits is to take its halves times x^(D+64) and x^D modulo the CRC's polynomial. A product of
// two reflected 64-bit halves comes out one bit low, hence D - 1. (Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel 2009.)
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "checksums.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // reflected

struct Table {
    uint32_t of_byte[256];
    constexpr Table() : of_byte() {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t value = byte;
            for (int bit = 0; bit < 8; bit++) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
            of_byte[byte] = value;
        }
    }
};
constexpr Table kTable;

uint32_t plain(uint32_t state, const char* bytes, size_t count) {
    for (; count; count--) state = (state >> 8) ^ kTable.of_byte[(state ^ static_cast<unsigned char>(*bytes++)) & 255];
    return state;
}

#if defined(__x86_64__)
#define BATON_SSE42 __attribute__((target("sse4.2")))
#define BATON_FOLDING __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2")))

BATON_SSE42 uint32_t by_words(uint32_t state, const char* bytes, size_t count) {
    uint64_t wide = state;
    for (; count >= 8; count -= 8, bytes += 8) {
        uint64_t word;
        std::memcpy(&word, bytes, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    state = static_cast<uint32_t>(wide);
    for (; count; count--) state = _mm_crc32_u8(state, static_cast<unsigned char>(*bytes++));
    return state;
}

// x^n modulo the polynomial, as the upper half of a reflected 64-bit factor.
constexpr uint64_t factor(int n) {
    uint32_t value = 0x80000000u;
    for (; n; n--) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
    return static_cast<uint64_t>(value) << 32;
}

struct Fold {
    uint64_t low, high;
    constexpr explicit Fold(int distance_bits) : low(factor(distance_bits + 63)), high(factor(distance_bits - 1)) {}
};
constexpr Fold kBy2048(2048), kBy512(512), kBy384(384), kBy256(256), kBy128(128);

BATON_FOLDING inline __m512i lanes(const Fold& fold) {
    return _mm512_broadcast_i32x4(_mm_set_epi64x(static_cast<long long>(fold.high), static_cast<long long>(fold.low)));
}

BATON_FOLDING inline __m512i folded(__m512i value, __m512i factors, __m512i onto) {
    const __m512i low = _mm512_clmulepi64_epi128(value, factors, 0x00), high = _mm512_clmulepi64_epi128(value, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, onto, 0x96);  // xor of three
}

BATON_FOLDING inline __m128i folded(__m128i value, const Fold& fold, __m128i onto) {
    const __m128i factors = _mm_set_epi64x(static_cast<long long>(fold.high), static_cast<long long>(fold.low));
    return _mm_xor_si128(onto, _mm_xor_si128(_mm_clmulepi64_si128(value, factors, 0x00), _mm_clmulepi64_si128(value, factors, 0x11)));
}

BATON_FOLDING uint32_t by_folding(uint32_t state, const char* bytes, size_t count) {
    if (count < 256) return by_words(state, bytes, count);
    __m512i parts[4];
    for (int i = 0; i < 4; i++) parts[i] = _mm512_loadu_si512(bytes + 64 * i);
    parts[0] = _mm512_xor_si512(parts[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
    const __m512i far = lanes(kBy2048), near = lanes(kBy512);
    for (bytes += 256, count -= 256; count >= 256; bytes += 256, count -= 256)
        for (int i = 0; i < 4; i++) parts[i] = folded(parts[i], far, _mm512_loadu_si512(bytes + 64 * i));
    __m512i all = parts[0];
    for (int i = 1; i < 4; i++) all = folded(all, near, parts[i]);
    for (; count >= 64; bytes += 64, count -= 64) all = folded(all, near, _mm512_loadu_si512(bytes));
    __m128i last = _mm512_extracti32x4_epi32(all, 3);
    last = folded(_mm512_castsi512_si128(all), kBy384, last);
    last = folded(_mm512_extracti32x4_epi32(all, 1), kBy256, last);
    last = folded(_mm512_extracti32x4_epi32(all, 2), kBy128, last);
    uint64_t wide = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(last)));
    wide = _mm_crc32_u64(wide, static_cast<uint64_t>(_mm_extract_epi64(last, 1)));
    return by_words(static_cast<uint32_t>(wide), bytes, count);
}
#endif

using Update = uint32_t (*)(uint32_t state, const char* bytes, size_t count);

Update best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_words = __builtin_cpu_supports("sse4.2");
    if (has_words && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul"))
        return by_folding;
    if (has_words) return by_words;
#endif
    return plain;
}

const Update kUpdates[] = {
#if defined(__x86_64__)
    by_folding, by_words,
#endif
    plain,
};

}  // namespace

uint32_t crc32c(uint32_t before, const char* bytes, size_t count) {
    static const Update update = best();
    return ~update(~before, bytes, count);
}

uint32_t crc32c_of(int32_t way, uint32_t before, const char* bytes, size_t count) {
    return ~kUpdates[way](~before, bytes, count);
}

int32_t crc32c_num_ways() { return sizeof(kUpdates) / sizeof(kUpdates[0]); }

int32_t crc32c_best_way() {
    const Update chosen = best();
    int32_t way = 0;
    while (kUpdates[way] != chosen) way++;
    return way;
}
