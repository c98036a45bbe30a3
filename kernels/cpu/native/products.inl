// Matrix products: outputs [rows, N] of inputs [rows, K] and a weight [N, K] in panels of 16 outputs.
//
// Each output is one chain over K, whatever the number of rows: a fused multiply-add a column for dense weights; for
// quantised ones one a group of columns, whose integer products are exact in any order, and one for its minimum. Whole
// weights have a file of their own.

namespace {

constexpr int64_t kBlockRows = 128;  // rows that share one pass over a panel
constexpr int64_t kWholeBytes = 32 * 8 + 64;  // a group of a panel of whole weights
constexpr int64_t kMostProducts = 32 << 20;  // multiplications of one tile of so many rows

inline int64_t num_panels(const BatonWeight& w) { return (w.num_rows + 15) / 16; }
inline int64_t scale_bytes(const BatonWeight& w) { return 16 * (w.half_scales ? 2 : 4); }
inline int64_t quant_bytes(const BatonWeight& w) { return w.group * (w.kind == BATON_QUANT_8 ? 16 : 8); }
inline int64_t group_bytes(const BatonWeight& w) {
    return w.kind == BATON_WHOLE_4 ? kWholeBytes : quant_bytes(w) + scale_bytes(w) * (w.has_min ? 2 : 1);
}
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
    const int64_t fair = (panels + wanted - 1) / wanted, most = fair < bound ? fair : bound;
    const int64_t size = most < 2 ? 2 : most - most % 2;  // where two go side by side, none is left over
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
    const int8_t *high, *low;
    const int32_t* sums;
    float scale;
};

inline QuantRow quant_row(const BatonProduct& a, int64_t row) {
    const int64_t width = a.quantised.width, groups = width / 32, plane = plane_bytes(width);
    const int8_t* high = a.quantised.values + row * 2 * plane;
    return {high, high + plane, a.quantised.sums + row * sums_of(width) + (a.weight->group == 16 ? 5 : 4) * groups, a.quantised.scales[row]};
}

#if defined(BATON_AVX512)

inline __m512i four_bytes(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
}

// Of a group, the columns from 4 v on: 16 outputs x 4 unsigned bytes.
template <int bits> inline __m512i four_columns(const uint8_t* quants, int v) {
    if (bits == 8) return _mm512_loadu_si512(quants + 64 * v);
    const __m512i eight = _mm512_loadu_si512(quants + 64 * (v / 2));
    return _mm512_and_si512(v % 2 ? _mm512_srli_epi16(eight, 4) : eight, _mm512_set1_epi8(15));
}

constexpr int64_t kGroupsAhead = 12;

// With few rows a product waits for its weights: what comes some groups later, of P panels that go side by side, is asked
// for now. The processor's own prefetch stops at every page.
template <int P> inline void ask_ahead(const uint8_t* data, int64_t left, int64_t step, int64_t apart) {
    const uint8_t* next = data + kGroupsAhead * step + (left > kGroupsAhead ? 0 : (P - 1) * apart);
    for (int64_t p = 0; p < P; p++, next += apart)
        for (int64_t at = 0; at < step; at += 64) __builtin_prefetch(next + at, 0, 3);
}

constexpr int kQuantRows = 4, kQuantPanels = 2;

// R rows with P panels. Four columns of a row are loaded once for all panels, and all chains of a group go on side by side:
// byte products wait for each other for four cycles, and two may begin in each.
template <int bits, int group, int R, int P> void quant_block(const BatonProduct& a, int64_t row, int64_t panel) {
    const BatonWeight& w = *a.weight;
    const int64_t groups = w.num_columns / group, step = group_bytes(w), quants = quant_bytes(w), scales = scale_bytes(w);
    const int64_t apart = panel_bytes(w);
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * apart;
    QuantRow in[R];
    F sums[R][P];
    repeat<R>(BATON_EACH(r) {
        in[r] = quant_row(a, row + r);
        repeat<P>(BATON_EACH(p) { sums[r][p] = all(0.0f); });
    });
    for (int64_t g = 0; g < groups; g++, data += step) {
        ask_ahead<P>(data, groups - g, step, apart);
        __m512i high[R][P], low[R][P];
        repeat<R>(BATON_EACH(r) { repeat<P>(BATON_EACH(p) { high[r][p] = low[r][p] = _mm512_setzero_si512(); }); });
        repeat<group / 4>(BATON_EACH(v) {
            __m512i columns[P];
            repeat<P>(BATON_EACH(p) { columns[p] = four_columns<bits>(data + p * apart, v); });
            repeat<R>(BATON_EACH(r) {
                const __m512i above = four_bytes(in[r].high + g * group + 4 * v), below = four_bytes(in[r].low + g * group + 4 * v);
                repeat<P>(BATON_EACH(p) {
                    high[r][p] = _mm512_dpbusd_epi32(high[r][p], columns[p], above);
                    low[r][p] = _mm512_dpbusd_epi32(low[r][p], columns[p], below);
                });
            });
        });
        repeat<P>(BATON_EACH(p) {
            const uint8_t* own = data + p * apart + quants;
            const F scale = load_scales(own, w.half_scales);
            const F least = w.has_min ? load_scales(own + scales, w.half_scales) : all(0.0f);
            repeat<R>(BATON_EACH(r) {
                __m512i dot = _mm512_add_epi32(_mm512_slli_epi32(high[r][p], 8), low[r][p]);
                if (w.offset) dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(w.offset * in[r].sums[g]));
                sums[r][p] = fma(scale, _mm512_cvtepi32_ps(dot), sums[r][p]);
                if (w.has_min) sums[r][p] = fma(least, all(static_cast<float>(in[r].sums[g])), sums[r][p]);
            });
        });
    }
    repeat<R>(BATON_EACH(r) { repeat<P>(BATON_EACH(p) { put_outputs(a, row + r, panel + p, sums[r][p] * all(in[r].scale)); }); });
}

#elif defined(BATON_AVX2)

inline __m256i four_bytes(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
}

// Pairs of 16-bit sums of unsigned and signed bytes, added up in whole numbers of 32 bits.
inline __m256i widened(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

// One quad (4 columns) of a panel: its 16 outputs as two vectors of unsigned bytes.
template <int bits> inline void unpack_quad(const uint8_t* quants, int64_t quad, __m256i& left, __m256i& right) {
    const uint8_t* p = quants + 64 * (bits == 8 ? quad : quad / 2);
    left = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    right = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
    if constexpr (bits == 4) {
        const __m256i mask = _mm256_set1_epi8(15);
        if (quad & 1) {
            left = _mm256_srli_epi16(left, 4);
            right = _mm256_srli_epi16(right, 4);
        }
        left = _mm256_and_si256(left, mask);
        right = _mm256_and_si256(right, mask);
    }
}

// Integer products of one group's quants with one plane of a row.
template <int bits, int group> inline I group_products(const uint8_t* quants, const int8_t* values) {
    __m256i left = _mm256_setzero_si256(), right = left;
    if constexpr (bits == 4) {  // eight pairs of 2 * 15 * 127 fit 16 bits
        for (int64_t v = 0; v < group / 4; v++) {
            __m256i a, b;
            unpack_quad<4>(quants, v, a, b);
            const __m256i x = four_bytes(values + 4 * v);
            left = _mm256_add_epi16(left, _mm256_maddubs_epi16(a, x));
            right = _mm256_add_epi16(right, _mm256_maddubs_epi16(b, x));
        }
        return {widened(left), widened(right)};
    }
    // A pair of 2 * 255 * 127 does not: the even and odd columns' products are widened first.
    const __m256i even = _mm256_set1_epi16(0xff);
    for (int64_t v = 0; v < group / 4; v++) {
        __m256i a, b;
        unpack_quad<8>(quants, v, a, b);
        const __m256i x = four_bytes(values + 4 * v), x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), x_odd = _mm256_srai_epi16(x, 8);
        left = _mm256_add_epi32(left, _mm256_madd_epi16(_mm256_and_si256(a, even), x_even));
        left = _mm256_add_epi32(left, _mm256_madd_epi16(_mm256_srli_epi16(a, 8), x_odd));
        right = _mm256_add_epi32(right, _mm256_madd_epi16(_mm256_and_si256(b, even), x_even));
        right = _mm256_add_epi32(right, _mm256_madd_epi16(_mm256_srli_epi16(b, 8), x_odd));
    }
    return {left, right};
}

#else

template <int bits, int group> inline I group_products(const uint8_t* quants, const int8_t* values) {
    I dot = all_int(0);
    for (int n = 0; n < 16; n++)
        for (int k = 0; k < group; k++) {
            const int byte = bits == 8 ? k / 4 * 64 + n * 4 + k % 4 : k / 8 * 64 + n * 4 + k % 4;
            dot.x[n] += (bits == 8 ? quants[byte] : (k / 4 % 2 ? quants[byte] >> 4 : quants[byte] & 15)) * values[k];
        }
    return dot;
}

#endif

#if !defined(BATON_AVX512)

constexpr int kQuantRows = 1, kQuantPanels = 1;

template <int bits, int group, int R, int P> void quant_block(const BatonProduct& a, int64_t row, int64_t panel) {
    static_assert(R == 1 && P == 1, "one row at a time");
    const BatonWeight& w = *a.weight;
    const int64_t groups = w.num_columns / group, step = group_bytes(w), quants = quant_bytes(w), scales = scale_bytes(w);
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    const QuantRow in = quant_row(a, row);
    F sum = all(0.0f);
    for (int64_t g = 0; g < groups; g++, data += step) {
        const I high = group_products<bits, group>(data, in.high + g * group), low = group_products<bits, group>(data, in.low + g * group);
        const I dot = shift_left<8>(high) + low - all_int(w.offset * in.sums[g]);
        sum = fma(load_scales(data + quants, w.half_scales), to_float(dot), sum);
        if (w.has_min) sum = fma(load_scales(data + quants + scales, w.half_scales), all(static_cast<float>(in.sums[g])), sum);
    }
    put_outputs(a, row, panel, sum * all(in.scale));
}

#endif

template <int bits, int group, int R> inline void quant_rows(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last) {
    constexpr int P = R == 1 ? 1 : kQuantPanels;  // one row waits for memory
    for (; row + R <= end; row += R) {
        int64_t p = panel;
        for (; p + P <= last; p += P) quant_block<bits, group, R, P>(a, row, p);
        for (; p < last; p++) quant_block<bits, group, R, 1>(a, row, p);
    }
    if constexpr (R > 1) quant_rows<bits, group, R / 2>(a, row, end, panel, last);
}

#if defined(BATON_AMX)
template <int bits, int group> void amx_tile(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last, Scratch& scratch);
constexpr int64_t kAmxLeastRows = 12;  // fewer take the vector units no longer
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
    if (kQuantRows > 1) quant_rows<bits, group, kQuantRows>(a, row, end, panel, last);
    else  // a panel stays near while rows meet it one by one
        for (; panel < last; panel++) quant_rows<bits, group, 1>(a, row, end, panel, panel + 1);
}

inline void whole_tile(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last, Scratch& scratch);  // products_whole.inl

// Rows [row, end), at most kBlockRows of them, with panels [panel, last).
inline void multiply_rows(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last, Scratch& scratch) {
    const BatonWeight& w = *a.weight;
    switch (w.kind) {
        case BATON_DENSE_F32: dense_tile<BATON_DENSE_F32>(a, row, end, panel, last); break;
        case BATON_DENSE_F16: dense_tile<BATON_DENSE_F16>(a, row, end, panel, last); break;
        case BATON_DENSE_BF16: dense_tile<BATON_DENSE_BF16>(a, row, end, panel, last); break;
        case BATON_WHOLE_4: whole_tile(a, row, end, panel, last, scratch); break;
        case BATON_QUANT_4: quant_tile<4, 16>(a, row, end, panel, last, scratch); break;
        default:
            if (w.group == 32) quant_tile<8, 32>(a, row, end, panel, last, scratch);
            else quant_tile<8, 16>(a, row, end, panel, last, scratch);
    }
}

inline void run_product(const void* arguments, int64_t rows, const StepPlan&, int64_t tile, Scratch& scratch) {
    const auto& a = *static_cast<const BatonProduct*>(arguments);
    const Cut cut = cut_product(*a.weight, rows);
    const int64_t panel = tile % cut.panel_tiles * cut.panels_a_tile, panels = num_panels(*a.weight);
    const int64_t last = panel + cut.panels_a_tile < panels ? panel + cut.panels_a_tile : panels;
    const int64_t row = tile / cut.panel_tiles * kBlockRows, end = row + kBlockRows < rows ? row + kBlockRows : rows;
    multiply_rows(a, row, end, panel, last, scratch);
}

inline void product_rows(const void* arguments, const RowRange& range, const StepPlan&, Scratch& scratch) {
    BatonProduct a = *static_cast<const BatonProduct*>(arguments);
    a.inputs = placed(a.inputs, range);
    a.quantised = placed(a.quantised, range);
    a.out = placed(a.out, range);
    multiply_rows(a, range.first, range.last, 0, num_panels(*a.weight), scratch);
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
    if (w.kind == BATON_WHOLE_4) {
        int16_t pair[2];
        std::memcpy(pair, data + 256 + 4 * lane, 4);
        return w.row_scales[row] * static_cast<float>(pair[0] * (quant - 8) + pair[1]);
    }
    const uint8_t* scales = data + quant_bytes(w);
    auto number = [&](const uint8_t* p) {
        return w.half_scales ? half_to_float(reinterpret_cast<const uint16_t*>(p)[lane]) : reinterpret_cast<const float*>(p)[lane];
    };
    const float product = static_cast<float>(quant - w.offset) * number(scales);
    return w.has_min ? product + number(scales + scale_bytes(w)) : product;
}

}  // namespace
