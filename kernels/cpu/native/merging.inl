// Attention over disjoint ranges of positions, put together: the fold of kernels/reference/merging.py.

namespace {

// In `merged` the weighted outputs so far, relative to the largest log-sum so far.
inline void merge_vector(const BatonMergePartials& a, int64_t rows, int64_t vector, float* merged) {
    const int64_t vectors = rows * a.num_heads, size = a.head_dim, whole = size & ~int64_t(15);
    const int rest = static_cast<int>(size - whole);
    float largest = -INFINITY, total = 0.0f;
    std::memset(merged, 0, sizeof(float) * size);
    for (int64_t p = 0; p < a.num_partials; p++) {
        const float log_sum = a.log_sums[p * vectors + vector], higher = log_sum <= largest ? largest : log_sum;
        if (higher == -INFINITY) continue;
        const float kept = first_lane(exponential_of_negative(all(largest - higher)));
        const float added = first_lane(exponential_of_negative(all(log_sum - higher)));
        if (added == 0.0f) continue;  // what a range that saw nothing holds may be anything
        const float* output = a.outputs + (p * vectors + vector) * size;
        for (int64_t d = 0; d < whole; d += 16) store(merged + d, load(merged + d) * all(kept) + load(output + d) * all(added));
        if (rest) store_some(merged + whole, load_some(merged + whole, rest) * all(kept) + load_some(output + whole, rest) * all(added), rest);
        total = total * kept + added;
        largest = higher;
    }
    const F divisor = all(total == 0.0f ? 1.0f : total);
    for (int64_t d = 0; d < whole; d += 16) store(merged + d, load(merged + d) / divisor);
    if (rest) store_some(merged + whole, load_some(merged + whole, rest) / divisor, rest);
}

inline void merge_partials_rows(const void* arguments, const RowRange& range, const StepPlan& plan, Scratch&) {
    const auto& a = *static_cast<const BatonMergePartials*>(arguments);
    each_row(range, [&](int64_t row) {
        for (int64_t vector = row * a.num_heads; vector < (row + 1) * a.num_heads; vector++)
            merge_vector(a, plan.step.num_tokens, vector, a.out + vector * a.head_dim);
    });
}

}  // namespace
