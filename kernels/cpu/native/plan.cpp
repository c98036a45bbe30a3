// Cuts a step's attention into tasks: once a step, for all its layers.
#include <algorithm>

#include "operations.h"
#include "team.h"

namespace {

int64_t chunks_until(int64_t position) { return (position + kChunkPositions - 1) / kChunkPositions; }

// The binary logarithm of a task's cost, which grows with the positions that it looks at.
int magnitude(const StepPlan& plan, const AttendTask& task) {
    const int64_t rows = plan.step.query_start[task.sequence + 1] - plan.step.query_start[task.sequence];
    const int64_t seen = plan.step.seq_lens[task.sequence] - rows + task.first_row + task.num_rows;
    const int64_t cost = (task.partial < 0 ? seen : kChunkPositions) * (4 + task.num_rows);
    return 63 - __builtin_clzll(static_cast<unsigned long long>(cost));
}

}  // namespace

void plan_attention(StepPlan& plan, const BatonAttend& first) {
    const BatonStep& step = plan.step;
    const int64_t heads = first.view.num_heads, group = first.num_heads / heads;
    const int64_t padded = (first.view.head_dim + 15) / 16 * 16, block_rows = std::max<int64_t>(1, kMaxQueries / group);
    plan.attends.clear();
    plan.merges.clear();
    plan.partial_size = padded + 2;
    int64_t num_blocks = 0;
    for (int64_t s = 0; s < step.num_sequences; s++)
        num_blocks += (step.query_start[s + 1] - step.query_start[s] + block_rows - 1) / block_rows * heads;
    const bool splits = num_blocks < 8 * plan.num_threads;
    int64_t partials = 0;
    for (int64_t s = 0; s < step.num_sequences; s++) {
        const int64_t rows = step.query_start[s + 1] - step.query_start[s], start = step.seq_lens[s] - rows;
        for (int64_t head = 0; head < heads; head++) {
            for (int64_t row = 0; row < rows; row += block_rows) {
                const int64_t count = std::min(block_rows, rows - row), chunks = chunks_until(start + row + count);
                AttendTask task{int32_t(s), int32_t(head), int32_t(row), int32_t(count), 0, int32_t(chunks), -1};
                if (!splits || chunks == 1) {
                    plan.attends.push_back(task);
                    continue;
                }
                plan.merges.push_back({int32_t(s), int32_t(head), int32_t(row), int32_t(count), int32_t(chunks), partials});
                task.num_chunks = 1;
                for (int64_t chunk = 0; chunk < chunks; chunk++, partials += count * group) {
                    task.first_chunk = int32_t(chunk);
                    task.partial = partials;
                    plan.attends.push_back(task);
                }
            }
        }
    }
    if (static_cast<int64_t>(plan.partials.size()) < partials * plan.partial_size) plan.partials.resize(partials * plan.partial_size);
    // The longest first, so that threads end together; those of about the same length head by head, whose K and V then
    // stay in a thread's cache.
    std::stable_sort(plan.attends.begin(), plan.attends.end(),
                     [&](const AttendTask& a, const AttendTask& b) { return magnitude(plan, a) > magnitude(plan, b); });
}
