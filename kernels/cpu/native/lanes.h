// Sixteen virtual lanes of float32 and int32, on AVX-512, AVX2 or plain C++.
//
// Every function works lane by lane and rounds as IEEE 754 says, so all three give equal bits; sums across lanes are
// one fixed tree. A file that includes this is compiled once a variant, with floating-point contraction switched off.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// body(0), body(1) ... body(N - 1), unrolled where it is written: the compiler keeps small arrays of vectors that are
// indexed so in registers, which it does not do for loops.
template <typename Body, int... i>
__attribute__((always_inline)) inline void repeat_at(std::integer_sequence<int, i...>, Body& body) {
    (body(std::integral_constant<int, i>{}), ...);
}
template <int N, typename Body> __attribute__((always_inline)) inline void repeat(Body body) {
    repeat_at(std::make_integer_sequence<int, N>{}, body);
}
#define BATON_EACH(INDEX) [&](auto INDEX) __attribute__((always_inline))

#if defined(BATON_AVX512)

using F = __m512;  // a bare vector: the compiler keeps arrays of it in registers
struct I { __m512i v; };
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline F load_some(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }
inline void store_some(float* p, F a, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), a); }
inline F all(float x) { return _mm512_set1_ps(x); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F larger(F a, F b) { return _mm512_max_ps(a, b); }
inline F smaller(F a, F b) { return _mm512_min_ps(a, b); }
inline F absolute(F a) { return _mm512_abs_ps(a); }
// lanes of `yes` where a < b, of `no` elsewhere
inline F where_less(F a, F b, F yes, F no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }
inline I to_int(F a) { return {_mm512_cvtps_epi32(a)}; }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a.v); }
inline I all_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I operator*(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
template <int n> inline I shift_left(I a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> inline I shift_right(I a) { return {_mm512_srai_epi32(a.v, n)}; }
// Numbers that fit a signed byte.
inline void store_bytes(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
inline I larger(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline I bits_of(F a) { return {_mm512_castps_si512(a)}; }
inline F from_bits(I a) { return _mm512_castsi512_ps(a.v); }
inline void store_int(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
inline I load_int(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
// The lower 16 bits of each lane.
inline void store_words(int16_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v)); }
// Those of `a`, then those of `b`.
inline void store_words(int16_t* p, I a, I b) {
    alignas(64) static constexpr int16_t even[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                     32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    _mm512_storeu_si512(p, _mm512_permutex2var_epi16(a.v, _mm512_load_si512(even), b.v));
}
// The lower 16 bits of `a`, those of `b` above them.
inline I pair_words(I a, I b) { return {_mm512_ternarylogic_epi32(a.v, _mm512_set1_epi32(0xffff), _mm512_slli_epi32(b.v, 16), 0xea)}; }
// sum + the products of both pairs of signed 16-bit numbers in a lane. By name, as GCC gives the intrinsic's sum another
// register and stores sums of a full register file to memory at every step.
__attribute__((always_inline)) inline I add_pairs(I sum, I a, I b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
    return sum;
}
inline F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store_half(uint16_t* p, F a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
inline F load_bfloat(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

#elif defined(BATON_AVX2)

struct F { __m256 a, b; };
struct I { __m256i a, b; };
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline F all(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F larger(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F smaller(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F absolute(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F where_less(F x, F y, F yes, F no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I all_int(int32_t x) { __m256i v = _mm256_set1_epi32(x); return {v, v}; }
inline I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I operator-(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I operator*(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
template <int n> inline I shift_left(I x) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
template <int n> inline I shift_right(I x) { return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)}; }
inline void store_bytes(int8_t* p, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline I larger(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline I bits_of(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F from_bits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline void store_int(int32_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
inline I load_int(const int32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void store_words(int16_t* p, I x) {
    const __m256i words = _mm256_set1_epi32(0xffff), packed = _mm256_packus_epi32(_mm256_and_si256(x.a, words), _mm256_and_si256(x.b, words));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline I pair_words(I x, I y) {
    return {_mm256_blend_epi16(x.a, _mm256_slli_epi32(y.a, 16), 0xaa), _mm256_blend_epi16(x.b, _mm256_slli_epi32(y.b, 16), 0xaa)};
}
inline I add_pairs(I sum, I x, I y) {
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))};
}
inline F load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_half(uint16_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline F load_bfloat(const uint16_t* p) {
    auto widen = [](const uint16_t* q) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))), 16));
    };
    return {widen(p), widen(p + 8)};
}

#else

struct F { float x[16]; };
struct I { int32_t x[16]; };
#define BATON_LANES(EXPRESSION) for (int i = 0; i < 16; i++) r.x[i] = (EXPRESSION); return r
inline F load(const float* p) { F r; std::memcpy(r.x, p, 64); return r; }
inline void store(float* p, F a) { std::memcpy(p, a.x, 64); }
inline F all(float x) { F r; BATON_LANES(x); }
inline F operator+(F a, F b) { F r; BATON_LANES(a.x[i] + b.x[i]); }
inline F operator-(F a, F b) { F r; BATON_LANES(a.x[i] - b.x[i]); }
inline F operator*(F a, F b) { F r; BATON_LANES(a.x[i] * b.x[i]); }
inline F operator/(F a, F b) { F r; BATON_LANES(a.x[i] / b.x[i]); }
inline F fma(F a, F b, F c) { F r; BATON_LANES(std::fmaf(a.x[i], b.x[i], c.x[i])); }
inline F larger(F a, F b) { F r; BATON_LANES(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
inline F smaller(F a, F b) { F r; BATON_LANES(a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }
inline F absolute(F a) { F r; BATON_LANES(std::fabs(a.x[i])); }
inline F where_less(F a, F b, F yes, F no) { F r; BATON_LANES(a.x[i] < b.x[i] ? yes.x[i] : no.x[i]); }
inline int32_t nearest(float x) {  // what the vector units answer: to nearest even, INT32_MIN when it does not fit
    return x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(std::nearbyintf(x)) : INT32_MIN;
}
inline I to_int(F a) { I r; BATON_LANES(nearest(a.x[i])); }
inline F to_float(I a) { F r; BATON_LANES(static_cast<float>(a.x[i])); }
inline I all_int(int32_t x) { I r; BATON_LANES(x); }
inline int32_t wrap(int64_t x) { return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint64_t>(x))); }
inline I operator+(I a, I b) { I r; BATON_LANES(wrap(int64_t(a.x[i]) + b.x[i])); }
inline I operator-(I a, I b) { I r; BATON_LANES(wrap(int64_t(a.x[i]) - b.x[i])); }
inline I operator*(I a, I b) { I r; BATON_LANES(wrap(int64_t(a.x[i]) * b.x[i])); }
template <int n> inline I shift_left(I a) { I r; BATON_LANES(static_cast<int32_t>(static_cast<uint32_t>(a.x[i]) << n)); }
template <int n> inline I shift_right(I a) { I r; BATON_LANES(a.x[i] >> n); }
inline void store_bytes(int8_t* p, I a) { for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(a.x[i]); }
inline I larger(I a, I b) { I r; BATON_LANES(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
inline I bits_of(F a) { I r; std::memcpy(r.x, a.x, 64); return r; }
inline F from_bits(I a) { F r; std::memcpy(r.x, a.x, 64); return r; }
inline void store_int(int32_t* p, I a) { std::memcpy(p, a.x, 64); }
inline I load_int(const int32_t* p) { I r; std::memcpy(r.x, p, 64); return r; }
inline void store_words(int16_t* p, I a) {  // copied, as its readers take the words by pairs
    int16_t words[16];
    for (int i = 0; i < 16; i++) words[i] = static_cast<int16_t>(a.x[i]);
    std::memcpy(p, words, sizeof(words));
}
inline I pair_words(I a, I b) { I r; BATON_LANES(static_cast<int32_t>((a.x[i] & 0xffff) | static_cast<uint32_t>(b.x[i]) << 16)); }
inline I add_pairs(I sum, I a, I b) {
    I r;
    BATON_LANES(wrap(int64_t(sum.x[i]) + int64_t(int16_t(a.x[i])) * int16_t(b.x[i]) + int64_t(a.x[i] >> 16) * (b.x[i] >> 16)));
}
inline float half_to_float(uint16_t h);
template <int exponent_bits, int mantissa_bits> inline uint32_t narrow(float x, uint32_t largest_finite, bool saturate);
inline void store_half(uint16_t* p, F a) {
    for (int i = 0; i < 16; i++) p[i] = static_cast<uint16_t>(narrow<5, 10>(a.x[i], 0, false));
}
inline F load_half(const uint16_t* p) { F r; BATON_LANES(half_to_float(p[i])); }
inline F load_bfloat(const uint16_t* p) {
    I r;
    for (int i = 0; i < 16; i++) r.x[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
    return from_bits(r);
}
#undef BATON_LANES

#endif

#if !defined(BATON_AVX512)
inline void store_words(int16_t* p, I a, I b) {
    store_words(p, a);
    store_words(p + 16, b);
}
inline F load_some(const float* p, int n) {
    float t[16] = {};
    std::memcpy(t, p, sizeof(float) * n);
    return load(t);
}
inline void store_some(float* p, F a, int n) {
    float t[16];
    store(t, a);
    std::memcpy(p, t, sizeof(float) * n);
}
#endif

inline int32_t sum_int(I a) {  // exact, so in any order
#if defined(BATON_AVX512)
    return _mm512_reduce_add_epi32(a.v);
#elif defined(BATON_AVX2)
    const __m256i x = _mm256_add_epi32(a.a, a.b);
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
#else
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += a.x[i];
    return sum;
#endif
}

inline float first_lane(F a) {
#if defined(BATON_AVX512)
    return _mm512_cvtss_f32(a);
#elif defined(BATON_AVX2)
    return _mm256_cvtss_f32(a.a);
#else
    return a.x[0];
#endif
}

inline float float_from(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t bits_from(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }

inline float half_to_float(uint16_t h) {  // IEEE binary16, subnormals included
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent == 31) return float_from(sign | 0x7f800000u | fraction << 13);
    if (exponent) return float_from(sign | (exponent + 112) << 23 | fraction << 13);
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -magnitude : magnitude;
}

// The one tree over 16 lanes: halves are combined until one is left.
#if defined(__AVX2__)
#if defined(BATON_AVX512)
inline __m256 low_half(F a) { return _mm512_castps512_ps256(a); }
inline __m256 high_half(F a) { return _mm512_extractf32x8_ps(a, 1); }
#else
inline __m256 low_half(F a) { return a.a; }
inline __m256 high_half(F a) { return a.b; }
#endif
inline float sum_lanes(F a) {
    const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest_lane(F a) {
    const __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float sum_lanes(F a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.x[i] += a.x[i + half];
    return a.x[0];
}
inline float largest_lane(F a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.x[i] = a.x[i] > a.x[i + half] ? a.x[i] : a.x[i + half];
    return a.x[0];
}
#endif

// sum_lanes and largest_lane of 16 vectors at `rows`, one a lane: the same trees, 16 at a time.
#if defined(BATON_AVX512)
template <typename Join> inline F join_rows(const float* rows, Join join) {
    auto pd = [](F x) { return _mm512_castps_pd(x); };
    auto ps = [](__m512d x) { return _mm512_castpd_ps(x); };
    F eight[8], four[4], two[2];
    repeat<8>(BATON_EACH(i) {
        const F a = load(rows + 32 * i), b = load(rows + 32 * i + 16);
        eight[i] = join(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    });
    repeat<4>(BATON_EACH(i) {
        const F a = eight[2 * i], b = eight[2 * i + 1];
        four[i] = join(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    });
    repeat<2>(BATON_EACH(i) {
        const F a = four[2 * i], b = four[2 * i + 1];
        two[i] = join(ps(_mm512_unpacklo_pd(pd(a), pd(b))), ps(_mm512_unpackhi_pd(pd(a), pd(b))));
    });
    const F joined = join(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), joined);
}
inline F sum_rows(const float* rows) { return join_rows(rows, [](F a, F b) { return a + b; }); }
inline F largest_rows(const float* rows) { return join_rows(rows, [](F a, F b) { return larger(a, b); }); }
#else
inline F sum_rows(const float* rows) {
    float sums[16];
    for (int r = 0; r < 16; r++) sums[r] = sum_lanes(load(rows + 16 * r));
    return load(sums);
}
inline F largest_rows(const float* rows) {
    float tops[16];
    for (int r = 0; r < 16; r++) tops[r] = largest_lane(load(rows + 16 * r));
    return load(tops);
}
#endif

// exp(x) for x in [-86, 88], within 2 units in the last place. Polynomial of the Cephes library.
inline F exponential_inside(F x) {
    const F magic = all(12582912.0f);  // 1.5 * 2^23: adding and subtracting it rounds to an integer
    const F n = fma(x, all(1.44269504088896341f), magic) - magic;
    F r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    F p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    const F y = fma(p, r * r, r) + all(1.0f);
    return from_bits(bits_of(y) + shift_left<23>(to_int(n)));
}

// exp(x); 0 below -86, as for x = 88 above it.
inline F exponential(F x) {
    const F inside = exponential_inside(smaller(all(88.0f), larger(all(-86.0f), x)));
    return where_less(x, all(-86.0f), all(0.0f), inside);
}

// The same for x that is not above 0.
inline F exponential_of_negative(F x) {
    return where_less(x, all(-86.0f), all(0.0f), exponential_inside(larger(all(-86.0f), x)));
}

inline F sigmoid_times(F x, F gate) { return x / (all(1.0f) + exponential(all(0.0f) - gate)); }

}  // namespace
