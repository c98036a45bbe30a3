// K and V as float32: single slots of a paged pool, and 64 positions at a time as attention reads them.

namespace {

inline float bfloat_to_float(uint16_t b) { return float_from(uint32_t(b) << 16); }

// An fp8 value as float32: 2^-9 or 2^-16 a step below the smallest normal number.
template <int exponent_bits, int mantissa_bits> inline float widen(uint32_t bits) {
    constexpr int bias = (1 << (exponent_bits - 1)) - 1;
    const uint32_t sign = bits >> (exponent_bits + mantissa_bits) & 1, exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
    const uint32_t fraction = bits & ((1u << mantissa_bits) - 1);
    if (exponent_bits == 4 && (bits & 0x7f) == 0x7f) return float_from(sign << 31 | 0x7fc00000u);
    if (exponent_bits == 5 && exponent == 31) return float_from(sign << 31 | 0x7f800000u | fraction << (23 - mantissa_bits));
    if (exponent) return float_from(sign << 31 | (exponent + 127 - bias) << 23 | fraction << (23 - mantissa_bits));
    const float magnitude = static_cast<float>(fraction) * float_from(static_cast<uint32_t>(127 + 1 - bias - mantissa_bits) << 23);
    return sign ? -magnitude : magnitude;
}

inline float stored_value(const BatonKvView& view, int64_t at) {
    switch (view.type) {
        case BATON_KV_F32: return static_cast<const float*>(view.values)[at];
        case BATON_KV_F16: return half_to_float(static_cast<const uint16_t*>(view.values)[at]);
        case BATON_KV_BF16: return bfloat_to_float(static_cast<const uint16_t*>(view.values)[at]);
        case BATON_KV_FP8_E4M3: return widen<4, 3>(static_cast<const uint8_t*>(view.values)[at]);
        case BATON_KV_FP8_E5M2: return widen<5, 2>(static_cast<const uint8_t*>(view.values)[at]);
        default: return static_cast<float>(static_cast<const int8_t*>(view.values)[at]);
    }
}

struct Layer {  // what every piece of one attention shares
    const BatonAttend& a;
    const BatonStep& step;
    int64_t group;   // query heads a KV head
    int64_t dim;     // head_dim
    int64_t padded;  // head_dim in whole vectors
};

// K or V of one slot as float32: in the pool itself, or converted into `space`.
inline const float* slot_vector(const BatonKvView& view, int64_t block, int64_t head, int64_t half, int64_t offset, float* space) {
    const int64_t dim = view.head_dim;
    const int64_t base = block * view.block_stride + head * view.head_stride + half * view.half_stride + offset * dim;
    if (view.type == BATON_KV_F32) return static_cast<const float*>(view.values) + base;
    const float scale = view.scales
        ? view.scales[block * view.scale_block_stride + head * view.scale_head_stride + half * view.scale_half_stride + offset] : 1.0f;
    int64_t d = 0;
    const uint16_t* halves = static_cast<const uint16_t*>(view.values) + base;
    if (view.type == BATON_KV_F16) for (; d + 16 <= dim; d += 16) store(space + d, load_half(halves + d));
    if (view.type == BATON_KV_BF16) for (; d + 16 <= dim; d += 16) store(space + d, load_bfloat(halves + d));
    for (; d < dim; d++) space[d] = stored_value(view, base + d) * scale;
    return space;
}

#if defined(BATON_AVX512)
// out[c][r] = rows[r][column + c] for 16 rows and columns; rows of `out` are `stride` apart. The numbers may be any 32 bits.
inline void transpose_block(const float* const* rows, int64_t column, float* out, int64_t stride) {
    __m512 r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(rows[i] + column);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    auto pd = [](__m512 x) { return _mm512_castps_pd(x); };
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(t[i]), pd(t[i + 2])));
        r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(t[i]), pd(t[i + 2])));
        r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(t[i + 1]), pd(t[i + 3])));
        r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(t[i + 1]), pd(t[i + 3])));
    }
    for (int i = 0; i < 4; i++) {  // r[4j + i]: columns i, 4 + i, 8 + i, 12 + i of rows 4j to 4j + 3
        const __m512 a = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        const __m512 c = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd), d = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
        _mm512_store_ps(out + stride * i, _mm512_shuffle_f32x4(a, b, 0x88));
        _mm512_store_ps(out + stride * (i + 8), _mm512_shuffle_f32x4(a, b, 0xdd));
        _mm512_store_ps(out + stride * (i + 4), _mm512_shuffle_f32x4(c, d, 0x88));
        _mm512_store_ps(out + stride * (i + 12), _mm512_shuffle_f32x4(c, d, 0xdd));
    }
}
#else
inline void transpose_block(const float* const* rows, int64_t column, float* out, int64_t stride) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) std::memcpy(out + stride * j + i, rows[i] + column + j, sizeof(float));
}
#endif

// Walks over positions: the block of the sequence's table and the slot in it, without a division each.
struct Cursor {
    Cursor(const Layer& l, int64_t position) : size(l.a.view.block_size), block(position / size), offset(position % size) {}
    void advance() {
        if (++offset < size) return;
        offset = 0;
        block++;
    }
    int64_t size, block, offset;
};

// Positions [first, end) as runs inside one block each: body(position, count, index in the block table, slot in the block).
template <typename Body> inline void each_run(const Layer& l, int64_t first, int64_t end, Body body) {
    const int64_t size = l.a.view.block_size;
    int64_t block = first / size, offset = first % size;
    for (int64_t count; first < end; first += count, block++, offset = 0) {
        count = size - offset < end - first ? size - offset : end - first;
        body(first, count, block, offset);
    }
}

inline int64_t element_bytes(const BatonKvView& view) { return view.type == BATON_KV_F32 ? 4 : view.type <= BATON_KV_BF16 ? 2 : 1; }

// Where K or V of a slot lies; those of the block's next slots follow it.
inline const char* slot_bytes(const Layer& l, int64_t block, int64_t head, int64_t half, int64_t offset) {
    const BatonKvView& view = l.a.view;
    const int64_t at = block * view.block_stride + head * view.head_stride + half * view.half_stride + offset * l.dim;
    return static_cast<const char*>(view.values) + at * element_bytes(view);
}

// Asks for memory that is read soon, as blocks lie far apart in the pool: for the second cache, since a processor has more
// misses of that under way than of the first.
inline void ask_for(const char* memory, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(memory + byte, 0, 2);
}

// K (half 0) or V (half 1) of positions [first, first + 64), one after the other: put(i, vector), a null pointer for
// positions outside [low, high). Vectors are in the pool or at space(i).
template <typename Space, typename Put>
inline void each_slot(const Layer& l, const int32_t* table, int64_t head, int64_t half, int64_t first, int64_t low, int64_t high, Space space, Put put) {
    Cursor here(l, first), ahead(l, first + kTilePositions);
    for (int64_t i = 0; i < kTilePositions; i++, here.advance(), ahead.advance()) {
        const int64_t position = first + i;
        if (position + kTilePositions < high) ask_for(slot_bytes(l, table[ahead.block], head, half, ahead.offset), l.dim * element_bytes(l.a.view));
        const bool is_seen = position >= low && position < high;
        put(i, is_seen ? slot_vector(l.a.view, table[here.block], head, half, here.offset, space(i)) : nullptr);
    }
}

// K of positions [first, first + 64) as [dim, 64]; positions outside [low, high) read as zero.
inline void load_keys(const Layer& l, const int32_t* table, int64_t head, int64_t first, int64_t low, int64_t high, float* space, float* keys) {
    const float* rows[16];
    auto own = [&](int64_t i) { return space + i % 16 * l.padded; };
    each_slot(l, table, head, 0, first, low, high, own, [&](int64_t i, const float* row) {
        rows[i % 16] = row ? row : own(i);
        if (!row) std::memset(own(i), 0, sizeof(float) * l.dim);
        if (i % 16 != 15) return;
        float* part = keys + i - 15;
        int64_t d = 0;
        for (; d + 16 <= l.dim; d += 16) transpose_block(rows, d, part + 64 * d, 64);
        for (; d < l.dim; d++)
            for (int64_t r = 0; r < 16; r++) part[64 * d + r] = rows[r][d];
    });
}

// V of positions [first, first + 64) as pointers to [padded] floats; zeros outside [low, high).
inline void load_values(const Layer& l, const int32_t* table, int64_t head, int64_t first, int64_t low, int64_t high, float* space, const float** rows) {
    auto own = [&](int64_t i) { return space + i * l.padded; };
    each_slot(l, table, head, 1, first, low, high, own, [&](int64_t i, const float* row) {
        rows[i] = row ? row : own(i);
        if (!row) std::memset(own(i), 0, sizeof(float) * l.padded);
        if (!row || l.padded == l.dim) return;
        if (row != own(i)) std::memcpy(own(i), row, sizeof(float) * l.dim);
        std::memset(own(i) + l.dim, 0, sizeof(float) * (l.padded - l.dim));
        rows[i] = own(i);
    });
}

}  // namespace
