// Quantised products of many rows on the matrix units: the same exact integers as everywhere else.
//
// Whole weights are taken apart into two planes of signed bytes, as inputs are: four products of planes run over a
// segment of columns without leaving the matrix units. Other weights meet both planes of the inputs group by group, and
// their chain over groups is that of the vector units.

namespace {

struct alignas(64) TileShape {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t column_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3: sums, 4 and 5: inputs, 6 and 7: weights.
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
    constexpr int V = group / 4;
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    const int64_t groups = w.num_columns / group, step = group_bytes(w);
    for (int64_t g = 0; g < groups; g++, data += step, out += 64 * V)
        for (int v = 0; v < V; v++) _mm512_store_si512(out + 64 * v, four_columns<bits>(data, v));
}

// One group's integer products of 16 rows with 16 outputs at `out`, those of low bytes behind those of high ones.
#define BATON_MULTIPLY(NAME, HIGH, LOW, WEIGHTS)                                                                       \
    inline void NAME(const int8_t* high, int64_t plane, const uint8_t* weights, int32_t* out) {                       \
        _tile_zero(HIGH);                                                                                              \
        _tile_loadd(WEIGHTS, weights, 64);                                                                             \
        _tile_loadd(4, high, 2 * plane);                                                                               \
        _tile_dpbsud(HIGH, 4, WEIGHTS);                                                                                \
        _tile_stored(HIGH, out, 64);                                                                                   \
        _tile_zero(LOW);                                                                                               \
        _tile_loadd(5, high + plane, 2 * plane);                                                                       \
        _tile_dpbsud(LOW, 5, WEIGHTS);                                                                                 \
        _tile_stored(LOW, out + 256, 64);                                                                              \
    }
BATON_MULTIPLY(multiply_even, 0, 1, 6)
BATON_MULTIPLY(multiply_odd, 2, 3, 7)
#undef BATON_MULTIPLY

struct AmxRows {
    const int8_t* high;   // of the first of 16 rows
    const float* scales;  // of the rows
    const int32_t* sums;  // [groups, 16], so that a group's 16 lie together
};

// One group of 16 rows: its integer sums and its minima to the rows' chains.
template <bool has_min>
__attribute__((always_inline)) inline void add_group(const int32_t* dots, const BatonWeight& w, const uint8_t* numbers, const int32_t* counts, F* sums) {
    const F scale = load_scales(numbers, w.half_scales), least = has_min ? load_scales(numbers + scale_bytes(w), w.half_scales) : scale;
    const int32_t offset = w.offset;
    repeat<16>(BATON_EACH(r) {
        __m512i dot = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(dots + 16 * r), 8), _mm512_load_si512(dots + 256 + 16 * r));
        if (offset) dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(offset * counts[r]));
        sums[r] = fma(scale, _mm512_cvtepi32_ps(dot), sums[r]);
        if constexpr (has_min) sums[r] = fma(least, all(static_cast<float>(counts[r])), sums[r]);
    });
}

// 16 rows from `first` with one panel; those before `row` or from `end` on are computed and not stored.
template <int bits, int group, bool has_min>
inline void amx_rows(const BatonProduct& a, const AmxRows& in, int64_t first, int64_t row, int64_t end, int64_t panel, const uint8_t* weights, int32_t* space) {
    const BatonWeight& w = *a.weight;
    const int64_t groups = w.num_columns / group, step = group_bytes(w), plane = plane_bytes(a.quantised.width);
    const uint8_t* numbers = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w) + quant_bytes(w);
    F sums[16];
    repeat<16>(BATON_EACH(r) { sums[r] = all(0.0f); });
    // The matrix units work on one group while the vector units fold the one before into the chains.
    int32_t* const halves[2] = {space, space + 512};
    multiply_even(in.high, plane, weights, halves[0]);
    for (int64_t g = 0; g < groups; g++, numbers += step) {
        if (g + 1 < groups) {
            const int8_t* high = in.high + (g + 1) * group;
            const uint8_t* own = weights + (g + 1) * group * 16;
            if (g & 1) multiply_even(high, plane, own, halves[0]);
            else multiply_odd(high, plane, own, halves[1]);
        }
        add_group<has_min>(halves[g & 1], w, numbers, in.sums + g * 16, sums);
    }
    repeat<16>(BATON_EACH(r) {
        if (first + r >= row && first + r < end) put_outputs(a, first + r, panel, sums[r] * all(in.scales[r]));
    });
}

// Where block `block` of 16 rows begins: a last block of fewer overlaps the one before; where there is none it reads the
// buffer's spare rows.
inline int64_t block_start(int64_t row, int64_t end, int64_t block) {
    const int64_t at = row + 16 * block;
    return end - at >= 16 || end < 16 ? at : end - 16;
}

inline AmxRows gather_rows(const BatonProduct& a, int64_t first, Scratch& scratch) {
    const int64_t groups = a.weight->num_columns / a.weight->group, stride = sums_of(a.quantised.width);
    const QuantRow in = quant_row(a, first);
    int32_t* sums = scratch.take<int32_t>(groups * 16);
    for (int64_t g = 0; g < groups; g++)
        for (int64_t r = 0; r < 16; r++) sums[g * 16 + r] = in.sums[r * stride + g];
    return {in.high, a.quantised.scales + first, sums};
}

// Rows [row, end) with panels [panel, last).
template <int bits, int group> void amx_tile(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last, Scratch& scratch) {
    const int64_t groups = a.weight->num_columns / group, blocks = (end - row + 15) / 16;
    scratch.reserve(static_cast<size_t>(groups) * (group * 16 + blocks * 16 * 4) + 4096 + (2 + blocks) * 64);
    uint8_t* weights = scratch.take<uint8_t>(groups * group * 16);
    int32_t* space = scratch.take<int32_t>(1024);
    AmxRows rows[kBlockRows / 16];
    for (int64_t block = 0; block < blocks; block++) rows[block] = gather_rows(a, block_start(row, end, block), scratch);
    shape_tiles(group);
    for (; panel < last; panel++) {
        unpack_panel<bits, group>(*a.weight, panel, weights);
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = block_start(row, end, block);
            if (a.weight->has_min) amx_rows<bits, group, true>(a, rows[block], first, row + 16 * block, end, panel, weights, space);
            else amx_rows<bits, group, false>(a, rows[block], first, row + 16 * block, end, panel, weights, space);
        }
    }
    _tile_release();
}

// ---- whole weights

// A panel's whole numbers as tiles of 64 columns: 1,024 high bytes, then 1,024 low ones. What a last half tile
// lacks is left as it is.
inline void unpack_whole(const BatonWeight& w, int64_t panel, uint8_t* out) {
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    const __m512i nibble = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(static_cast<short>(0xff00)), flip = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i lower = _mm512_set1_epi32(0xffff), centre = _mm512_set1_epi16(128);
    for (int64_t g = 0; g < w.num_columns / 32; g++, data += kWholeBytes) {
        uint8_t* tile = out + g / 2 * 2048 + g % 2 * 512;
        const __m512i pairs = _mm512_loadu_si512(data + 256);
        const __m512i slope = _mm512_ternarylogic_epi32(pairs, lower, _mm512_slli_epi32(pairs, 16), 0xea);
        const __m512i other = _mm512_or_si512(_mm512_srli_epi32(pairs, 16), _mm512_andnot_si512(lower, pairs));
        const __m512i start = _mm512_add_epi16(_mm512_sub_epi16(other, _mm512_slli_epi16(slope, 3)), centre);
        // slope * quant + start is the whole number plus 128: its upper byte is the high one, its lower one the low one plus 128.
        auto put = [&](__m512i even, __m512i odd, int64_t quad) {
            even = _mm512_add_epi16(_mm512_mullo_epi16(even, slope), start);
            odd = _mm512_add_epi16(_mm512_mullo_epi16(odd, slope), start);
            const __m512i high = _mm512_ternarylogic_epi32(odd, upper, _mm512_srli_epi16(even, 8), 0xea);
            const __m512i low = _mm512_or_si512(_mm512_andnot_si512(upper, even), _mm512_slli_epi16(odd, 8));
            _mm512_store_si512(tile + 64 * quad, high);
            _mm512_store_si512(tile + 1024 + 64 * quad, _mm512_xor_si512(low, flip));
        };
        for (int64_t v = 0; v < 4; v++) {
            const __m512i x = _mm512_loadu_si512(data + 64 * v);
            put(_mm512_and_si512(x, nibble), _mm512_and_si512(_mm512_srli_epi16(x, 8), nibble), 2 * v);
            put(_mm512_and_si512(_mm512_srli_epi16(x, 4), nibble), _mm512_srli_epi16(x, 12), 2 * v + 1);
        }
    }
}

// Sums of planes in tiles 0 to 2 and in memory, [16, 16] each: high with high bytes, the two mixed products, low with low
// bytes.
constexpr int64_t kPlaneSums = 3 * 256;

inline void start_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
}

inline void take_sums(const int32_t* sums) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    _tile_loadd(2, sums + 512, 64);
}

inline void put_sums(int32_t* sums) {
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
}

// A row's products of 16-bit numbers, in units of 256 and rounded down.
inline F plane_sums(const int32_t* sums, int64_t r) {
    auto sum = [&](int64_t plane) { return I{_mm512_load_si512(sums + 256 * plane + 16 * r)}; };
    return to_float(shift_left<8>(sum(0)) + sum(1) + shift_right<8>(sum(2)));
}

constexpr int64_t kPartColumns = 640;  // at most: a part of a panel that stays in the first cache while rows go by

// The sums of planes over `columns` more columns of 16 rows; starts: they are the first.
inline void multiply_planes(const int8_t* high, int64_t plane, const uint8_t* weights, int64_t columns, bool starts, int32_t* space) {
    if (starts) start_sums();
    else take_sums(space);
    for (int64_t k = 0; k < columns; k += 64, weights += 2048) {
        _tile_loadd(4, high + k, 2 * plane);
        _tile_loadd(6, weights, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, weights + 1024, 64);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(5, high + plane + k, 2 * plane);
        _tile_dpbssd(2, 5, 7);
        _tile_dpbssd(1, 5, 6);
    }
    put_sums(space);
}

// One panel, unpacked at `weights`, with rows [row, end) in blocks of 16.
struct WholePanel {
    const BatonProduct& a;
    const uint8_t* weights;
    int64_t panel, row, end;
    F scales;
};

// 16 rows from `first` are block `block`: those before it or behind its end are computed and not stored.
template <typename Sum> inline void put_block(const WholePanel& p, int64_t block, int64_t first, Sum sum) {
    const BatonProduct& a = p.a;
    const int64_t row = p.row + 16 * block;
    const float* own = a.quantised.scales + first;
    if (first >= row && first + 16 <= p.end && 16 * (p.panel + 1) <= a.weight->num_rows && !a.bias) {
        float* out = a.out.data + first * a.out.stride + 16 * p.panel;
        repeat<16>(BATON_EACH(r) { store(out + r * a.out.stride, sum(r) * (p.scales * all(own[r]))); });
        return;
    }
    repeat<16>(BATON_EACH(r) {
        if (first + r >= row && first + r < p.end) put_outputs(a, first + r, p.panel, sum(r) * (p.scales * all(own[r])));
    });
}

// Part after part of the columns, all rows each, so that a part is read from memory far away once. space: of every block.
inline void amx_whole_panel(const WholePanel& p, int32_t* space) {
    const int64_t plane = plane_bytes(p.a.quantised.width), columns = p.a.weight->num_columns, blocks = (p.end - p.row + 15) / 16;
    const int64_t parts = (columns + kPartColumns - 1) / kPartColumns, part = (columns / parts + 63) & ~int64_t(63);
    for (int64_t start = 0; start < columns; start += part) {
        const int64_t left = columns - start, own = left < part ? left : part;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = block_start(p.row, p.end, block);
            int32_t* sums = space + kPlaneSums * block;
            multiply_planes(p.a.quantised.values + first * 2 * plane + start, plane, p.weights + 32 * start, own, start == 0, sums);
            if (left == own) put_block(p, block, first, [&](int64_t r) { return plane_sums(sums, r); });
        }
    }
}

// Columns beyond one segment: a chain of its segments' sums.
inline void amx_whole_segments(const WholePanel& p, int32_t* space) {
    const int64_t plane = plane_bytes(p.a.quantised.width), columns = p.a.weight->num_columns, blocks = (p.end - p.row + 15) / 16;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block_start(p.row, p.end, block);
        F sums[16];
        repeat<16>(BATON_EACH(r) { sums[r] = all(0.0f); });
        for (int64_t start = 0; start < columns; start += kSegment) {
            const int64_t left = columns - start;
            multiply_planes(p.a.quantised.values + first * 2 * plane + start, plane, p.weights + 32 * start, left < kSegment ? left : kSegment, true, space);
            repeat<16>(BATON_EACH(r) { sums[r] = sums[r] + plane_sums(space, r); });
        }
        put_block(p, block, first, [&](int64_t r) { return sums[r]; });
    }
}

void amx_whole_tile(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last, Scratch& scratch) {
    const int64_t blocks = (end - row + 15) / 16, weight_bytes = plane_bytes(a.weight->num_columns) * 32;
    scratch.reserve(static_cast<size_t>(weight_bytes + blocks * kPlaneSums * sizeof(int32_t)) + 2 * 64);
    uint8_t* weights = scratch.take<uint8_t>(weight_bytes);
    int32_t* space = scratch.take<int32_t>(blocks * kPlaneSums);
    if (a.weight->num_columns % 64) {  // the last tile's second half stays zero
        std::memset(weights + weight_bytes - 2048 + 512, 0, 512);
        std::memset(weights + weight_bytes - 512, 0, 512);
    }
    shape_tiles(64);
    for (; panel < last; panel++) {
        unpack_whole(*a.weight, panel, weights);
        const WholePanel own = {a, weights, panel, row, end, row_scales(*a.weight, panel)};
        if (a.weight->num_columns <= kSegment) amx_whole_panel(own, space);
        else amx_whole_segments(own, space);
    }
    _tile_release();
}

}  // namespace
