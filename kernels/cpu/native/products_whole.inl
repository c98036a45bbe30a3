// Products with whole weights: integers all through. Their sums over 2,048 columns are exact, in any order, before the
// first rounding; a longer row is a chain of such sums.

namespace {

constexpr int64_t kSegment = 2048;  // columns whose products fit 32 bits: 8191 * 128 * 2048 < 2^31

// One row of quantised inputs as whole weights meet it: both planes, and of each group what its sums begin with and what
// its second numbers meet, two of each.
struct WholeRow {
    const int8_t *high, *low;
    const int32_t *starts, *counts;
};

inline WholeRow whole_row(const BatonProduct& a, int64_t row) {
    const int64_t width = a.quantised.width, plane = plane_bytes(width);
    const int8_t* high = a.quantised.values + row * 2 * plane;
    const int32_t* starts = a.quantised.sums + row * sums_of(width);
    return {high, high + plane, starts, starts + 2 * (width / 32)};
}

// What takes a panel's sums, in units of 256, to numbers, but for the scale of the inputs.
inline F row_scales(const BatonWeight& w, int64_t panel) {
    const int64_t n = panel * 16, left = w.num_rows - n;
    return all(256.0f) * (left >= 16 ? load(w.row_scales + n) : load_some(w.row_scales + n, static_cast<int>(left)));
}

// What one segment adds to an output, a 256th of it rounded down: its sum with high bytes, and with low ones.
inline F joined(I high, I low) { return to_float(high + shift_right<8>(low)); }

#if defined(BATON_AVX512)

// As quant_block.
template <int R, int P> void whole_block(const BatonProduct& a, int64_t row, int64_t panel) {
    const BatonWeight& w = *a.weight;
    const int64_t groups = w.num_columns / 32, apart = panel_bytes(w);
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * apart;
    const __m512i lower = _mm512_set1_epi32(0xffff);
    WholeRow in[R];
    F sums[R][P];
    repeat<R>(BATON_EACH(r) {
        in[r] = whole_row(a, row + r);
        repeat<P>(BATON_EACH(p) { sums[r][p] = all(0.0f); });
    });
    for (int64_t first = 0; first < groups; first += kSegment / 32) {
        const int64_t end = first + kSegment / 32 < groups ? first + kSegment / 32 : groups;
        __m512i high[R][P], low[R][P];
        repeat<R>(BATON_EACH(r) { repeat<P>(BATON_EACH(p) { high[r][p] = low[r][p] = _mm512_setzero_si512(); }); });
        for (int64_t g = first; g < end; g++, data += kWholeBytes) {
            ask_ahead<P>(data, groups - g, kWholeBytes, apart);
            // Products with quant - 8 fit 16 bits; beside them lies the sum that the pair's second number meets.
            __m512i x[R][P], y[R][P];
            repeat<R>(BATON_EACH(r) {
                repeat<P>(BATON_EACH(p) {
                    x[r][p] = _mm512_set1_epi32(in[r].starts[2 * g]);
                    y[r][p] = _mm512_set1_epi32(in[r].starts[2 * g + 1]);
                });
            });
            repeat<8>(BATON_EACH(v) {
                __m512i columns[P];
                repeat<P>(BATON_EACH(p) { columns[p] = four_columns<4>(data + p * apart, v); });
                repeat<R>(BATON_EACH(r) {
                    const __m512i above = four_bytes(in[r].high + 32 * g + 4 * v), below = four_bytes(in[r].low + 32 * g + 4 * v);
                    repeat<P>(BATON_EACH(p) {
                        x[r][p] = _mm512_dpbusd_epi32(x[r][p], columns[p], above);
                        y[r][p] = _mm512_dpbusd_epi32(y[r][p], columns[p], below);
                    });
                });
            });
            repeat<P>(BATON_EACH(p) {
                const __m512i pairs = _mm512_loadu_si512(data + p * apart + 256);
                repeat<R>(BATON_EACH(r) {  // (sums & lower) | counts
                    const __m512i counts = _mm512_set1_epi32(in[r].counts[2 * g]), others = _mm512_set1_epi32(in[r].counts[2 * g + 1]);
                    high[r][p] = _mm512_dpwssd_epi32(high[r][p], _mm512_ternarylogic_epi32(x[r][p], lower, counts, 0xea), pairs);
                    low[r][p] = _mm512_dpwssd_epi32(low[r][p], _mm512_ternarylogic_epi32(y[r][p], lower, others, 0xea), pairs);
                });
            });
        }
        repeat<R>(BATON_EACH(r) { repeat<P>(BATON_EACH(p) { sums[r][p] = sums[r][p] + joined({high[r][p]}, {low[r][p]}); }); });
    }
    repeat<P>(BATON_EACH(p) {
        const F scales = row_scales(w, panel + p);
        repeat<R>(BATON_EACH(r) { put_outputs(a, row + r, panel + p, sums[r][p] * (scales * all(a.quantised.scales[row + r]))); });
    });
}

#else

inline I pair_products(I dot, int32_t count, const uint8_t* pairs) {
#if defined(BATON_AVX2)
    const __m256i lower = _mm256_set1_epi32(0xffff), above = _mm256_set1_epi32(count);
    const __m256i* p = reinterpret_cast<const __m256i*>(pairs);
    return {_mm256_madd_epi16(_mm256_or_si256(_mm256_and_si256(dot.a, lower), above), _mm256_loadu_si256(p)),
            _mm256_madd_epi16(_mm256_or_si256(_mm256_and_si256(dot.b, lower), above), _mm256_loadu_si256(p + 1))};
#else
    I r;
    for (int n = 0; n < 16; n++) {
        int16_t pair[2];
        std::memcpy(pair, pairs + 4 * n, 4);
        r.x[n] = dot.x[n] * pair[0] + (count >> 16) * pair[1];
    }
    return r;
#endif
}

template <int R, int P> void whole_block(const BatonProduct& a, int64_t row, int64_t panel) {
    static_assert(R == 1 && P == 1, "one row at a time");
    const BatonWeight& w = *a.weight;
    const int64_t groups = w.num_columns / 32;
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    const WholeRow in = whole_row(a, row);
    F sum = all(0.0f);
    for (int64_t first = 0; first < groups; first += kSegment / 32) {
        const int64_t end = first + kSegment / 32 < groups ? first + kSegment / 32 : groups;
        I high = all_int(0), low = high;
        for (int64_t g = first; g < end; g++, data += kWholeBytes) {
            const I x = group_products<4, 32>(data, in.high + 32 * g) + all_int(in.starts[2 * g]);
            const I y = group_products<4, 32>(data, in.low + 32 * g) + all_int(in.starts[2 * g + 1]);
            high = high + pair_products(x, in.counts[2 * g], data + 256);
            low = low + pair_products(y, in.counts[2 * g + 1], data + 256);
        }
        sum = sum + joined(high, low);
    }
    put_outputs(a, row, panel, sum * (row_scales(w, panel) * all(a.quantised.scales[row])));
}

#endif

template <int R> inline void whole_rows(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last) {
    constexpr int P = R == 1 ? 1 : kQuantPanels;  // one row waits for memory
    for (; row + R <= end; row += R) {
        int64_t p = panel;
        for (; p + P <= last; p += P) whole_block<R, P>(a, row, p);
        for (; p < last; p++) whole_block<R, 1>(a, row, p);
    }
    if constexpr (R > 1) whole_rows<R / 2>(a, row, end, panel, last);
}

#if defined(BATON_AMX)
void amx_whole_tile(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last, Scratch& scratch);
constexpr int64_t kAmxLeastWholeRows = 9;
#endif

inline void whole_tile(const BatonProduct& a, int64_t row, int64_t end, int64_t panel, int64_t last, Scratch& scratch) {
#if defined(BATON_AMX)
    if (end - row >= kAmxLeastWholeRows) {
        amx_whole_tile(a, row, end, panel, last, scratch);
        return;
    }
#else
    (void)scratch;
#endif
    whole_rows<kQuantRows>(a, row, end, panel, last);
}

}  // namespace
