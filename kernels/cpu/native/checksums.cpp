// CRC-32C (Castagnoli) of bytes in memory, folded by carry-less products where the processor has wide ones; and copies.
//
// What is long is beyond every cache: a copy is stored past the caches, which spares reading what is overwritten. Where the
// processor fetches ahead within a page only (Intel), four pages are gone through side by side: one after the other they
// take a third longer. Where it goes on from page to page (AMD, Zen 4) it is the other way round.
//
// Bytes are a polynomial over GF(2) whose first bit has the highest power; bits are kept reflected, as the CRC is. To
// fold a 128-bit lane over D bits is to take its halves times x^(D+64) and x^D modulo the CRC's polynomial. A product of
// two reflected 64-bit halves comes out one bit low, hence D - 1. (Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel 2009.)
#include <algorithm>
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
constexpr size_t kPageBytes = 4096, kPages = 4;
constexpr Fold kByPage(8 * kPageBytes), kBy2048(2048), kBy512(512), kBy384(384), kBy256(256), kBy128(128);

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

// All bytes so far, as what is to be folded onto the next 64.
BATON_FOLDING inline uint32_t reduced(__m512i all) {
    __m128i last = _mm512_extracti32x4_epi32(all, 3);
    last = folded(_mm512_castsi512_si128(all), kBy384, last);
    last = folded(_mm512_extracti32x4_epi32(all, 1), kBy256, last);
    last = folded(_mm512_extracti32x4_epi32(all, 2), kBy128, last);
    uint64_t wide = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(last)));
    wide = _mm_crc32_u64(wide, static_cast<uint64_t>(_mm_extract_epi64(last, 1)));
    return static_cast<uint32_t>(wide);
}

// Where bytes come from and, of a copy, go to. Both move on together.
template <bool kIsCopied>
struct Course {
    const char* from;
    char* to;  // of a copy: a multiple of 64
    size_t count;

    BATON_FOLDING __m512i at(size_t offset) const {
        const __m512i value = _mm512_loadu_si512(from + offset);
        if (kIsCopied) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + offset), value);
        return value;
    }
    void skip(size_t num_bytes) {
        from += num_bytes;
        if (kIsCopied) to += num_bytes;
        count -= num_bytes;
    }
};

// Folds kPages pages onto `all`.
template <bool kIsCopied, bool kIsSummed>
BATON_FOLDING inline __m512i by_pages(__m512i all, const Course<kIsCopied>& course, __m512i page, __m512i near) {
    __m512i parts[kPages];
    for (size_t i = 0; i < kPages; i++) parts[i] = course.at(i * kPageBytes);
    if (kIsSummed) parts[0] = folded(all, near, parts[0]);
    for (size_t offset = 64; offset < kPageBytes; offset += 64)
        for (size_t i = 0; i < kPages; i++) {
            const __m512i value = course.at(i * kPageBytes + offset);
            if (kIsSummed) parts[i] = folded(parts[i], near, value);
        }
    if (kIsSummed)
        for (size_t i = 1; i < kPages; i++) parts[i] = folded(parts[i - 1], page, parts[i]);
    return parts[kPages - 1];
}

// At least 64 bytes; less than 64 are left.
template <bool kIsCopied, bool kIsSummed, bool kByPages>
BATON_FOLDING inline uint32_t by_lanes(uint32_t state, Course<kIsCopied>& course) {
    const __m512i page = lanes(kByPage), far = lanes(kBy2048), near = lanes(kBy512);
    __m512i all = _mm512_xor_si512(course.at(0), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
    course.skip(64);
    if (kByPages)
        for (; course.count >= kPages * kPageBytes; course.skip(kPages * kPageBytes)) all = by_pages<kIsCopied, kIsSummed>(all, course, page, near);
    if (course.count >= 256) {
        __m512i parts[4];
        for (size_t i = 0; i < 4; i++) parts[i] = course.at(64 * i);
        parts[0] = folded(all, near, parts[0]);
        for (course.skip(256); course.count >= 256; course.skip(256))
            for (size_t i = 0; i < 4; i++) {
                const __m512i value = course.at(64 * i);
                if (kIsSummed) parts[i] = folded(parts[i], far, value);
            }
        all = parts[0];
        for (size_t i = 1; i < 4; i++) all = folded(all, near, parts[i]);
    }
    for (; course.count >= 64; course.skip(64)) all = folded(all, near, course.at(0));
    return reduced(all);
}

template <bool kByPages> BATON_FOLDING uint32_t by_folding(uint32_t state, const char* bytes, size_t count) {
    if (count < 256) return by_words(state, bytes, count);
    Course<false> course{bytes, nullptr, count};
    state = by_lanes<false, true, kByPages>(state, course);
    return by_words(state, course.from, course.count);
}

// A copy, and its sum where that is wanted.
template <bool kIsSummed, bool kByPages>
BATON_FOLDING uint32_t streamed(uint32_t state, char* to, const char* from, size_t count) {
    const size_t head = -reinterpret_cast<uintptr_t>(to) % 64;
    std::memcpy(to, from, head);
    if (kIsSummed) state = by_words(state, from, head);
    Course<true> course{from + head, to + head, count - head};
    state = by_lanes<true, kIsSummed, kByPages>(state, course);
    _mm_sfence();
    std::memcpy(course.to, course.from, course.count);
    return kIsSummed ? by_words(state, course.from, course.count) : 0;
}
#endif

using Update = uint32_t (*)(uint32_t state, const char* bytes, size_t count);

const Update kUpdates[] = {
#if defined(__x86_64__)
    by_folding<true>, by_folding<false>, by_words,
#endif
    plain,
};
enum Way : int32_t { kPagesWay, kSequenceWay, kWordsWay };  // where there are more than the plain one

int32_t first_way() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_words = __builtin_cpu_supports("sse4.2");
    if (has_words && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul"))
        return kPagesWay;
    if (has_words) return kWordsWay;
#endif
    return crc32c_num_ways() - 1;
}

int32_t best_way() {
    const int32_t first = first_way();
#if defined(__x86_64__)
    if (first == kPagesWay && !__builtin_cpu_is("intel")) return kSequenceWay;
#endif
    return first;
}

}  // namespace

uint32_t crc32c(uint32_t before, const char* bytes, size_t count) {
    static const Update update = kUpdates[best_way()];
    return ~update(~before, bytes, count);
}

uint32_t copied(int32_t way, char* to, const char* from, size_t count, bool is_summed) {
#if defined(__x86_64__)
    constexpr size_t kLongBytes = kPages * kPageBytes + 128;  // four pages beyond a head and what is folded onto
    if (way == kPagesWay && count >= kLongBytes)
        return is_summed ? ~streamed<true, true>(~0u, to, from, count) : streamed<false, true>(0, to, from, count);
    if (way == kSequenceWay && count >= kLongBytes)
        return is_summed ? ~streamed<true, false>(~0u, to, from, count) : streamed<false, false>(0, to, from, count);
#endif
    if (!is_summed) {
        std::memcpy(to, from, count);
        return 0;
    }
    constexpr size_t kStretch = 128 << 10;  // stays in a core's own cache
    uint32_t sum = 0;
    for (size_t done = 0; done < count; done += kStretch) {
        const size_t size = std::min(kStretch, count - done);
        std::memcpy(to + done, from + done, size);
        sum = crc32c_of(way, sum, to + done, size);
    }
    return sum;
}

uint32_t crc32c_of(int32_t way, uint32_t before, const char* bytes, size_t count) {
    return ~kUpdates[way](~before, bytes, count);
}

int32_t crc32c_num_ways() { return sizeof(kUpdates) / sizeof(kUpdates[0]); }

int32_t crc32c_first_way() { return first_way(); }
int32_t crc32c_best_way() { return best_way(); }
