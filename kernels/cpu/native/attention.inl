// Attention over the paged pool, prefill and decode rows alike.
//
// A row's result is a left fold of online softmax over tiles of 64 positions from 0, restarted every 1,024; the
// partials are folded in order. Which thread folds which chunk, and which rows share a tile, is in the task list only.
// Scores and sums are chains of fused multiply-adds over head_dim and over positions.

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

inline F capped(F score, float soft_cap) {
    const F e = exponential(score * all(2.0f / soft_cap));  // tanh(z) = 1 - 2 / (exp(2 z) + 1)
    return all(soft_cap) * (all(1.0f) - all(2.0f) / (e + all(1.0f)));
}

// Which of a tile's 64 positions a query sees.
struct Seen {
    int64_t low, high;  // [low, high)
};

// Scores as the softmax takes them, in place; returns their largest by lane.
inline F weigh_scores(const BatonAttend& a, float* scores, Seen seen) {
    const F scale = all(a.scale);
    F s[4];
    repeat<4>(BATON_EACH(v) { s[v] = load(scores + 16 * v) * scale; });
    if (a.soft_cap > 0.0f) repeat<4>(BATON_EACH(v) { s[v] = capped(s[v], a.soft_cap); });
    if (seen.low > 0 || seen.high < 64) {
        const F minus_infinity = all(-INFINITY), first = all(static_cast<float>(seen.low)), last = all(static_cast<float>(seen.high));
        repeat<4>(BATON_EACH(v) {
            const F number = lane_numbers() + all(16.0f * v);
            s[v] = where_less(number, first, minus_infinity, where_less(number, last, s[v], minus_infinity));
        });
    }
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
template <typename SeenBy> inline void soften(const BatonAttend& a, float* scores, int64_t first, int64_t count, SeenBy seen_by, const Fold& fold, float* kept) {
    alignas(64) float lanes[16 * 16] = {}, tops[16];
    for (int64_t start = 0; start < count; start += 16) {
        const int n = static_cast<int>(count - start < 16 ? count - start : 16);
        float *own = scores + 64 * start, *largest = fold.largest + first + start, *sums = fold.sums + first + start;
        for (int r = 0; r < n; r++) store(lanes + 16 * r, weigh_scores(a, own + 64 * r, seen_by(first + start + r)));
        const F before = load_some(largest, n), top = larger(before, largest_rows(lanes));
        const F by = exponential_of_negative(before - top);
        store(tops, top);
        store_some(largest, top, n);
        store_some(kept + start, by, n);
        for (int r = 0; r < n; r++) store(lanes + 16 * r, exponentials(own + 64 * r, tops[r]));
        store_some(sums, load_some(sums, n) * by + sum_rows(lanes), n);
    }
}

// Folds the partial `next` into `fold`.
inline void merge_folds(const Fold& fold, const Fold& next, int64_t query, int64_t padded) {
    const float largest = fold.largest[query] > next.largest[query] ? fold.largest[query] : next.largest[query];
    float kept[16], added[16];
    store(kept, exponential(all(fold.largest[query] - largest)));
    store(added, exponential(all(next.largest[query] - largest)));
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
        const float sink = l.a.sinks[head], top = largest > sink ? largest : sink;
        float own[16];
        store(kept, exponential(all(largest - top)));
        store(own, exponential(all(sink - top)));
        sum = sum * kept[0] + own[0];
    }
    const F by = all(sum > 0.0f ? kept[0] / sum : 0.0f);
    const float* values = fold.values + query * l.padded;
    int64_t d = 0;
    for (; d + 16 <= l.dim; d += 16) store(out + d, load(values + d) * by);
    if (d < l.dim) store_some(out + d, load(values + d) * by, static_cast<int>(l.dim - d));
}

inline Layer layer_of(const BatonAttend& a, const BatonStep& step) {
    return {a, step, a.num_heads / a.view.num_heads, a.view.head_dim, (a.view.head_dim + 15) & ~int64_t(15)};
}

struct TaskRows {  // rows of one task: query vector q is row q / group, head q % group
    int64_t first;     // in the flat batch
    int64_t position;  // of the first row
    int64_t count;
};

inline TaskRows rows_of(const BatonStep& step, int64_t sequence, int64_t first_row, int64_t num_rows) {
    const int64_t start = step.query_start[sequence], rows = step.query_start[sequence + 1] - start;
    return {start + first_row, step.seq_lens[sequence] - rows + first_row, num_rows};
}

struct TileSpace {
    float *queries, *keys, *scores, *value_space, *key_space, *kept;
};

// Folds positions [first, first + 64), of which [low, high) are read, into `count` queries from `q`.
template <typename SeenBy>
inline void fold_queries(const Layer& l, const AttendTask& task, int64_t first, int64_t low, int64_t high, int64_t q, int64_t count, SeenBy seen_by,
                         const Fold& fold, const TileSpace& space) {
    const int32_t* table = l.step.tables + task.sequence * l.step.table_stride;
    load_keys(l, table, task.head, first, low, high, space.key_space, space.keys);
    const float* values[64];
    load_values(l, table, task.head, first, low, high, space.value_space, values);
    const float* keys = space.keys;
    multiply(space.queries + q * l.dim, l.dim, count, [keys](int64_t k) { return keys + 64 * k; }, l.dim, space.scores, 64, 64, nullptr);
    soften(l.a, space.scores, q, count, seen_by, fold, space.kept);
    multiply(space.scores, 64, count, [&values](int64_t k) { return values[k]; }, 64, fold.values + q * l.padded, l.padded, l.padded, space.kept);
}

// Folds the tile of positions [first, first + 64) into every row that sees some of it.
inline void fold_tile(const Layer& l, const AttendTask& task, const TaskRows& rows, int64_t first, const Fold& fold, const TileSpace& space) {
    const int64_t window = l.a.window, last = rows.position + rows.count - 1;
    int64_t begin = first > rows.position ? first - rows.position : 0, end = rows.count;
    if (window && first + 63 + window - rows.position < end) end = first + 63 + window - rows.position;
    if (begin >= end) return;
    const int64_t low = window && rows.position + begin - window + 1 > 0 ? rows.position + begin - window + 1 : 0;
    const int64_t q = begin * l.group, count = (end - begin) * l.group;
    auto seen_by = [&](int64_t query) {
        const int64_t own = rows.position + query / l.group;
        return Seen{window && own - window + 1 > first ? own - window + 1 - first : 0, own + 1 - first < 64 ? own + 1 - first : 64};
    };
    fold_queries(l, task, first, low, last + 1, q, count, seen_by, fold, space);
}

inline size_t attend_bytes(const Layer& l, int64_t queries) {
    return sizeof(float) * (queries * (l.dim + 64 + 2 * l.padded + 5) + 64 * l.dim + (64 + 16) * l.padded) + 16 * 64;
}

inline Fold take_fold(const Layer& l, int64_t queries, Scratch& scratch) {
    return {scratch.take<float>(queries * l.padded), scratch.take<float>(queries), scratch.take<float>(queries)};
}

// A partial in the plan's memory: values of all queries, then the largest scores, then the sums.
inline Fold partial_fold(const Layer& l, const StepPlan& plan, int64_t at, int64_t queries) {
    float* memory = const_cast<float*>(plan.partials.data()) + at * plan.partial_size;
    return {memory, memory + queries * l.padded, memory + queries * (l.padded + 1)};
}

inline void load_queries(const Layer& l, const AttendTask& task, const TaskRows& rows, float* out) {
    for (int64_t r = 0; r < rows.count; r++)
        std::memcpy(out + r * l.group * l.dim, l.a.query.data + (rows.first + r) * l.a.query.stride + task.head * l.group * l.dim,
                    sizeof(float) * l.group * l.dim);
}

inline void put_rows(const Layer& l, int64_t head, const TaskRows& rows, const Fold& fold) {
    for (int64_t q = 0; q < rows.count * l.group; q++) {
        const int64_t own_head = head * l.group + q % l.group;
        put_results(l, fold, q, own_head, l.a.out.data + (rows.first + q / l.group) * l.a.out.stride + own_head * l.dim);
    }
}

inline TileSpace take_space(const Layer& l, int64_t queries, Scratch& scratch) {
    return {scratch.take<float>(queries * l.dim), scratch.take<float>(64 * l.dim), scratch.take<float>(queries * 64),
            scratch.take<float>(64 * l.padded), scratch.take<float>(16 * l.padded), scratch.take<float>(queries)};
}

// One chunk that several sequences see as a whole, each with one row: read once, folded for each as it would be alone.
inline void attend_shared(const Layer& l, const StepPlan& plan, const AttendTask& task, Scratch& scratch) {
    const int64_t queries = task.num_members * l.group;
    scratch.reserve(attend_bytes(l, queries));
    const TileSpace space = take_space(l, queries, scratch);
    const Fold fold = take_fold(l, queries, scratch);
    const SharedMember* members = plan.members.data() + task.first_member;
    for (int64_t m = 0; m < task.num_members; m++) {
        AttendTask own = task;
        own.sequence = members[m].sequence;
        load_queries(l, own, rows_of(plan.step, own.sequence, 0, 1), space.queries + m * l.group * l.dim);
    }
    start_fold(fold, queries, l.padded);
    const int64_t start = task.first_chunk * kChunkPositions, end = start + kChunkPositions;
    for (int64_t first = start; first < end; first += kTilePositions)
        fold_queries(l, task, first, 0, end, 0, queries, [](int64_t) { return Seen{0, 64}; }, fold, space);
    for (int64_t m = 0; m < task.num_members; m++) {
        const Fold own = partial_fold(l, plan, members[m].partial, l.group);
        const int64_t q = m * l.group;
        std::memcpy(own.values, fold.values + q * l.padded, sizeof(float) * l.group * l.padded);
        std::memcpy(own.largest, fold.largest + q, sizeof(float) * l.group);
        std::memcpy(own.sums, fold.sums + q, sizeof(float) * l.group);
    }
}

inline void run_attend(const void* arguments, int64_t, const StepPlan& plan, int64_t tile, Scratch& scratch) {
    const Layer l = layer_of(*static_cast<const BatonAttend*>(arguments), plan.step);
    const AttendTask& task = plan.attends[tile];
    if (task.num_members) {
        attend_shared(l, plan, task, scratch);
        return;
    }
    const TaskRows rows = rows_of(plan.step, task.sequence, task.first_row, task.num_rows);
    const int64_t queries = rows.count * l.group;
    scratch.reserve(attend_bytes(l, queries));
    const TileSpace space = take_space(l, queries, scratch);
    load_queries(l, task, rows, space.queries);
    const Fold whole = task.partial < 0 ? take_fold(l, queries, scratch) : partial_fold(l, plan, task.partial, queries);
    const Fold part = task.num_chunks > 1 ? take_fold(l, queries, scratch) : whole;
    start_fold(whole, queries, l.padded);
    for (int64_t chunk = task.first_chunk; chunk < task.first_chunk + task.num_chunks; chunk++) {
        const Fold& fold = chunk == task.first_chunk ? whole : part;
        if (chunk != task.first_chunk) start_fold(part, queries, l.padded);
        const int64_t end = (chunk + 1) * kChunkPositions < rows.position + rows.count ? (chunk + 1) * kChunkPositions : rows.position + rows.count;
        for (int64_t first = chunk * kChunkPositions; first < end; first += kTilePositions) fold_tile(l, task, rows, first, fold, space);
        if (chunk == task.first_chunk) continue;
        for (int64_t q = 0; q < queries; q++) merge_folds(whole, part, q, l.padded);
    }
    if (task.partial < 0) put_rows(l, task.head, rows, whole);
}

inline void run_merge(const void* arguments, int64_t, const StepPlan& plan, int64_t tile, Scratch& scratch) {
    const Layer l = layer_of(*static_cast<const BatonAttend*>(arguments), plan.step);
    const MergeTask& task = plan.merges[tile];
    const TaskRows rows = rows_of(plan.step, task.sequence, task.first_row, task.num_rows);
    const int64_t queries = rows.count * l.group;
    scratch.reserve(sizeof(float) * queries * (l.padded + 2) + 4 * 64);
    const Fold whole = take_fold(l, queries, scratch), first = partial_fold(l, plan, task.partial, queries);
    std::memcpy(whole.values, first.values, sizeof(float) * queries * l.padded);
    std::memcpy(whole.largest, first.largest, sizeof(float) * queries);
    std::memcpy(whole.sums, first.sums, sizeof(float) * queries);
    for (int64_t p = 1; p < task.num_partials; p++) {
        const Fold next = partial_fold(l, plan, task.partial + p * queries, queries);
        for (int64_t q = 0; q < queries; q++) merge_folds(whole, next, q, l.padded);
    }
    put_rows(l, task.head, rows, whole);
}

inline int64_t tiles_of_attend(const void*, int64_t, const StepPlan& plan) { return static_cast<int64_t>(plan.attends.size()); }
inline int64_t tiles_of_merge(const void*, int64_t, const StepPlan& plan) { return static_cast<int64_t>(plan.merges.size()); }

}  // namespace
