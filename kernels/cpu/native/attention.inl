// Attention over the paged pool, prefill and decode rows alike: what a task of the plan folds, and where results go.
//
// A row's result is a left fold of online softmax over tiles of 64 positions from 0, restarted every 1,024; the
// partials are folded in order. Which thread folds which chunk, and which rows share a tile, is in the task list only.
// An arithmetic folds one chunk: FloatAttention over float32, WholeAttention and AmxAttention over narrower KV, bit for
// bit alike.

namespace {

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

inline Fold take_fold(const Layer& l, int64_t queries, Scratch& scratch) {
    return {scratch.take<float>(queries * l.padded), scratch.take<float>(queries), scratch.take<float>(queries)};
}

// A partial in the plan's memory: values of all queries, then the largest scores, then the sums.
inline Fold partial_fold(const Layer& l, const StepPlan& plan, int64_t at, int64_t queries) {
    float* memory = const_cast<float*>(plan.partials.data()) + at * plan.partial_size;
    return {memory, memory + queries * l.padded, memory + queries * (l.padded + 1)};
}

constexpr int64_t kSeesAll = int64_t(1) << 40;  // a row that stands behind every position

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

inline size_t fold_bytes(const Layer& l, int64_t queries) { return sizeof(float) * queries * (l.padded + 2) + 3 * 64; }

inline const int32_t* table_of(const StepPlan& plan, int64_t sequence) { return plan.step.tables + sequence * plan.step.table_stride; }

// One chunk that several sequences see as a whole, each with one row: read once, folded for each as it would be alone.
template <typename Arithmetic> void attend_shared(const Layer& l, const StepPlan& plan, const AttendTask& task, Scratch& scratch) {
    const int64_t queries = task.num_members * l.group;
    scratch.reserve(sizeof(float) * queries * l.dim + 64 + fold_bytes(l, queries) + Arithmetic::bytes(l, queries));
    float* own_queries = scratch.take<float>(queries * l.dim);
    const SharedMember* members = plan.members.data() + task.first_member;
    for (int64_t m = 0; m < task.num_members; m++) {
        AttendTask own = task;
        own.sequence = members[m].sequence;
        load_queries(l, own, rows_of(plan.step, own.sequence, 0, 1), own_queries + m * l.group * l.dim);
    }
    const Fold fold = take_fold(l, queries, scratch);
    const int64_t start = task.first_chunk * kChunkPositions, end = start + kChunkPositions;
    Arithmetic(l, own_queries, queries, scratch).fold_chunk({table_of(plan, task.sequence), task.head, start, end}, {kSeesAll, l.group, 0}, fold);
    for (int64_t m = 0; m < task.num_members; m++) {
        const Fold own = partial_fold(l, plan, members[m].partial, l.group);
        const int64_t q = m * l.group;
        std::memcpy(own.values, fold.values + q * l.padded, sizeof(float) * l.group * l.padded);
        std::memcpy(own.largest, fold.largest + q, sizeof(float) * l.group);
        std::memcpy(own.sums, fold.sums + q, sizeof(float) * l.group);
    }
}

// Rows of one sequence: all their chunks, or one of them as a partial.
template <typename Arithmetic> void attend_rows(const Layer& l, const StepPlan& plan, const AttendTask& task, Scratch& scratch) {
    const TaskRows rows = rows_of(plan.step, task.sequence, task.first_row, task.num_rows);
    const int64_t queries = rows.count * l.group, end = rows.position + rows.count;
    scratch.reserve(sizeof(float) * queries * l.dim + 64 + 2 * fold_bytes(l, queries) + Arithmetic::bytes(l, queries));
    float* own_queries = scratch.take<float>(queries * l.dim);
    load_queries(l, task, rows, own_queries);
    const Fold whole = task.partial < 0 ? take_fold(l, queries, scratch) : partial_fold(l, plan, task.partial, queries);
    const Fold part = task.num_chunks > 1 ? take_fold(l, queries, scratch) : whole;
    Arithmetic arithmetic(l, own_queries, queries, scratch);
    for (int64_t chunk = task.first_chunk; chunk < task.first_chunk + task.num_chunks; chunk++) {
        const int64_t start = chunk * kChunkPositions, next = start + kChunkPositions;
        const bool is_first = chunk == task.first_chunk;
        arithmetic.fold_chunk({table_of(plan, task.sequence), task.head, start, next < end ? next : end}, {rows.position, l.group, l.a.window}, is_first ? whole : part);
        if (is_first) continue;
        for (int64_t q = 0; q < queries; q++) merge_folds(whole, part, q, l.padded);
    }
    if (task.partial < 0) put_rows(l, task.head, rows, whole);
}

template <typename Arithmetic> void attend(const Layer& l, const StepPlan& plan, const AttendTask& task, Scratch& scratch) {
    if (task.num_members) attend_shared<Arithmetic>(l, plan, task, scratch);
    else attend_rows<Arithmetic>(l, plan, task, scratch);
}

// Asks for the first tile of a task that this thread will probably take next: its memory is far away when it begins.
inline void ask_for_task(const Layer& l, const StepPlan& plan, size_t tile) {
    if (tile >= plan.attends.size() || l.a.window) return;  // under a window it would begin elsewhere
    const AttendTask& task = plan.attends[tile];
    const int64_t first = task.first_chunk * kChunkPositions, length = plan.step.seq_lens[task.sequence];
    each_run(l, first, length < first + kTilePositions ? length : first + kTilePositions, [&](int64_t, int64_t count, int64_t block, int64_t offset) {
        for (int64_t half = 0; half < 2; half++) {
            const char* own = slot_bytes(l, table_of(plan, task.sequence)[block], task.head, half, offset);
            for (int64_t byte = 0; byte < count * l.dim * element_bytes(l.a.view); byte += 64) __builtin_prefetch(own + byte, 0, 2);
        }
    });
}

inline void run_attend(const void* arguments, int64_t, const StepPlan& plan, int64_t tile, Scratch& scratch) {
    const Layer l = layer_of(*static_cast<const BatonAttend*>(arguments), plan.step);
    const AttendTask& task = plan.attends[tile];
    if (!is_whole(l)) {
        attend<FloatAttention>(l, plan, task, scratch);
        return;
    }
#if defined(BATON_AMX)
    if ((task.num_members ? task.num_members : task.num_rows) * l.group >= kAmxLeastQueries) {
        attend<AmxAttention>(l, plan, task, scratch);
        return;
    }
#endif
    ask_for_task(l, plan, tile + plan.num_threads);
    attend<WholeAttention>(l, plan, task, scratch);
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
