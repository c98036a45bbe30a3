// Quantised products of many rows on the matrix units: the same exact integers as everywhere else, then the same
// chain over groups. A tile multiplies 16 rows of signed bytes, a group's high and low ones, by the group's unsigned
// weights of 16 outputs, those that meet high bytes times 16.

namespace {

struct alignas(64) TileShape {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t column_bytes[16] = {};
    uint8_t rows[16] = {};
};

// How a group of inputs and weights lies in tiles. Four-bit weights of 32 columns meet both byte planes in one product
// (16 * 15 fits a byte); others take one product a plane and shift the high one afterwards.
template <int bits, int group> struct AmxShape {
    static constexpr bool joins = bits == 4 && group == 32;
    static constexpr int planes = joins ? 1 : 2;            // products a group, sums kept apart
    static constexpr int input_bytes = joins ? 64 : group;  // of a row of an input tile
    static constexpr int weight_bytes = input_bytes * 16;   // of a weight tile
};

// Tiles 0 and 1: sums of even groups, 2 and 3: of odd ones, 4 and 5: inputs, 6 and 7: weights.
inline void shape_tiles(int input_bytes) {
    TileShape shape;
    for (int t = 0; t < 4; t++) { shape.rows[t] = 16; shape.column_bytes[t] = 64; }
    for (int t = 4; t < 6; t++) { shape.rows[t] = 16; shape.column_bytes[t] = static_cast<uint16_t>(input_bytes); }
    for (int t = 6; t < 8; t++) { shape.rows[t] = static_cast<uint8_t>(input_bytes / 4); shape.column_bytes[t] = 64; }
    asm volatile("" : : "r"(&shape) : "memory");  // the intrinsic tells the compiler that it reads 8 bytes of 64
    _tile_loadconfig(&shape);
}

// A panel's weights as the tiles read them, group by group.
template <int bits, int group> inline void unpack_panel(const BatonWeight& w, int64_t panel, uint8_t* out) {
    using Shape = AmxShape<bits, group>;
    constexpr int V = group / 4;
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    const int64_t groups = w.num_columns / group, step = group_bytes(w);
    for (int64_t g = 0; g < groups; g++, data += step, out += Shape::weight_bytes) {
        __m512i wv[V];
        unpack_group<bits, V>(data, wv);
        uint8_t* plain = out;
        if constexpr (Shape::joins) {
            for (int v = 0; v < V; v++) _mm512_store_si512(out + 64 * v, _mm512_slli_epi16(wv[v], 4));
            plain = out + 64 * V;
        }
        for (int v = 0; v < V; v++) _mm512_store_si512(plain + 64 * v, wv[v]);
    }
}

// One group's integer products of 16 rows with 16 outputs, at `out`; with two planes the low one's behind the high one's.
#define BATON_MULTIPLY(NAME, HIGH, LOW, WEIGHTS)                                                                            \
    template <int planes> inline void NAME(const int8_t* values, int64_t stride, const uint8_t* weights, int32_t* out) {   \
        _tile_zero(HIGH);                                                                                                   \
        _tile_loadd(WEIGHTS, weights, 64);                                                                                  \
        _tile_loadd(4, values, stride);                                                                                     \
        _tile_dpbsud(HIGH, 4, WEIGHTS);                                                                                     \
        _tile_stored(HIGH, out, 64);                                                                                        \
        if constexpr (planes == 2) {                                                                                        \
            _tile_zero(LOW);                                                                                                \
            _tile_loadd(5, values + 32, stride);                                                                            \
            _tile_dpbsud(LOW, 5, WEIGHTS);                                                                                  \
            _tile_stored(LOW, out + 256, 64);                                                                               \
        }                                                                                                                   \
    }
BATON_MULTIPLY(multiply_even, 0, 1, 6)
BATON_MULTIPLY(multiply_odd, 2, 3, 7)
#undef BATON_MULTIPLY

// What 16 rows of inputs bring besides their bytes, by group and then by row, so that a group's 16 lie together.
struct AmxRows {
    const int8_t* values;   // of the first row
    const float* scales;    // [groups of 32, 16]
    const int32_t* sums;    // [groups, 16], where the weight has an offset
    const float* weighted;  // [groups, 16], where the weight has minima
};

// One group of 16 rows: its integer sums and its minima to the rows' chains.
template <int planes, bool has_min>
__attribute__((always_inline)) inline void add_group(const int32_t* dots, const BatonWeight& w, const uint8_t* numbers, const AmxRows& in,
                                                     int64_t g, int64_t coarse, F* sums) {
    const F scale = load_scales(numbers, w.half_scales), least = has_min ? load_scales(numbers + scale_bytes(w), w.half_scales) : scale;
    const float *scales = in.scales + coarse * 16, *weighted = in.weighted + g * 16;
    const int32_t *counts = in.sums + g * 16, offset = w.offset;
    repeat<16>(BATON_EACH(r) {
        __m512i dot = _mm512_load_si512(dots + 16 * r);
        if constexpr (planes == 2) dot = _mm512_add_epi32(_mm512_slli_epi32(dot, 4), _mm512_load_si512(dots + 256 + 16 * r));
        if (!has_min && offset) dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(offset * counts[r]));
        sums[r] = fma(scale * all(scales[r]), _mm512_cvtepi32_ps(dot), sums[r]);
        if constexpr (has_min) sums[r] = fma(least, all(weighted[r]), sums[r]);
    });
}

// 16 rows from `first` with one panel; those before `row` or from `end` on are computed and not stored.
template <int bits, int group, bool has_min>
inline void amx_rows(const BatonProduct& a, const AmxRows& in, int64_t first, int64_t row, int64_t end, int64_t panel, const uint8_t* weights, int32_t* space) {
    using Shape = AmxShape<bits, group>;
    constexpr int planes = Shape::planes, bytes = Shape::weight_bytes;
    const BatonWeight& w = *a.weight;
    const int64_t groups = w.num_columns / group, step = group_bytes(w), stride = 2 * a.quantised.width;
    const uint8_t* numbers = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w) + quant_bytes(w);
    auto values = [&](int64_t g) { return in.values + g * group / 32 * 64 + g * group % 32; };
    F sums[16];
    repeat<16>(BATON_EACH(r) { sums[r] = all(0.0f); });
    // The matrix units work on one group while the vector units fold the one before into the chains.
    int32_t* const halves[2] = {space, space + 512};
    multiply_even<planes>(values(0), stride, weights, halves[0]);
    for (int64_t g = 0; g < groups; g++, numbers += step) {
        if (g + 1 < groups) {
            if (g & 1) multiply_even<planes>(values(g + 1), stride, weights + (g + 1) * bytes, halves[0]);
            else multiply_odd<planes>(values(g + 1), stride, weights + (g + 1) * bytes, halves[1]);
        }
        add_group<planes, has_min>(halves[g & 1], w, numbers, in, g, g * group / 32, sums);
    }
    repeat<16>(BATON_EACH(r) {
        if (first + r >= row && first + r < end) put_outputs(a, first + r, panel, sums[r]);
    });
}

template <typename T> inline void by_group(const T* source, int64_t stride, int64_t groups, T* out) {
    for (int64_t g = 0; g < groups; g++)
        for (int64_t r = 0; r < 16; r++) out[g * 16 + r] = source[r * stride + g];
}

inline AmxRows gather_rows(const BatonProduct& a, int64_t first, Scratch& scratch) {
    const int64_t groups = a.weight->num_columns / a.weight->group, coarse = a.quantised.width / 32;
    const QuantRow in = quant_row(a, first);
    float* scales = scratch.take<float>(coarse * 16);
    by_group(in.scales, coarse, coarse, scales);
    int32_t* sums = scratch.take<int32_t>(groups * 16);
    if (a.weight->offset) by_group(in.sums, 3 * coarse, groups, sums);
    float* weighted = scratch.take<float>(groups * 16);
    if (a.weight->has_min) by_group(in.weighted, 3 * coarse, groups, weighted);
    return {in.values, scales, sums, weighted};
}

// Rows [row, end) with panels [panel, last). A last block of fewer than 16 rows overlaps the one before; where there
// is none it reads the buffer's spare rows.
template <int bits, int group> void amx_tile(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last, Scratch& scratch) {
    using Shape = AmxShape<bits, group>;
    const int64_t groups = a.weight->num_columns / group, blocks = (end - row + 15) / 16;
    scratch.reserve(static_cast<size_t>(groups) * (Shape::weight_bytes + blocks * 16 * 12) + 4096 + (2 + 3 * blocks) * 64);
    uint8_t* weights = scratch.take<uint8_t>(groups * Shape::weight_bytes);
    int32_t* space = scratch.take<int32_t>(1024);
    AmxRows rows[kBlockRows / 16];
    auto first = [&](int64_t block) {
        const int64_t at = row + 16 * block;
        return end - at >= 16 || end < 16 ? at : end - 16;
    };
    for (int64_t block = 0; block < blocks; block++) rows[block] = gather_rows(a, first(block), scratch);
    shape_tiles(Shape::input_bytes);
    for (; panel < last; panel++) {
        unpack_panel<bits, group>(*a.weight, panel, weights);
        for (int64_t block = 0; block < blocks; block++) {
            if (a.weight->has_min) amx_rows<bits, group, true>(a, rows[block], first(block), row + 16 * block, end, panel, weights, space);
            else amx_rows<bits, group, false>(a, rows[block], first(block), row + 16 * block, end, panel, weights, space);
        }
    }
    _tile_release();
}

}  // namespace
