// Attention over float32 KV: scores and sums are chains of fused multiply-adds over head_dim and over positions.

namespace {

// out[M][16 NV] = left[M][K] * right[K] rows, one chain over K an element; it begins with kept[M] * out where there is
// `kept`, else with 0.
template <int M, int NV, typename Right> inline void small_product(const float* left, int64_t left_stride, Right right, int64_t K, float* out, int64_t out_stride, const float* kept) {
    F sums[M][NV];
    repeat<M>(BATON_EACH(m) {
        repeat<NV>(BATON_EACH(v) { sums[m][v] = kept ? load(out + m * out_stride + 16 * v) * all(kept[m]) : all(0.0f); });
    });
    for (int64_t k = 0; k < K; k++) {
        const float* row = right(k);
        F r[NV];
        repeat<NV>(BATON_EACH(v) { r[v] = load(row + 16 * v); });
        repeat<M>(BATON_EACH(m) {
            const F x = all(left[m * left_stride + k]);
            repeat<NV>(BATON_EACH(v) { sums[m][v] = fma(x, r[v], sums[m][v]); });
        });
    }
    repeat<M>(BATON_EACH(m) { repeat<NV>(BATON_EACH(v) { store(out + m * out_stride + 16 * v, sums[m][v]); }); });
}

#if defined(BATON_AVX512)
constexpr int kProductRows = 6, kProductVectors = 4;
#else
constexpr int kProductRows = 6, kProductVectors = 1;
#endif

template <int NV, typename Right> inline void product_columns(const float* left, int64_t left_stride, int64_t count, Right right, int64_t K, float* out, int64_t out_stride, const float* kept) {
    int64_t m = 0;
    auto kept_at = [&](int64_t row) { return kept ? kept + row : nullptr; };
    for (; m + kProductRows <= count; m += kProductRows)
        small_product<kProductRows, NV>(left + m * left_stride, left_stride, right, K, out + m * out_stride, out_stride, kept_at(m));
    for (; m + 3 <= count; m += 3)
        small_product<3, NV>(left + m * left_stride, left_stride, right, K, out + m * out_stride, out_stride, kept_at(m));
    for (; m < count; m++)
        small_product<1, NV>(left + m * left_stride, left_stride, right, K, out + m * out_stride, out_stride, kept_at(m));
}

template <typename Right> inline void multiply(const float* left, int64_t left_stride, int64_t count, Right right, int64_t K, float* out, int64_t out_stride, int64_t width, const float* kept) {
    int64_t c = 0;
    for (; c + 16 * kProductVectors <= width; c += 16 * kProductVectors)
        product_columns<kProductVectors>(left, left_stride, count, [&](int64_t k) { return right(k) + c; }, K, out + c, out_stride, kept);
    for (; c < width; c += 16)
        product_columns<1>(left, left_stride, count, [&](int64_t k) { return right(k) + c; }, K, out + c, out_stride, kept);
}

// K and V of a tile's 64 positions: keys [dim, 64], a pointer to [padded] floats a position. In `damage` 0, or no number
// where either is not finite; such a V is put as zeros in `space` [64, padded], so that it harms only those who see it.
inline void set_damage_apart(const float* keys, int64_t dim, int64_t padded, const float** values, float* space, float* damage) {
    alignas(64) float lanes[16 * 16];
    for (int64_t first = 0; first < kTilePositions; first += 16) {
        F own = all(0.0f);
        for (int64_t d = 0; d < dim; d++) own = fma(load(keys + 64 * d + first), all(0.0f), own);
        for (int64_t i = 0; i < 16; i++) {
            F sum = all(0.0f);
            for (int64_t d = 0; d < padded; d += 16) sum = fma(load(values[first + i] + d), all(0.0f), sum);
            store(lanes + 16 * i, sum);
        }
        store(damage + first, own + sum_rows(lanes));
    }
    for (int64_t i = 0; i < kTilePositions; i++) {
        if (damage[i] == 0.0f) continue;
        std::memset(space + i * padded, 0, sizeof(float) * padded);
        values[i] = space + i * padded;
    }
}

// Scores as the softmax takes them, in place; returns their largest by lane. One that is not finite is no number.
inline F weigh_scores(const BatonAttend& a, float* scores, const float* damage, Seen seen) {
    const F scale = all(a.scale);
    F s[4];
    repeat<4>(BATON_EACH(v) {
        s[v] = load(scores + 16 * v) * scale;
        s[v] = s[v] + ((s[v] - s[v]) + load(damage + 16 * v));
    });
    if (a.soft_cap > 0.0f) repeat<4>(BATON_EACH(v) { s[v] = capped(s[v], a.soft_cap); });
    if (!seen.is_all()) repeat<4>(BATON_EACH(v) { s[v] = where_seen(seen, 16 * v, s[v], -INFINITY); });
    repeat<4>(BATON_EACH(v) { store(scores + 16 * v, s[v]); });
    return larger(larger(s[0], s[1]), larger(s[2], s[3]));
}

// exp(scores - top) in place; returns their sum by lane.
inline F exponentials(float* scores, float top) {
    F s[4];
    repeat<4>(BATON_EACH(v) {
        s[v] = exponential_of_negative(load(scores + 16 * v) - all(top));
        store(scores + 16 * v, s[v]);
    });
    return (s[0] + s[1]) + (s[2] + s[3]);
}

// Scores [count, 64] of queries from `first` to weights, each of which sees something. kept: what the values folded so
// far are to be multiplied by, a number a query.
inline void soften(const BatonAttend& a, float* scores, const float* damage, int64_t first, int64_t count, const Sight& sight, int64_t tile, const Fold& fold, float* kept) {
    alignas(64) float lanes[16 * 16] = {}, tops[16];
    for (int64_t start = 0; start < count; start += 16) {
        const int n = static_cast<int>(count - start < 16 ? count - start : 16);
        float *own = scores + 64 * start, *largest = fold.largest + first + start, *sums = fold.sums + first + start;
        for (int r = 0; r < n; r++) store(lanes + 16 * r, weigh_scores(a, own + 64 * r, damage, sight.of(first + start + r, tile)));
        const F before = load_some(largest, n), top = larger(before, largest_rows(lanes));
        const F by = exponential_of_negative(before - top);
        store(tops, top);
        store_some(largest, top, n);
        store_some(kept + start, by, n);
        for (int r = 0; r < n; r++) store(lanes + 16 * r, exponentials(own + 64 * r, tops[r]));
        store_some(sums, load_some(sums, n) * by + sum_rows(lanes), n);
    }
}

class FloatAttention {
public:
    static size_t bytes(const Layer& l, int64_t queries) {
        return sizeof(float) * (queries * 65 + kTilePositions * l.dim + (kTilePositions + 16) * l.padded) + 5 * 64;
    }

    // queries: [count, dim].
    FloatAttention(const Layer& l, const float* queries, int64_t count, Scratch& scratch)
        : l_(l), queries_(queries), count_(count), keys_(scratch.take<float>(kTilePositions * l.dim)), scores_(scratch.take<float>(count * 64)),
          value_space_(scratch.take<float>(kTilePositions * l.padded)), key_space_(scratch.take<float>(16 * l.padded)), kept_(scratch.take<float>(count)) {}

    void fold_chunk(const Chunk& chunk, const Sight& sight, const Fold& fold) {
        start_fold(fold, count_, l_.padded);
        each_tile(chunk, sight, count_, [&](const TileQueries& tile) { fold_tile(chunk, sight, tile, fold); });
    }

private:
    void fold_tile(const Chunk& chunk, const Sight& sight, const TileQueries& tile, const Fold& fold) {
        const float *values[kTilePositions], *keys = keys_;
        load_keys(l_, chunk.table, chunk.head, tile.first, tile.low, chunk.end, key_space_, keys_);
        load_values(l_, chunk.table, chunk.head, tile.first, tile.low, chunk.end, value_space_, values);
        alignas(64) float damage[kTilePositions];
        set_damage_apart(keys, l_.dim, l_.padded, values, value_space_, damage);
        const int64_t q = tile.query, count = tile.end - q;
        multiply(queries_ + q * l_.dim, l_.dim, count, [keys](int64_t k) { return keys + 64 * k; }, l_.dim, scores_, 64, 64, nullptr);
        soften(l_.a, scores_, damage, q, count, sight, tile.first, fold, kept_);
        multiply(scores_, 64, count, [&values](int64_t k) { return values[k]; }, kTilePositions, fold.values + q * l_.padded, l_.padded, l_.padded, kept_);
    }

    const Layer& l_;
    const float* queries_;
    int64_t count_;
    float *keys_, *scores_, *value_space_, *key_space_, *kept_;
};

}  // namespace
