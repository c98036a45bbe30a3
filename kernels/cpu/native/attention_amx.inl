// WholeAttention on the matrix units: 16 queries side by side in the lanes, so that keys are read as they lie and no
// score is summed across lanes.
//
// Four numbers of 16 bits share two groups of four bytes, high and low ones, in the order 0, 2, 1, 3: dimensions 16 apart
// of keys and queries, positions 16 apart of values and weights. Both sides of a product have that order.

namespace {

constexpr int64_t kAmxLeastQueries = 8;  // fewer fill too few lanes

struct Planes { __m512i high, low; };

// The low 16 bits of four vectors of 32-bit lanes.
inline Planes pack_planes(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i words = _mm512_set1_epi32(0xffff), even = _mm512_set1_epi32(0x00ff00ff);
    const __m512i ab = _mm512_ternarylogic_epi32(a, words, _mm512_slli_epi32(b, 16), 0xea);
    const __m512i cd = _mm512_ternarylogic_epi32(c, words, _mm512_slli_epi32(d, 16), 0xea);
    return {_mm512_ternarylogic_epi32(even, _mm512_srli_epi32(ab, 8), cd, 0xca), _mm512_ternarylogic_epi32(even, ab, _mm512_slli_epi32(cd, 8), 0xca)};
}

// Transposes 16 rows of 16 groups of four bytes, which lie one after the other.
inline void transpose_quads(const uint8_t* rows, uint8_t* out) {
    const float* own[16];
    for (int r = 0; r < 16; r++) own[r] = reinterpret_cast<const float*>(rows + 64 * r);
    transpose_block(own, 0, reinterpret_cast<float*>(out), 16);
}

// Both planes of something: the high bytes, and behind them the low ones.
struct Bytes {
    uint8_t* high;
    int64_t plane;
};

// Tiles 6 and 7: 64 numbers of 16 columns of `b`, high and low bytes.
inline void load_columns(const Bytes& b) {
    _tile_loadd(6, b.high, 64);
    _tile_loadd(7, b.high + b.plane, 64);
}

// A row's products, of which the sums fit 32 bits.
inline F whole_sums(const int32_t* sums, int64_t r) {
    auto sum = [&](int64_t plane) { return I{_mm512_load_si512(sums + 256 * plane + 16 * r)}; };
    return to_float(shift_left<8>(shift_left<8>(sum(0)) + sum(1)) + sum(2));
}

// Adds to tiles 0 to 2 the products of 16 rows of `a`, 64 numbers each, with what load_columns loaded. High bytes are
// signed, low ones are not.
inline void multiply_columns(const Bytes& a, int64_t stride) {
    _tile_loadd(4, a.high, stride);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, a.high + a.plane, stride);
    _tile_dpbsud(1, 4, 7);
    _tile_dpbuud(2, 5, 7);
    _tile_dpbusd(1, 5, 6);
}

class AmxAttention {
public:
    static size_t bytes(const Layer& l, int64_t queries) {
        const int64_t count = blocks_of(queries) * 16, wide = wide_of(l);
        return count * (2 * wide + sizeof(float) * (l.padded + 3)) + 64 * (2 * wide + 2 * l.padded + sizeof(float) * l.padded) + 2 * 1024 + 4 * 2 * kPlaneSums +
               sizeof(float) * 64 * 16 + 2 * 1024 + 12 * 64;
    }

    // queries: [count, dim].
    AmxAttention(const Layer& l, const float* queries, int64_t count, Scratch& scratch)
        : l_(l), count_(count), blocks_(blocks_of(count)), wide_(wide_of(l)), queries_{scratch.take<uint8_t>(2 * blocks_ * 16 * wide_), blocks_ * 16 * wide_},
          keys_{scratch.take<uint8_t>(2 * 64 * wide_), 64 * wide_}, values_{scratch.take<uint8_t>(2 * 64 * l.padded), 64 * l.padded},
          weights_{scratch.take<uint8_t>(2 * 1024), 1024}, scales_(scratch.take<float>(blocks_ * 16)), largest_(scratch.take<float>(blocks_ * 16)),
          sums_(scratch.take<float>(blocks_ * 16)), folded_(scratch.take<float>(blocks_ * 16 * l.padded)), products_(scratch.take<int32_t>(2 * kPlaneSums)),
          scores_(scratch.take<float>(64 * 16)), space_(scratch.take<float>(64 * l.padded)), quads_(scratch.take<uint8_t>(2 * 1024)) {
        for (int64_t block = 0; block < blocks_; block++) take_queries(queries + block * 16 * l.dim, block);
    }

    void fold_chunk(const Chunk& chunk, const Sight& sight, const Fold& fold) {
        std::memset(folded_, 0, sizeof(float) * blocks_ * 16 * l_.padded);
        for (int64_t q = 0; q < blocks_ * 16; q += 16) {
            store(largest_ + q, all(-INFINITY));
            store(sums_ + q, all(0.0f));
        }
        shape_tiles(64);
        each_tile(chunk, sight, count_, [&](const TileQueries& tile) { fold_tile(chunk, sight, tile); });
        _tile_release();
        for (int64_t block = 0; block < blocks_; block++) put_block(block, fold);
    }

private:
    static int64_t blocks_of(int64_t queries) { return (queries + 15) / 16; }
    static int64_t wide_of(const Layer& l) { return (l.dim + 63) & ~int64_t(63); }

    // 64 numbers of a vector from `d` on, rounded; those behind its end are zero.
    template <bool is_half> Planes planes_of(const void* row, int64_t d, F inverse) const {
        __m512i x[4];
        repeat<4>(BATON_EACH(v) { x[v] = d + 16 * v < l_.padded ? rounded<is_half>(row, d + 16 * v, inverse).v : _mm512_setzero_si512(); });
        return pack_planes(x[0], x[1], x[2], x[3]);
    }

    void take_queries(const float* queries, int64_t block) {
        alignas(64) float own[16][kMaxWholeDim] = {};
        alignas(64) float lanes[16 * 16], inverses[16];
        const int64_t count = count_ - 16 * block < 16 ? count_ - 16 * block : 16;
        for (int64_t q = 0; q < 16; q++) {
            if (q < count) std::memcpy(own[q], queries + q * l_.dim, sizeof(float) * l_.dim);
            store(lanes + 16 * q, from_bits(largest_parts<false>(own[q], l_.padded)));
        }
        const F tops = largest_bits(lanes);
        store(scales_ + 16 * block, query_scales(l_, tops));
        store(inverses, inverse_of(tops, all(key_steps(l_))));
        for (int64_t d = 0; d < wide_; d += 64) {
            for (int64_t q = 0; q < 16; q++) {
                const Planes planes = planes_of<false>(own[q], d, all(inverses[q]));
                _mm512_store_si512(quads_ + 64 * q, planes.high);
                _mm512_store_si512(quads_ + 1024 + 64 * q, planes.low);
            }
            uint8_t* out = queries_.high + 16 * (block * wide_ + d);
            transpose_quads(quads_, out);
            transpose_quads(quads_ + 1024, out + queries_.plane);
        }
    }

    template <bool is_half> void take_keys(const TileRows& tile) {
        for (int64_t i = 0; i < kTilePositions; i++) {
            tile.ask_ahead(i, l_.dim * element_bytes(l_.a.view));
            for (int64_t d = 0; d < wide_; d += 64) {
                const Planes planes = planes_of<is_half>(tile.rows[i], d, all(tile.inverses[i]));
                _mm512_store_si512(keys_.high + i * wide_ + d, planes.high);
                _mm512_store_si512(keys_.high + keys_.plane + i * wide_ + d, planes.low);
            }
        }
    }

    template <bool is_half> void take_values(const TileRows& tile) {
        for (int64_t i = 0; i < kTilePositions; i++) tile.ask_ahead(i, l_.dim * element_bytes(l_.a.view));
        for (int64_t d = 0; d < l_.padded; d += 16) {
            for (int64_t i = 0; i < 16; i++) {
                __m512i x[4];
                repeat<4>(BATON_EACH(v) { x[v] = rounded<is_half>(tile.rows[i + 16 * v], d, all(tile.inverses[i + 16 * v])).v; });
                const Planes planes = pack_planes(x[0], x[1], x[2], x[3]);
                _mm512_store_si512(quads_ + 64 * i, planes.high);
                _mm512_store_si512(quads_ + 1024 + 64 * i, planes.low);
            }
            transpose_quads(quads_, values_.high + 64 * d);
            transpose_quads(quads_ + 1024, values_.high + values_.plane + 64 * d);
        }
    }

    void fold_tile(const Chunk& chunk, const Sight& sight, const TileQueries& tile) {
        TileRows keys, values;
        load_tile(l_, chunk, tile, space_, keys, values, [&](auto is_half) { take_keys<decltype(is_half)::value>(keys); },
                  [&](auto is_half) { take_values<decltype(is_half)::value>(values); });
        const int64_t end = (tile.end + 15) / 16;
        for (int64_t block = tile.query / 16; block < end; block++) {
            if (block + 1 < end) ask_for_block(block + 1);
            const Sights sights = look(sight, tile.first, block);
            const Tops tops = l_.a.soft_cap > 0.0f ? weigh<true, false>(sights, block, keys.scales)
                              : sights.sees_all   ? weigh<false, true>(sights, block, keys.scales)
                                                  : weigh<false, false>(sights, block, keys.scales);
            fold_values(block, sights.sees_all ? exponentials<true>(sights, tops, block, values.scales)
                                               : exponentials<false>(sights, tops, block, values.scales));
        }
    }

    // What the next block reads does not stay in the first cache from tile to tile.
    void ask_for_block(int64_t block) const {
        const char *queries = reinterpret_cast<const char*>(queries_.high + 16 * block * wide_), *folded = reinterpret_cast<const char*>(folded_ + 16 * block * l_.padded);
        for (int64_t byte = 0; byte < 16 * wide_; byte += 64) {
            __builtin_prefetch(queries + byte);
            __builtin_prefetch(queries + queries_.plane + byte);
        }
        for (int64_t d = 0; d < l_.padded; d++) __builtin_prefetch(folded + 64 * d, 1);
    }

    // Scores of a block with positions [16 part, 16 part + 16).
    const int32_t* score(int64_t block, int64_t part) {
        const Bytes queries = {queries_.high + 16 * block * wide_, queries_.plane};
        int32_t* out = products_ + part % 2 * kPlaneSums;
        start_sums();
        for (int64_t d = 0; d < wide_; d += 64) {
            if (wide_ > 64 || part == 0) load_columns({queries.high + 16 * d, queries.plane});
            multiply_columns({keys_.high + 16 * part * wide_ + d, keys_.plane}, wide_);
        }
        put_sums(out);
        return out;
    }

    // Sums of 16 dimensions' values by the weights at hand.
    const int32_t* sum_values(int64_t d) {
        int32_t* out = products_ + d / 16 % 2 * kPlaneSums;
        start_sums();
        multiply_columns({values_.high + 64 * d, values_.plane}, 64);
        put_sums(out);
        return out;
    }

    struct Factors {
        F kept, factor;  // of the values folded before, and of the tile's own
    };

    // Positions of a tile that each query of a block sees.
    struct Sights {
        F low, high;
        bool sees_all;
        __mmask16 seen(int64_t i) const {
            const F at = all(static_cast<float>(i));
            return static_cast<__mmask16>(_mm512_cmp_ps_mask(at, low, _CMP_GE_OQ) & _mm512_cmp_ps_mask(at, high, _CMP_LT_OQ));
        }
    };

    Sights look(const Sight& sight, int64_t tile, int64_t block) const {
        const int64_t first = 16 * block, last = first + 15;
        if (last < count_ && sight.of(first, tile).is_all() && sight.of(last, tile).is_all()) return {all(0.0f), all(64.0f), true};
        alignas(64) float lows[16], highs[16];
        for (int64_t lane = 0; lane < 16; lane++) {
            const Seen seen = first + lane < count_ ? sight.of(first + lane, tile) : Seen{0, 0};
            lows[lane] = static_cast<float>(seen.low);
            highs[lane] = static_cast<float>(seen.high);
        }
        return {load(lows), load(highs), false};
    }

    struct Tops {
        F top, kept;  // the new top of each query, and what its fold so far is multiplied by
    };

    // A block's scores as the softmax takes them, position by position.
    template <bool is_capped, bool sees_all> Tops weigh(const Sights& sights, int64_t block, const float* key_scales) {
        const F scales = load(scales_ + 16 * block), before = load(largest_ + 16 * block);
        const float soft_cap = l_.a.soft_cap;
        float* scores = scores_;
        F tops[4];
        repeat<4>(BATON_EACH(v) { tops[v] = all(-INFINITY); });
        const int32_t* ready = score(block, 0);
        for (int64_t part = 0; part < 4; part++) {  // the next scores are on their way while these are weighed
            const int32_t* products = ready;
            if (part < 3) ready = score(block, part + 1);
            repeat<16>(BATON_EACH(r) {
                const int64_t i = 16 * part + r;
                F s = whole_sums(products, r) * (scales * all(key_scales[i]));
                if constexpr (is_capped) s = capped(s, soft_cap);
                if constexpr (!sees_all) s = _mm512_mask_blend_ps(sights.seen(i), all(-INFINITY), s);
                store(scores + 16 * i, s);
                tops[r % 4] = larger(tops[r % 4], s);
            });
        }
        const F top = larger(before, larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
        store(largest_ + 16 * block, top);
        return {finite_top(top), weight_of(before - finite_top(top))};
    }

    // Scores to rounded weights; unrounded they go to the sums.
    template <bool sees_all> Factors exponentials(const Sights& sights, const Tops& own, int64_t block, const float* value_scales) {
        float* scores = scores_;
        const F top = own.top;
        F sums[16], totals[16], tops[4];
        repeat<4>(BATON_EACH(v) { tops[v] = all(0.0f); });
        for (int64_t j = 0; j < 16; j++) {
            F w[4], scaled[4];
            repeat<4>(BATON_EACH(v) {
                const int64_t i = 16 * v + j;
                w[v] = weight_of(load(scores + 16 * i) - top);
                scaled[v] = w[v] * all(value_scales[i]);
                if constexpr (!sees_all) {
                    w[v] = _mm512_maskz_mov_ps(sights.seen(i), w[v]);
                    scaled[v] = _mm512_maskz_mov_ps(sights.seen(i), scaled[v]);
                }
                store(scores + 16 * i, scaled[v]);
                tops[v] = larger(tops[v], scaled[v]);
            });
            sums[j] = (w[0] + w[1]) + (w[2] + w[3]);
            totals[j] = (scaled[0] + scaled[1]) + (scaled[2] + scaled[3]);
        }
        for (int half = 8; half; half /= 2)  // the one tree over 16 lanes, of which each is a vector here
            for (int j = 0; j < half; j++) {
                sums[j] = sums[j] + sums[j + half];
                totals[j] = totals[j] + totals[j + half];
            }
        store(sums_ + 16 * block, fma(load(sums_ + 16 * block), own.kept, sums[0]));
        const F largest = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])), steps = weight_steps(largest, totals[0]), inverse = inverse_of(largest, steps);
        uint8_t* weights = weights_.high;
        for (int64_t j = 0; j < 16; j++) {
            __m512i x[4];
            repeat<4>(BATON_EACH(v) { x[v] = _mm512_castps_si512(fma(load(scores + 16 * (16 * v + j)), inverse, all(kRound))); });
            const Planes planes = pack_planes(x[0], x[1], x[2], x[3]);
            _mm512_store_si512(weights + 64 * j, planes.high);
            _mm512_store_si512(weights + 1024 + 64 * j, planes.low);
        }
        return {own.kept, largest / steps};
    }

    void fold_values(int64_t block, const Factors& factors) {
        const F kept = factors.kept, factor = factors.factor;
        float* out = folded_ + 16 * block * l_.padded;
        load_columns(weights_);
        const int32_t* ready = sum_values(0);
        for (int64_t d = 0; d < l_.padded; d += 16, out += 256) {
            const int32_t* sums = ready;
            if (d + 16 < l_.padded) ready = sum_values(d + 16);
            repeat<16>(BATON_EACH(r) { store(out + 16 * r, fma(load(out + 16 * r), kept, whole_sums(sums, r) * factor)); });
        }
    }

    // From [padded, 16 queries] to a row a query.
    void put_block(int64_t block, const Fold& fold) {
        const int64_t first = 16 * block, count = count_ - first < 16 ? count_ - first : 16;
        std::memcpy(fold.largest + first, largest_ + first, sizeof(float) * count);
        std::memcpy(fold.sums + first, sums_ + first, sizeof(float) * count);
        for (int64_t d = 0; d < l_.padded; d += 16) {
            alignas(64) float own[16 * 16];
            transpose_quads(reinterpret_cast<const uint8_t*>(folded_ + 16 * (block * l_.padded + d)), reinterpret_cast<uint8_t*>(own));
            for (int64_t q = 0; q < count; q++) std::memcpy(fold.values + (first + q) * l_.padded + d, own + 16 * q, 64);
        }
    }

    const Layer& l_;
    const int64_t count_, blocks_, wide_;
    Bytes queries_, keys_, values_, weights_;
    float *scales_, *largest_, *sums_, *folded_;
    int32_t* products_;  // two results of start_sums to put_sums
    float *scores_, *space_;
    uint8_t* quads_;
};

}  // namespace
