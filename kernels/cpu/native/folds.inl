// What one attention's arithmetics share: which positions a query sees, the running fold and how folds become one.

namespace {

inline const F& lane_numbers() {
    static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static const F lanes = load(numbers);
    return lanes;
}

// The running fold of up to kMaxQueries query vectors.
struct Fold {
    float* values;   // [queries, padded]
    float* largest;  // [queries]
    float* sums;     // [queries]
};

// Which of a tile's 64 positions a query sees.
struct Seen {
    int64_t low, high;  // [low, high)
    bool is_all() const { return low <= 0 && high >= kTilePositions; }
};

// `inside` at positions of a tile from `number` on that are seen, `outside` at others.
inline F where_seen(Seen seen, int number, F inside, float outside) {
    const F at = lane_numbers() + all(static_cast<float>(number));
    return where_less(at, all(static_cast<float>(seen.low)), all(outside), where_less(at, all(static_cast<float>(seen.high)), inside, all(outside)));
}

// Where the queries of a task stand: query q is of the row at `position + q / group`.
struct Sight {
    int64_t position;
    int64_t group;
    int64_t window;  // 0: none
    Seen of(int64_t query, int64_t first) const {
        const int64_t own = position + query / group;
        return {window && own - window + 1 > first ? own - window + 1 - first : 0, own + 1 - first < kTilePositions ? own + 1 - first : kTilePositions};
    }
};

// Positions [start, end) of a sequence, one KV head.
struct Chunk {
    const int32_t* table;
    int64_t head, start, end;
};

// Which queries a tile is folded into: those from `query` to `end` see some of it, none of it before position `low`.
struct TileQueries {
    int64_t first, low, query, end;
};

template <typename Body> inline void each_tile(const Chunk& chunk, const Sight& sight, int64_t queries, Body body) {
    const int64_t rows = queries / sight.group, window = sight.window;
    for (int64_t first = chunk.start; first < chunk.end; first += kTilePositions) {
        const int64_t begin = first > sight.position ? first - sight.position : 0;
        int64_t end = rows;
        if (window && first + 63 + window - sight.position < end) end = first + 63 + window - sight.position;
        if (begin >= end) continue;
        const int64_t low = window && sight.position + begin - window + 1 > 0 ? sight.position + begin - window + 1 : 0;
        body(TileQueries{first, low, begin * sight.group, end * sight.group});
    }
}

inline F capped(F score, float soft_cap) {
    // tanh(z) = 1 - 2 / (exp(2 z) + 1); what is no number stays none.
    const F e = exponential_inside(smaller(all(88.0f), larger(all(-86.0f), score * all(2.0f / soft_cap))));
    return all(soft_cap) * (all(1.0f) - all(2.0f) / (e + all(1.0f)));
}

// A top that scores can be taken relative to, where a query has seen nothing yet; what is no number stays none.
inline F finite_top(F top) { return larger(all(-3e38f), top); }

// Folds the partial `next` into `fold`.
inline void merge_folds(const Fold& fold, const Fold& next, int64_t query, int64_t padded) {
    const float largest = fold.largest[query] > next.largest[query] ? fold.largest[query] : next.largest[query];
    const F top = finite_top(all(largest));
    float kept[16], added[16];
    store(kept, exponential_of_negative(all(fold.largest[query]) - top));
    store(added, exponential_of_negative(all(next.largest[query]) - top));
    fold.largest[query] = largest;
    fold.sums[query] = fold.sums[query] * kept[0] + next.sums[query] * added[0];
    float* values = fold.values + query * padded;
    const float* other = next.values + query * padded;
    for (int64_t c = 0; c < padded; c += 16) store(values + c, load(values + c) * all(kept[0]) + load(other + c) * all(added[0]));
}

inline void start_fold(const Fold& fold, int64_t queries, int64_t padded) {
    std::memset(fold.values, 0, sizeof(float) * queries * padded);
    for (int64_t q = 0; q < queries; q++) {
        fold.largest[q] = -INFINITY;
        fold.sums[q] = 0.0f;
    }
}

inline void put_results(const Layer& l, const Fold& fold, int64_t query, int64_t head, float* out) {
    float largest = fold.largest[query], sum = fold.sums[query], kept[16] = {1.0f};
    if (l.a.sinks) {
        const float sink = l.a.sinks[head];
        const F top = finite_top(all(largest > sink ? largest : sink));
        float own[16];
        store(kept, exponential_of_negative(all(largest) - top));
        store(own, exponential_of_negative(all(sink) - top));
        sum = sum * kept[0] + own[0];
    }
    // 0 where nothing was seen, no number where the sum is none.
    const F by = all(sum > 0.0f ? kept[0] / sum : sum);
    const float* values = fold.values + query * l.padded;
    int64_t d = 0;
    for (; d + 16 <= l.dim; d += 16) store(out + d, load(values + d) * by);
    if (d < l.dim) store_some(out + d, load(values + d) * by, static_cast<int>(l.dim - d));
}


}  // namespace
