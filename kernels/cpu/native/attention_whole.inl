// Attention over KV narrower than float32, in whole numbers.
//
// Queries and keys are rounded to so many steps that the sum of a head's products fits 32 bits, with one scale a vector:
// its largest magnitude over the steps. So are values, for the sum over a tile's positions, and the tile's weights times the
// scales of their values: the fewer of them are large, the more steps they have. Scores and sums of values are exact
// integers, then, on every instruction set, in any order.

namespace {

constexpr int64_t kMaxWholeDim = 256;
constexpr float kLeastTop = 1e-30f;  // vectors and weights below it fade to zero
constexpr float kRound = 12582912.0f;  // adding it leaves the nearest integer, signed, in the low 16 bits

inline bool is_whole(const Layer& l) { return l.a.view.type != BATON_KV_F32 && l.dim <= kMaxWholeDim; }

// The most steps of two sides whose products, `count` of them, sum up to less than 2^31; 16 bits hold a step.
constexpr int64_t steps_of(int64_t count) {
    int64_t steps = 1;
    while (steps < 32767 && (steps + 1) * (steps + 1) * count < int64_t(1) << 31) steps++;
    return steps;
}
constexpr float kValueSteps = steps_of(kTilePositions);

// Of queries and keys.
inline float key_steps(const Layer& l) {
    static constexpr float steps[] = {steps_of(16),  steps_of(32),  steps_of(48),  steps_of(64),  steps_of(80),  steps_of(96),
                                      steps_of(112), steps_of(128), steps_of(144), steps_of(160), steps_of(176), steps_of(192),
                                      steps_of(208), steps_of(224), steps_of(240), steps_of(256)};
    return steps[l.padded / 16 - 1];
}

// Of a tile's weights, a whole number: their sum, when this and each of them is rounded, times the most steps of a value
// stays below 2^31.
constexpr float kWeightSum = 370700.0f, kMostWeightSteps = 32767.0f;
static_assert((int64_t(kWeightSum) + kTilePositions + 1) * int64_t(kValueSteps) < int64_t(1) << 31, "32 bits hold a sum of values");
inline F weight_steps(F largest, F total) {
    const F steps = smaller(all(kMostWeightSteps), all(kWeightSum) * (largest / larger(total, all(kLeastTop))));
    return larger(all(1.0f), (steps + all(kRound)) - all(kRound));
}

// exp(x) for x not above 0, within 4e-6 of it: what is below exp(-87) is that, exp(0) is 1. The polynomial is 2^f on
// [-0.5, 0.5] with the least relative error.
inline F weight_of(F x) {
    x = larger(all(-87.0f), x);  // no number stays none
    const F magic = all(12582912.0f + 127.0f);
    const F shifted = fma(x, all(1.44269504088896341f), magic);
    const F f = fma(x, all(1.44269504088896341f), magic - shifted);
    F p = all(0.009582852944731712f);
    p = fma(p, f, all(0.055906426161527634f));
    p = fma(p, f, all(0.24024099111557007f));
    p = fma(p, f, all(0.6931241750717163f));
    p = fma(p, f, all(1.0f));
    return p * from_bits(shift_left<23>(bits_of(shifted)));
}

// Of 16 vectors at `lanes`, the largest of each as bits, so that infinities and what is no number come before all else.
inline F largest_bits(const float* lanes) {
#if defined(BATON_AVX512)
    return join_rows(lanes, [](F a, F b) { return from_bits(larger(bits_of(a), bits_of(b))); });
#else
    float tops[16];
    for (int r = 0; r < 16; r++) {
        uint32_t top = 0;
        for (int i = 0; i < 16; i++) top = bits_from(lanes[16 * r + i]) > top ? bits_from(lanes[16 * r + i]) : top;
        tops[r] = float_from(top);
    }
    return load(tops);
#endif
}

inline F inverse_of(F top, F steps) { return steps / larger(top, all(kLeastTop)); }

// K or V of a tile before rounding: where each position's vector lies, and what takes it to whole numbers and back.
struct TileRows {
    const void* rows[kTilePositions];  // halves in the pool, or floats
    float inverses[kTilePositions], scales[kTilePositions];
    const char* ahead[kTilePositions];  // vectors of the next tile, where there is one

    // Asks for the next tile's vector `i`, as this tile's is taken: one at a time, or they wait for each other.
    void ask_ahead(int64_t i, int64_t bytes) const {
        if (ahead[i]) ask_for(ahead[i], bytes);
    }
};

// body(padded), which is a constant for the usual heads: what runs over a vector's numbers is written out then.
template <typename Body> inline void with_width(int64_t padded, Body body) {
    if (padded == 64) body(std::integral_constant<int64_t, 64>{});
    else if (padded == 128) body(std::integral_constant<int64_t, 128>{});
    else body(padded);
}

template <bool is_half> inline F part_of(const void* row, int64_t d) {
    if constexpr (is_half) return load_half(static_cast<const uint16_t*>(row) + d);
    else return load(static_cast<const float*>(row) + d);
}

// A vector's 16 numbers from `d` as integers in the low 16 bits, what is above them undefined.
template <bool is_half> inline I rounded(const void* row, int64_t d, F inverse) {
    return bits_of(fma(part_of<is_half>(row, d), inverse, all(kRound)));
}

// The largest magnitude of a vector's numbers by lane, as bits of what part_of reads.
template <bool is_half> __attribute__((always_inline)) inline I largest_parts(const void* row, int64_t padded) {
    I top = all_int(0);
#if defined(BATON_AVX512)
    if constexpr (is_half) {  // halves are in order as integers: no conversion, 32 of them at a time
        const uint16_t* halves = static_cast<const uint16_t*>(row);
        __m512i tops = _mm512_setzero_si512();
        int64_t d = 0;
        for (; d + 32 <= padded; d += 32) tops = _mm512_max_epu16(tops, _mm512_and_si512(_mm512_loadu_si512(halves + d), _mm512_set1_epi16(0x7fff)));
        if (d < padded) tops = _mm512_max_epu16(tops, _mm512_and_si512(_mm512_maskz_loadu_epi16(0xffff, halves + d), _mm512_set1_epi16(0x7fff)));
        return {_mm512_max_epu16(_mm512_and_si512(tops, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32(tops, 16))};
    }
#endif
    for (int64_t d = 0; d < padded; d += 16) top = larger(top, bits_of(absolute(part_of<is_half>(row, d))));
    return top;
}

template <bool is_half> inline void measure(TileRows& tile, int64_t padded, float steps) {
    alignas(64) float lanes[16 * 16];
    for (int64_t first = 0; first < kTilePositions; first += 16) {
        with_width(padded, [&](auto width) {
            for (int64_t i = 0; i < 16; i++) store(lanes + 16 * i, from_bits(largest_parts<is_half>(tile.rows[first + i], width)));
        });
        F tops = largest_bits(lanes);
#if defined(BATON_AVX512)
        if constexpr (is_half) tops = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits_of(tops).v));
#endif
        store(tile.scales + first, tops * all(1.0f / steps));
        store(tile.inverses + first, inverse_of(tops, all(steps)));
    }
}

// Whether vectors are read from the pool as they are.
inline bool reads_halves(const Layer& l) { return l.a.view.type == BATON_KV_F16 && l.padded == l.dim; }

// Positions outside [low, high) are zeros. space: [64, padded]. steps: the largest magnitude of a rounded vector.
inline void load_rows(const Layer& l, const Chunk& chunk, int64_t half, const TileQueries& queries, float* space, float steps, TileRows& tile) {
    static const float zeros[kMaxWholeDim] = {};
    const bool halves = reads_halves(l);
    const BatonKvView& view = l.a.view;
    const int64_t begin = queries.low > queries.first ? queries.low : queries.first;
    const int64_t end = chunk.end < queries.first + kTilePositions ? chunk.end : queries.first + kTilePositions;
    for (int64_t i = 0; i < begin - queries.first; i++) tile.rows[i] = zeros;
    for (int64_t i = end - queries.first; i < kTilePositions; i++) tile.rows[i] = zeros;
    each_run(l, begin, end, [&](int64_t position, int64_t count, int64_t block, int64_t offset) {
        const void** rows = tile.rows + position - queries.first;
        if (halves) {
            const char* own = slot_bytes(l, chunk.table[block], chunk.head, half, offset);
            for (int64_t i = 0; i < count; i++) rows[i] = own + 2 * i * l.dim;
            return;
        }
        for (int64_t i = 0; i < count; i++) {
            float* own = space + (position - queries.first + i) * l.padded;
            if (l.padded > l.dim) std::memset(own + l.padded - 16, 0, 64);
            slot_vector(view, chunk.table[block], chunk.head, half, offset + i, own);
            rows[i] = own;
        }
    });
    const int64_t next = queries.first + kTilePositions, last = chunk.end < next + kTilePositions ? chunk.end : next + kTilePositions;
    const int64_t vector_bytes = l.dim * element_bytes(view);
    for (int64_t i = last > next ? last - next : 0; i < kTilePositions; i++) tile.ahead[i] = nullptr;
    each_run(l, next, last, [&](int64_t position, int64_t count, int64_t block, int64_t offset) {
        const char* own = slot_bytes(l, chunk.table[block], chunk.head, half, offset);
        for (int64_t i = 0; i < count; i++) tile.ahead[position - next + i] = own + i * vector_bytes;
    });
    if (halves) measure<true>(tile, l.padded, steps);
    else measure<false>(tile, l.padded, steps);
}

// A position whose K or V is not finite gives no number to those who see it, though its integers look like any.
inline void join_damage(TileRows& keys, const TileRows& values) {
    for (int64_t i = 0; i < kTilePositions; i += 16) {
        const F own = load(keys.scales + i), other = load(values.scales + i);
        store(keys.scales + i, own + (own - own) + (other - other));
    }
}

// K and V of a tile, each taken while what its rows point to is at hand: take(std::true_type) where they are halves.
template <typename TakeKeys, typename TakeValues>
inline void load_tile(const Layer& l, const Chunk& chunk, const TileQueries& tile, float* space, TileRows& keys, TileRows& values, TakeKeys take_keys, TakeValues take_values) {
    auto take = [&](auto& taker) { reads_halves(l) ? taker(std::true_type{}) : taker(std::false_type{}); };
    load_rows(l, chunk, 0, tile, space, key_steps(l), keys);
    take(take_keys);
    load_rows(l, chunk, 1, tile, space, kValueSteps, values);
    take(take_values);
    join_damage(keys, values);
}

// What takes a query's integer scores to what the softmax sees, but for the scale of the key; no number for one that is
// not finite.
inline F query_scales(const Layer& l, F tops) { return tops * all(1.0f / key_steps(l)) * all(l.a.scale) + (tops - tops); }

// sums[M][16 NV] = left[M][2 pairs] * right[2 pairs][16 NV]; put(m, v, sum).
template <int M, int NV, typename Put> inline void whole_product(const int32_t* left, int64_t pairs, const int32_t* right, int64_t right_stride, Put put) {
    I sums[M][NV];
    repeat<M>(BATON_EACH(m) { repeat<NV>(BATON_EACH(v) { sums[m][v] = all_int(0); }); });
    for (int64_t k = 0; k < pairs; k++, right += right_stride) {
        I r[NV];
        repeat<NV>(BATON_EACH(v) { r[v] = load_int(right + 16 * v); });
        repeat<M>(BATON_EACH(m) {
            const I x = all_int(left[m * pairs + k]);
            repeat<NV>(BATON_EACH(v) { sums[m][v] = add_pairs(sums[m][v], x, r[v]); });
        });
    }
    repeat<M>(BATON_EACH(m) { repeat<NV>(BATON_EACH(v) { put(m, v, sums[m][v]); }); });
}

#if defined(BATON_AVX512)
constexpr int kWholeRows = 6, kWholeVectors = 4;
#else
constexpr int kWholeRows = 6, kWholeVectors = 1;
#endif

// left: [count][pairs] pairs of 16-bit numbers. right: [pairs][width] pairs. put(row, column, 16 sums).
template <typename Put> inline void whole_products(const int32_t* left, int64_t count, int64_t pairs, const int32_t* right, int64_t width, Put put) {
    auto columns = [&](auto vectors, int64_t c) {
        int64_t m = 0;
        for (; m + kWholeRows <= count; m += kWholeRows)
            whole_product<kWholeRows, decltype(vectors)::value>(left + m * pairs, pairs, right + c, width, [&](int r, int v, I sum) { put(m + r, c + 16 * v, sum); });
        if (count - m >= 3) {
            whole_product<3, decltype(vectors)::value>(left + m * pairs, pairs, right + c, width, [&](int r, int v, I sum) { put(m + r, c + 16 * v, sum); });
            m += 3;
        }
        for (; m < count; m++)
            whole_product<1, decltype(vectors)::value>(left + m * pairs, pairs, right + c, width, [&](int, int v, I sum) { put(m, c + 16 * v, sum); });
    };
    int64_t c = 0;
    for (; c + 16 * kWholeVectors <= width; c += 16 * kWholeVectors) columns(std::integral_constant<int, kWholeVectors>{}, c);
    for (; c < width; c += 16) columns(std::integral_constant<int, 1>{}, c);
}

// The vector units: pairs of 16-bit numbers at a time.
class WholeAttention {
public:
    static size_t bytes(const Layer& l, int64_t queries) {
        const int64_t wide = wide_of(l);
        return sizeof(int32_t) * (queries * (wide / 2 + 64 + 32 + 3) + 64 * (wide / 2 + l.padded / 2 + l.padded) + 8 * wide) + 10 * 64;
    }

    // queries: [count, dim].
    WholeAttention(const Layer& l, const float* queries, int64_t count, Scratch& scratch)
        : l_(l), count_(count), wide_(wide_of(l)), queries_(scratch.take<int32_t>(count * wide_ / 2)), scales_(scratch.take<float>(count)),
          kept_(scratch.take<float>(count)), factors_(scratch.take<float>(count)), scores_(scratch.take<float>(count * 64)),
          weights_(scratch.take<int32_t>(count * 32)), keys_(scratch.take<int32_t>(64 * wide_ / 2)), values_(scratch.take<int32_t>(32 * l.padded)),
          space_(scratch.take<float>(64 * l.padded)), key_rows_(scratch.take<int16_t>(16 * wide_)) {
        for (int64_t q = 0; q < count; q += 16) take_queries(queries, q, count - q < 16 ? count - q : 16);
    }

    void fold_chunk(const Chunk& chunk, const Sight& sight, const Fold& fold) {
        start_fold(fold, count_, l_.padded);
        each_tile(chunk, sight, count_, [&](const TileQueries& tile) { fold_tile(chunk, sight, tile, fold); });
    }

private:
    static int64_t wide_of(const Layer& l) { return (l.dim + 31) & ~int64_t(31); }

    // Rounds queries from `first` on, at most 16 of them.
    void take_queries(const float* queries, int64_t first, int64_t count) {
        alignas(64) float space[kMaxWholeDim + 32], lanes[16 * 16], inverses[16];
        auto filled = [&](int64_t r) {  // up to the width that is read
            const float* own = queries + (first + r) * l_.dim;
            if (l_.dim == wide_) return own;
            std::memcpy(space, own, sizeof(float) * l_.dim);
            std::memset(space + l_.dim, 0, sizeof(float) * (wide_ - l_.dim));
            return static_cast<const float*>(space);
        };
        for (int64_t r = 0; r < count; r++) store(lanes + 16 * r, from_bits(largest_parts<false>(filled(r), l_.padded)));
        for (int64_t r = count; r < 16; r++) store(lanes + 16 * r, all(0.0f));
        const F tops = largest_bits(lanes);
        store_some(scales_ + first, query_scales(l_, tops), static_cast<int>(count));
        store(inverses, inverse_of(tops, all(key_steps(l_))));
        for (int64_t r = 0; r < count; r++) {
            const float* own = filled(r);
            int16_t* out = reinterpret_cast<int16_t*>(queries_ + (first + r) * wide_ / 2);
            for (int64_t d = 0; d < wide_; d += 32) store_words(out + d, rounded<false>(own, d, all(inverses[r])), rounded<false>(own, d + 16, all(inverses[r])));
        }
    }

    template <bool is_half> void take_keys(const TileRows& tile) {
        const int64_t ahead_bytes = l_.dim * element_bytes(l_.a.view);
        with_width(l_.padded, [&](auto padded) {
            const int64_t wide = (padded + 31) & ~int64_t(31);
            int16_t* const space = key_rows_;  // a copy: a member would be read anew after each store
            const float* rows[16];
            for (int64_t r = 0; r < 16; r++) rows[r] = reinterpret_cast<const float*>(space + r * wide);
            for (int64_t first = 0; first < kTilePositions; first += 16) {
                for (int64_t r = 0; r < 16; r++) {
                    const void* row = tile.rows[first + r];
                    const F inverse = all(tile.inverses[first + r]);
                    tile.ask_ahead(first + r, ahead_bytes);
                    for (int64_t d = 0; d < wide; d += 32) {
                        const I second = d + 16 < padded ? rounded<is_half>(row, d + 16, inverse) : all_int(0);
                        store_words(space + r * wide + d, rounded<is_half>(row, d, inverse), second);
                    }
                }
                for (int64_t pair = 0; pair < wide / 2; pair += 16) transpose_block(rows, pair, reinterpret_cast<float*>(keys_ + 64 * pair + first), 64);
            }
        });
    }

    template <bool is_half> void take_values(const TileRows& tile) {
        const int64_t ahead_bytes = l_.dim * element_bytes(l_.a.view);
        with_width(l_.padded, [&](auto padded) {
            int32_t* const space = values_;
            for (int64_t i = 0; i < kTilePositions; i += 2) {
                const void *one = tile.rows[i], *other = tile.rows[i + 1];
                const F first = all(tile.inverses[i]), second = all(tile.inverses[i + 1]);
                tile.ask_ahead(i, ahead_bytes);
                tile.ask_ahead(i + 1, ahead_bytes);
                for (int64_t d = 0; d < padded; d += 16)
                    store_int(space + i / 2 * padded + d, pair_words(rounded<is_half>(one, d, first), rounded<is_half>(other, d, second)));
            }
        });
    }

    void fold_tile(const Chunk& chunk, const Sight& sight, const TileQueries& tile, const Fold& fold) {
        TileRows keys, values;
        load_tile(l_, chunk, tile, space_, keys, values, [&](auto is_half) { take_keys<decltype(is_half)::value>(keys); },
                  [&](auto is_half) { take_values<decltype(is_half)::value>(values); });
        const int64_t count = tile.end - tile.query;
        whole_products(queries_ + tile.query * wide_ / 2, count, wide_ / 2, keys_, 64, [&](int64_t q, int64_t c, I sum) {
            store(scores_ + 64 * q + c, to_float(sum) * (all(scales_[tile.query + q]) * load(keys.scales + c)));
        });
        for (int64_t q = tile.query; q < tile.end; q += 16)
            soften(sight, tile.first, q, tile.end - q < 16 ? tile.end - q : 16, scores_ + 64 * (q - tile.query), values.scales, fold);
        whole_products(weights_ + tile.query * 32, count, kTilePositions / 2, values_, l_.padded, [&](int64_t q, int64_t c, I sum) {
            float* out = fold.values + (tile.query + q) * l_.padded + c;
            store(out, fma(load(out), all(kept_[tile.query + q]), to_float(sum) * all(factors_[tile.query + q])));
        });
    }

    // Scores [count, 64] of queries from `first` to rounded weights; at most 16 of them.
    void soften(const Sight& sight, int64_t tile, int64_t first, int64_t count, float* scores, const float* value_scales, const Fold& fold) {
        const int n = static_cast<int>(count);
        alignas(64) float lanes[16 * 16] = {}, sums[16 * 16] = {}, totals[16 * 16] = {}, tops[16];
        for (int r = 0; r < n; r++) store(lanes + 16 * r, weigh(sight.of(first + r, tile), scores + 64 * r));
        const F before = load_some(fold.largest + first, n), top = larger(before, largest_rows(lanes)), by = weight_of(before - finite_top(top));
        store(tops, finite_top(top));
        store_some(fold.largest + first, top, n);
        store_some(kept_ + first, by, n);
        for (int r = 0; r < n; r++) {
            const Seen seen = sight.of(first + r, tile);
            F w[4], scaled[4];
            repeat<4>(BATON_EACH(v) {
                w[v] = weight_of(load(scores + 64 * r + 16 * v) - all(tops[r]));
                scaled[v] = w[v] * load(value_scales + 16 * v);
                if (!seen.is_all()) {
                    w[v] = where_seen(seen, 16 * v, w[v], 0.0f);
                    scaled[v] = where_seen(seen, 16 * v, scaled[v], 0.0f);
                }
                store(scores + 64 * r + 16 * v, scaled[v]);
            });
            store(sums + 16 * r, (w[0] + w[1]) + (w[2] + w[3]));
            store(totals + 16 * r, (scaled[0] + scaled[1]) + (scaled[2] + scaled[3]));
            store(lanes + 16 * r, larger(larger(scaled[0], scaled[1]), larger(scaled[2], scaled[3])));
        }
        store_some(fold.sums + first, fma(load_some(fold.sums + first, n), by, sum_rows(sums)), n);
        const F largest = largest_rows(lanes), steps = weight_steps(largest, sum_rows(totals));
        store_some(factors_ + first, largest / steps, n);
        store(tops, inverse_of(largest, steps));
        for (int r = 0; r < n; r++) {
            int16_t* out = reinterpret_cast<int16_t*>(weights_ + (first + r) * 32);
            repeat<4>(BATON_EACH(v) { store_words(out + 16 * v, bits_of(fma(load(scores + 64 * r + 16 * v), all(tops[r]), all(kRound)))); });
        }
    }

    // Scores as the softmax takes them, in place; returns their largest by lane.
    F weigh(Seen seen, float* scores) const {
        F s[4];
        repeat<4>(BATON_EACH(v) {
            s[v] = load(scores + 16 * v);
            if (l_.a.soft_cap > 0.0f) s[v] = capped(s[v], l_.a.soft_cap);
            if (!seen.is_all()) s[v] = where_seen(seen, 16 * v, s[v], -INFINITY);
            store(scores + 16 * v, s[v]);
        });
        return larger(larger(s[0], s[1]), larger(s[2], s[3]));
    }

    const Layer& l_;
    const int64_t count_, wide_;
    int32_t* queries_;
    float *scales_, *kept_, *factors_, *scores_;
    int32_t *weights_, *keys_, *values_;
    float* space_;
    int16_t* key_rows_;
};

}  // namespace
