// Matrix products: outputs [rows, N] of inputs [rows, K] and a weight [N, K] in panels of 16 outputs.
//
// Each output is one chain over K, whatever the number of rows: a fused multiply-add a column for dense weights; for
// quantised ones one a group of columns, whose integer products are exact in any order, and one for its minimum.

namespace {

constexpr int64_t kBlockRows = 128;  // rows that share one pass over a panel
constexpr int64_t kMostProducts = 32 << 20;  // multiplications of one tile of so many rows

inline int64_t num_panels(const BatonWeight& w) { return (w.num_rows + 15) / 16; }
inline int64_t scale_bytes(const BatonWeight& w) { return 16 * (w.half_scales ? 2 : 4); }
inline int64_t quant_bytes(const BatonWeight& w) { return w.group * (w.kind == BATON_QUANT_4 ? 8 : 16); }
inline int64_t group_bytes(const BatonWeight& w) { return quant_bytes(w) + scale_bytes(w) * (w.has_min ? 2 : 1); }
inline int64_t dense_bytes(const BatonWeight& w) { return w.kind == BATON_DENSE_F32 ? 4 : 2; }
inline int64_t panel_bytes(const BatonWeight& w) {
    if (w.kind <= BATON_DENSE_BF16) return w.num_columns * 16 * dense_bytes(w);
    return w.num_columns / w.group * group_bytes(w);
}

struct Cut {  // tiles of a product: row blocks, and ranges of panels
    int64_t row_blocks, panels_a_tile, panel_tiles;
};

inline Cut cut_product(const BatonWeight& w, int64_t rows) {
    const int64_t panels = num_panels(w), row_blocks = (rows + kBlockRows - 1) / kBlockRows;
    const int64_t wanted = row_blocks >= 16 ? 2 : 16 / row_blocks;  // enough tiles to share between threads
    // A thread that has to give its core back finishes its tile first: that must not take a millisecond.
    const int64_t bound = kMostProducts / (kBlockRows * 16 * w.num_columns) + 1;
    const int64_t even = (panels + wanted - 1) / wanted, size = even < bound ? even : bound;
    return {row_blocks, size, (panels + size - 1) / size};
}

inline int64_t tiles_of_product(const void* arguments, int64_t rows, const StepPlan&) {
    if (!rows) return 0;
    const Cut cut = cut_product(*static_cast<const BatonProduct*>(arguments)->weight, rows);
    return cut.row_blocks * cut.panel_tiles;
}

inline F load_scales(const uint8_t* p, bool half) {
    return half ? load_half(reinterpret_cast<const uint16_t*>(p)) : load(reinterpret_cast<const float*>(p));
}

inline void put_outputs(const BatonProduct& a, int64_t row, int64_t panel, F y) {
    const int64_t n = panel * 16, left = a.weight->num_rows - n;
    float* out = a.out.data + row * a.out.stride + n;
    if (left >= 16) store(out, a.bias ? y + load(a.bias + n) : y);
    else store_some(out, a.bias ? y + load_some(a.bias + n, static_cast<int>(left)) : y, static_cast<int>(left));
}

// ---- dense

template <int kind> inline F load_elements(const void* p, int64_t at) {
    if constexpr (kind == BATON_DENSE_F32) return load(static_cast<const float*>(p) + at);
    else if constexpr (kind == BATON_DENSE_F16) return load_half(static_cast<const uint16_t*>(p) + at);
    else return load_bfloat(static_cast<const uint16_t*>(p) + at);
}

template <int kind, int R, int P> inline void dense_block(const BatonProduct& a, int64_t row, int64_t panel) {
    const int64_t columns = a.weight->num_columns;
    const char* base = static_cast<const char*>(a.weight->data) + panel * panel_bytes(*a.weight);
    const int64_t panel_elements = columns * 16;
    const float* x = a.inputs.data + row * a.inputs.stride;
    F sums[R][P];
    repeat<R>(BATON_EACH(r) { repeat<P>(BATON_EACH(p) { sums[r][p] = all(0.0f); }); });
    for (int64_t k = 0; k < columns; k++) {
        F w[P];
        repeat<P>(BATON_EACH(p) { w[p] = load_elements<kind>(base, p * panel_elements + k * 16); });
        repeat<R>(BATON_EACH(r) {
            const F value = all(x[r * a.inputs.stride + k]);
            repeat<P>(BATON_EACH(p) { sums[r][p] = fma(value, w[p], sums[r][p]); });
        });
    }
    repeat<R>(BATON_EACH(r) { repeat<P>(BATON_EACH(p) { put_outputs(a, row + r, panel + p, sums[r][p]); }); });
}

#if defined(BATON_AVX512)
constexpr int kDenseRows = 6, kDensePanels = 4, kNarrowPanels = 8;
#else
constexpr int kDenseRows = 6, kDensePanels = 1, kNarrowPanels = 4;
#endif

template <int kind, int P> inline void dense_rows(const BatonProduct& a, int64_t row, int64_t end, int64_t panel) {
    for (; row + kDenseRows <= end; row += kDenseRows) dense_block<kind, kDenseRows, P>(a, row, panel);
    for (; row + 2 <= end; row += 2) dense_block<kind, 2, P>(a, row, panel);
    for (; row < end; row++) dense_block<kind, 1, P>(a, row, panel);
}

template <int kind> inline void dense_tile(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last) {
    if (end - row == 1)
        for (; panel + kNarrowPanels <= last; panel += kNarrowPanels) dense_block<kind, 1, kNarrowPanels>(a, row, panel);
    for (; panel + kDensePanels <= last; panel += kDensePanels) dense_rows<kind, kDensePanels>(a, row, end, panel);
    for (; panel < last; panel++) dense_rows<kind, 1>(a, row, end, panel);
}

// ---- quantised

struct QuantRow {  // one row of quantised inputs, its sums by the weight's groups
    const int8_t* values;
    const float* scales;    // by groups of 32 columns
    const int32_t* sums;
    const float* weighted;
};

inline QuantRow quant_row(const BatonProduct& a, int64_t row) {
    const int64_t groups = a.quantised.width / 32, fine = a.weight->group == 16 ? groups : 0;
    return {a.quantised.values + row * 64 * groups, a.quantised.scales + row * groups,
            a.quantised.sums + row * 3 * groups + fine, a.quantised.weighted + row * 3 * groups + fine};
}

#if defined(BATON_AVX512)

inline __m512i four_bytes(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
}

// vectors of 16 outputs x 4 columns of one group, as unsigned bytes
template <int bits, int V> inline void unpack_group(const uint8_t* quants, __m512i* out) {
    if constexpr (bits == 8) {
        repeat<V>(BATON_EACH(v) { out[v] = _mm512_loadu_si512(quants + 64 * v); });
    } else {
        const __m512i low = _mm512_set1_epi8(15);
        repeat<V / 2>(BATON_EACH(v) {
            const __m512i x = _mm512_loadu_si512(quants + 64 * v);
            out[2 * v] = _mm512_and_si512(x, low);
            out[2 * v + 1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
        });
    }
}

template <int bits, int group, int R> void quant_block(const BatonProduct& a, int64_t row, int64_t panel) {
    constexpr int V = group / 4;
    const BatonWeight& w = *a.weight;
    const int64_t groups = w.num_columns / group, step = group_bytes(w), quants = quant_bytes(w), scales = scale_bytes(w);
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    QuantRow in[R];
    F sums[R];
    repeat<R>(BATON_EACH(r) {
        in[r] = quant_row(a, row + r);
        sums[r] = all(0.0f);
    });
    for (int64_t g = 0; g < groups; g++, data += step) {
        __m512i wv[V];
        unpack_group<bits, V>(data, wv);
        const F scale = load_scales(data + quants, w.half_scales);
        const F least = w.has_min ? load_scales(data + quants + scales, w.half_scales) : all(0.0f);
        const int64_t column = g * group, at = column / 32 * 64 + column % 32;
        repeat<R>(BATON_EACH(r) {
            __m512i high = _mm512_setzero_si512(), low = _mm512_setzero_si512();
            repeat<V>(BATON_EACH(v) {
                high = _mm512_dpbusd_epi32(high, wv[v], four_bytes(in[r].values + at + 4 * v));
                low = _mm512_dpbusd_epi32(low, wv[v], four_bytes(in[r].values + at + 32 + 4 * v));
            });
            __m512i dot = _mm512_add_epi32(_mm512_slli_epi32(high, 4), low);
            if (w.offset) dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(w.offset * in[r].sums[g]));
            sums[r] = fma(scale * all(in[r].scales[column / 32]), _mm512_cvtepi32_ps(dot), sums[r]);
            if (w.has_min) sums[r] = fma(least, all(in[r].weighted[g]), sums[r]);
        });
    }
    repeat<R>(BATON_EACH(r) { put_outputs(a, row + r, panel, sums[r]); });
}

#elif defined(BATON_AVX2)

inline __m256i two_values(const int16_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
}

template <int bits, int group, int R> void quant_block(const BatonProduct& a, int64_t row, int64_t panel) {
    const BatonWeight& w = *a.weight;
    const int64_t groups = w.num_columns / group, step = group_bytes(w), quants = quant_bytes(w), scales = scale_bytes(w);
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    // A 64-byte vector holds 16 outputs x 4 bytes of 8 or 4 columns. Shifted and masked it gives pairs of 16-bit weights:
    // columns 0, 2 and 1, 3; with nibbles also 4, 6 and 5, 7 (shifts 0, 8, 4, 12).
    constexpr int columns = bits == 4 ? 8 : 4, shifts = bits == 4 ? 4 : 2;
    const __m256i mask = _mm256_set1_epi32(bits == 4 ? 0x000f000f : 0x00ff00ff);
    QuantRow rows[R];
    F sums[R];
    repeat<R>(BATON_EACH(r) {
        rows[r] = quant_row(a, row + r);
        sums[r] = all(0.0f);
    });
    for (int64_t g = 0; g < groups; g++, data += step) {
        __m256i left[R], right[R];
        repeat<R>(BATON_EACH(r) { left[r] = right[r] = _mm256_setzero_si256(); });
        for (int64_t v = 0; v < group / columns; v++) {
            const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 64 * v));
            const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 64 * v + 32));
            const int64_t column = g * group + v * columns;
            repeat<shifts>(BATON_EACH(s) {
                constexpr int shift = s * (bits == 4 ? 4 : 8), at = bits == 4 ? (s & 1) * 4 + (s >> 1) * 2 : s * 2;
                const __m256i wx = _mm256_and_si256(_mm256_srli_epi32(x, shift), mask);
                const __m256i wy = _mm256_and_si256(_mm256_srli_epi32(y, shift), mask);
                repeat<R>(BATON_EACH(r) {
                    const __m256i pair = two_values(reinterpret_cast<const int16_t*>(rows[r].values) + column + at);
                    left[r] = _mm256_add_epi32(left[r], _mm256_madd_epi16(wx, pair));
                    right[r] = _mm256_add_epi32(right[r], _mm256_madd_epi16(wy, pair));
                });
            });
        }
        const F scale = load_scales(data + quants, w.half_scales);
        const F least = w.has_min ? load_scales(data + quants + scales, w.half_scales) : all(0.0f);
        repeat<R>(BATON_EACH(r) {
            const I dot = I{left[r], right[r]} - all_int(w.offset * rows[r].sums[g]);
            sums[r] = fma(scale * all(rows[r].scales[g * group / 32]), to_float(dot), sums[r]);
            if (w.has_min) sums[r] = fma(least, all(rows[r].weighted[g]), sums[r]);
        });
    }
    repeat<R>(BATON_EACH(r) { put_outputs(a, row + r, panel, sums[r]); });
}

#else

template <int bits, int group, int R> void quant_block(const BatonProduct& a, int64_t row, int64_t panel) {
    static_assert(R == 1, "one row at a time");
    const BatonWeight& w = *a.weight;
    const int64_t groups = w.num_columns / group, step = group_bytes(w), quants = quant_bytes(w), scales = scale_bytes(w);
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    static const int places[4] = {0, 2, 1, 3};
    const QuantRow in = quant_row(a, row);
    const int16_t* values = reinterpret_cast<const int16_t*>(in.values);
    F sum = all(0.0f);
    for (int64_t g = 0; g < groups; g++, data += step) {
        I dot = all_int(0);
        for (int n = 0; n < 16; n++)
            for (int k = 0; k < group; k++) {
                const int byte = bits == 8 ? k / 4 * 64 + n * 4 + k % 4 : k / 8 * 64 + n * 4 + k % 4;
                const int quant = bits == 8 ? data[byte] : (k / 4 % 2 ? data[byte] >> 4 : data[byte] & 15);
                dot.x[n] += quant * values[g * group + k / 4 * 4 + places[k % 4]];
            }
        const F scale = load_scales(data + quants, w.half_scales);
        sum = fma(scale * all(in.scales[g * group / 32]), to_float(dot - all_int(w.offset * in.sums[g])), sum);
        if (w.has_min) sum = fma(load_scales(data + quants + scales, w.half_scales), all(in.weighted[g]), sum);
    }
    put_outputs(a, row, panel, sum);
}

#endif

#if defined(BATON_AVX512)
constexpr int kQuantRows = 8;
#elif defined(BATON_AVX2)
constexpr int kQuantRows = 2;
#else
constexpr int kQuantRows = 1;
#endif

template <int bits, int group, int R> inline void quant_rows(const BatonProduct& a, int64_t row, int64_t end, int64_t panel) {
    for (; row + R <= end; row += R) quant_block<bits, group, R>(a, row, panel);
    if constexpr (R > 1) quant_rows<bits, group, R / 2>(a, row, end, panel);
}

#if defined(BATON_AMX)
template <int bits, int group> void amx_tile(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last, Scratch& scratch);
constexpr int64_t kAmxLeastRows = 12;
#endif

template <int bits, int group> inline void quant_tile(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last, Scratch& scratch) {
#if defined(BATON_AMX)
    if (end - row >= kAmxLeastRows) {
        amx_tile<bits, group>(a, row, end, panel, last, scratch);
        return;
    }
#else
    (void)scratch;
#endif
    for (; panel < last; panel++) quant_rows<bits, group, kQuantRows>(a, row, end, panel);
}

inline void run_product(const void* arguments, int64_t rows, const StepPlan&, int64_t tile, Scratch& scratch) {
    const auto& a = *static_cast<const BatonProduct*>(arguments);
    const BatonWeight& w = *a.weight;
    const Cut cut = cut_product(w, rows);
    const int64_t panel = tile % cut.panel_tiles * cut.panels_a_tile, panels = num_panels(w);
    const int64_t last = panel + cut.panels_a_tile < panels ? panel + cut.panels_a_tile : panels;
    const int64_t row = tile / cut.panel_tiles * kBlockRows, end = row + kBlockRows < rows ? row + kBlockRows : rows;
    switch (w.kind) {
        case BATON_DENSE_F32: dense_tile<BATON_DENSE_F32>(a, row, end, panel, last); break;
        case BATON_DENSE_F16: dense_tile<BATON_DENSE_F16>(a, row, end, panel, last); break;
        case BATON_DENSE_BF16: dense_tile<BATON_DENSE_BF16>(a, row, end, panel, last); break;
        case BATON_QUANT_4:
            if (w.group == 32) quant_tile<4, 32>(a, row, end, panel, last, scratch);
            else quant_tile<4, 16>(a, row, end, panel, last, scratch);
            break;
        default:
            if (w.group == 32) quant_tile<8, 32>(a, row, end, panel, last, scratch);
            else quant_tile<8, 16>(a, row, end, panel, last, scratch);
    }
}

// One element as a plain number: what a dequantised copy of the weight would hold.
inline float weight_value(const BatonWeight& w, int64_t row, int64_t column) {
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + row / 16 * panel_bytes(w);
    const int64_t lane = row % 16;
    if (w.kind <= BATON_DENSE_BF16) {
        const int64_t at = column * 16 + lane;
        if (w.kind == BATON_DENSE_F32) return reinterpret_cast<const float*>(data)[at];
        const uint16_t bits = reinterpret_cast<const uint16_t*>(data)[at];
        return w.kind == BATON_DENSE_F16 ? half_to_float(bits) : float_from(uint32_t(bits) << 16);
    }
    const int64_t k = column % w.group;
    data += column / w.group * group_bytes(w);
    const uint8_t byte = data[w.kind == BATON_QUANT_8 ? k / 4 * 64 + lane * 4 + k % 4 : k / 8 * 64 + lane * 4 + k % 4];
    const int quant = w.kind == BATON_QUANT_8 ? byte : (k / 4 % 2 ? byte >> 4 : byte & 15);
    const uint8_t* scales = data + quant_bytes(w);
    auto number = [&](const uint8_t* p) {
        return w.half_scales ? half_to_float(reinterpret_cast<const uint16_t*>(p)[lane]) : reinterpret_cast<const float*>(p)[lane];
    };
    const float product = static_cast<float>(quant - w.offset) * number(scales);
    return w.has_min ? product + number(scales + scale_bytes(w)) : product;
}

}  // namespace
