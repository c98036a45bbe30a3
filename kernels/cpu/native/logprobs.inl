// Log-probabilities: by the weights and folds of sampling.inl, which also says which types its templates may take.
#include <algorithm>

namespace {

struct Candidate { float logit; int32_t id; };
struct Standing { double normaliser; int64_t rank; };

// Memory of one row's log-probabilities.
struct LogprobsRoom {
    double* weights;   // [kFoldTogether * kFold]
    double* sums;      // [kFoldTogether]
    float* maxima;     // [blocks]
    Key* keys;         // [blocks]
    Candidate* found;  // [blocks * kFold]

    LogprobsRoom(Scratch& scratch, int64_t blocks) {
        scratch.reserve(sizeof(double) * kFoldTogether * (kFold + 1) + (sizeof(float) + sizeof(Key) + sizeof(Candidate) * kFold) * blocks + 5 * 64);
        weights = scratch.take<double>(kFoldTogether * kFold);
        sums = scratch.take<double>(kFoldTogether);
        maxima = scratch.take<float>(blocks);
        keys = scratch.take<Key>(blocks);
        found = scratch.take<Candidate>(blocks * kFold);
    }
};

// (log(sum(exp(logits))) of a row, 1 + how many logits are larger than `chosen`); leaves the blocks' maxima in the room.
// No number where logits are not finite, or all are -inf.
inline Standing normaliser_and_rank(const float* row, int64_t width, float chosen, const LogprobsRoom& room) {
    const int64_t blocks = fold_count(width);
    const float largest = block_maxima(row, width, room.maxima);
    if (!__builtin_isfinite(largest)) return {NAN, 0};
    const Weighing weighing{largest, 1.0, 0.0, -INFINITY};
    const int64_t all_of_them[kFoldTogether] = {0, 1, 2, 3, 4, 5, 6, 7};
    double total = 0.0;
    int64_t rank = 1;
    for (int64_t first = 0; first < blocks; first += kFoldTogether) {
        const int64_t some = lesser(kFoldTogether, blocks - first);
        for (int64_t b = 0; b < some; b++) {
            const float* logits = row + (first + b) * kFold;
            const int64_t count = lesser(kFold, width - (first + b) * kFold);
            weigh_block(logits, count, weighing, room.weights + b * kFold);
            int32_t more = 0;
            for (int64_t i = 0; i < count; i++) more += logits[i] > chosen;
            rank += more;
        }
        fold_picked(room.weights, all_of_them, some, 0.0, room.sums);
        for (int64_t b = 0; b < some; b++) total += room.sums[b];
    }
    return {static_cast<double>(largest) + std::log(total), rank};
}

// Puts the `count` largest logits first in `found`, the lower id first among equals.
inline void find_best(const float* row, int64_t width, int64_t count, const LogprobsRoom& room) {
    const float bound = bound_of_best(room.maxima, fold_count(width), count, room.keys);
    const int64_t found = collect(row, width, room.maxima, bound, room.found,
                                  [](float logit, int64_t id) { return Candidate{logit, static_cast<int32_t>(id)}; });
    std::partial_sort(room.found, room.found + count, room.found + found, [](Candidate one, Candidate other) {
        return one.logit != other.logit ? one.logit > other.logit : one.id < other.id;
    });
}

inline void logprobs_rows(const void* arguments, const RowRange& range, const StepPlan&, Scratch& scratch) {
    const auto& a = *static_cast<const BatonLogprobs*>(arguments);
    const LogprobsRoom room(scratch, fold_count(a.width));
    each_row(range, [&](int64_t index) {
        const float* row = a.logits.data + a.rows[index] * a.logits.stride;
        const float chosen = row[a.token_ids[index]];
        const auto [normaliser, rank] = normaliser_and_rank(row, a.width, chosen, room);
        a.logprobs[index] = static_cast<double>(chosen) - normaliser;
        a.ranks[index] = rank;
        const int64_t count = normaliser == normaliser ? lesser(a.num_top[index], a.width) : 0;
        if (count) find_best(row, a.width, count, room);
        for (int64_t i = 0; i < count; i++) {
            const int32_t id = room.found[i].id;
            a.top_ids[index * a.top_stride + i] = id;
            a.top_logprobs[index * a.top_stride + i] = static_cast<double>(room.found[i].logit) - normaliser;
        }
    });
}

}  // namespace
