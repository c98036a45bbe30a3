// Cuts a step's attention into tasks: once a step, for all its layers.
#include <algorithm>
#include <cstring>

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

// Sequences that decode one token and begin with the same blocks, chunk by chunk.
class SharedChunks {
public:
    SharedChunks(const BatonStep& step, const BatonKvView& view) : step_(step), blocks_(kChunkPositions / view.block_size), shared_(step.num_sequences, 0) {
        if (kChunkPositions % view.block_size) return;
        std::vector<int32_t> decoding;
        for (int64_t s = 0; s < step.num_sequences; s++)
            if (step.query_start[s + 1] - step.query_start[s] == 1) decoding.push_back(int32_t(s));
        part(decoding, 0);
    }

    struct Group {
        int64_t chunk;
        std::vector<int32_t> sequences;
    };
    const std::vector<Group>& groups() const { return groups_; }
    int64_t shared(int64_t sequence) const { return shared_[sequence]; }  // leading chunks that it has in common with another

private:
    // Sequences that share all chunks before this one: those that share it too, and what these share after it.
    void part(std::vector<int32_t> sequences, int64_t chunk) {
        // A sequence's last chunk is never shared: something is left to merge with.
        auto is_short = [&](int32_t s) { return step_.seq_lens[s] <= (chunk + 1) * kChunkPositions; };
        sequences.erase(std::remove_if(sequences.begin(), sequences.end(), is_short), sequences.end());
        auto blocks_of = [&](int32_t s) { return step_.tables + s * step_.table_stride + chunk * blocks_; };
        auto order = [&](int32_t a, int32_t b) { return std::memcmp(blocks_of(a), blocks_of(b), sizeof(int32_t) * blocks_); };
        std::stable_sort(sequences.begin(), sequences.end(), [&](int32_t a, int32_t b) { return order(a, b) < 0; });
        for (auto first = sequences.begin(); first != sequences.end();) {
            const auto last = std::find_if(first, sequences.end(), [&](int32_t s) { return order(*first, s) != 0; });
            if (last - first > 1) {
                for (auto s = first; s != last; s++) shared_[*s] = chunk + 1;
                groups_.push_back({chunk, {first, last}});
                part({first, last}, chunk + 1);
            }
            first = last;
        }
    }

    const BatonStep& step_;
    const int64_t blocks_;
    std::vector<int64_t> shared_;
    std::vector<Group> groups_;
};

}  // namespace

void plan_attention(StepPlan& plan, const BatonAttend& first, bool has_windows) {
    const BatonStep& step = plan.step;
    const int64_t heads = first.view.num_heads, group = first.num_heads / heads;
    const int64_t padded = (first.view.head_dim + 15) / 16 * 16, block_rows = std::max<int64_t>(1, kMaxQueries / group);
    plan.attends.clear();
    plan.merges.clear();
    plan.members.clear();
    plan.partial_size = padded + 2;
    int64_t num_blocks = 0;
    for (int64_t s = 0; s < step.num_sequences; s++)
        num_blocks += (step.query_start[s + 1] - step.query_start[s] + block_rows - 1) / block_rows * heads;
    const bool splits = num_blocks < 8 * plan.num_threads;
    BatonStep nobody = step;
    nobody.num_sequences = 0;
    const SharedChunks common(has_windows ? nobody : step, first.view);
    std::vector<int64_t> own_partials(step.num_sequences * heads);  // of sequences that share chunks: where they begin
    int64_t partials = 0;
    for (int64_t s = 0; s < step.num_sequences; s++) {
        const int64_t rows = step.query_start[s + 1] - step.query_start[s], start = step.seq_lens[s] - rows;
        const int64_t shared = has_windows ? 0 : common.shared(s);
        for (int64_t head = 0; head < heads; head++) {
            own_partials[s * heads + head] = partials;
            for (int64_t row = 0; row < rows; row += block_rows) {
                const int64_t count = std::min(block_rows, rows - row), chunks = chunks_until(start + row + count);
                AttendTask task{int32_t(s), int32_t(head), int32_t(row), int32_t(count), 0, int32_t(chunks), -1, 0, 0};
                if ((!splits && !shared) || chunks == 1) {
                    plan.attends.push_back(task);
                    continue;
                }
                plan.merges.push_back({int32_t(s), int32_t(head), int32_t(row), int32_t(count), int32_t(chunks), partials});
                task.num_chunks = 1;
                for (int64_t chunk = 0; chunk < chunks; chunk++, partials += count * group) {
                    task.first_chunk = int32_t(chunk);
                    task.partial = partials;
                    if (chunk >= shared) plan.attends.push_back(task);
                }
            }
        }
    }
    for (const auto& together : common.groups()) {
        for (int64_t head = 0; head < heads; head++) {
            for (size_t at = 0; at < together.sequences.size(); at += block_rows) {
                const int32_t count = int32_t(std::min<size_t>(block_rows, together.sequences.size() - at));
                const int32_t before = int32_t(plan.members.size());
                for (int32_t i = 0; i < count; i++) {
                    const int32_t s = together.sequences[at + i];
                    plan.members.push_back({s, own_partials[s * heads + head] + together.chunk * group});
                }
                plan.attends.push_back({together.sequences[at], int32_t(head), 0, count, int32_t(together.chunk), 1, 0, before, count});
            }
        }
    }
    if (static_cast<int64_t>(plan.partials.size()) < partials * plan.partial_size) plan.partials.resize(partials * plan.partial_size);
    // The longest first, so that threads end together; those of about the same length head by head, whose K and V then
    // stay in a thread's cache.
    std::stable_sort(plan.attends.begin(), plan.attends.end(),
                     [&](const AttendTask& a, const AttendTask& b) { return magnitude(plan, a) > magnitude(plan, b); });
}
