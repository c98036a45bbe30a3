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
    // looks: whether there may be any at all.
    SharedChunks(const BatonStep& step, const BatonKvView& view, bool looks)
        : step_(step), blocks_(kChunkPositions / view.block_size), shared_(step.num_sequences, 0) {
        if (!looks || kChunkPositions % view.block_size) return;
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

// Rows that one task takes through `positions` of them: fewer where these are many.
int64_t task_rows(const StepPlan& plan, int64_t positions, int64_t block_rows, int64_t group) {
    const int64_t fit = std::max<int64_t>(1, plan.most_scores / (positions * group));
    if (fit >= block_rows) return block_rows;
    return fit > 16 ? fit / 16 * 16 : fit;
}

// Tasks of one sequence, one KV head: as a whole, or chunk by chunk with a merge. Chunks before `shared` are others' work.
// Returns where its partials end.
int64_t add_own(StepPlan& plan, AttendTask task, int64_t block_rows, int64_t group, int64_t shared, bool splits, int64_t partial) {
    const int64_t rows = plan.step.query_start[task.sequence + 1] - plan.step.query_start[task.sequence];
    const int64_t start = plan.step.seq_lens[task.sequence] - rows;
    for (int64_t row = 0, count; row < rows; row += count) {
        const int64_t positions = splits || shared ? kChunkPositions : start + row + block_rows;
        count = std::min(task_rows(plan, positions, block_rows, group), rows - row);
        const int64_t chunks = chunks_until(start + row + count);
        task.first_row = int32_t(row);
        task.num_rows = int32_t(count);
        task.first_chunk = 0;
        task.num_chunks = int32_t(chunks);
        task.partial = -1;
        if ((!splits && !shared) || chunks == 1) {
            plan.attends.push_back(task);
            continue;
        }
        plan.merges.push_back({task.sequence, task.head, task.first_row, task.num_rows, int32_t(chunks), partial});
        task.num_chunks = 1;
        for (int64_t chunk = 0; chunk < chunks; chunk++, partial += count * group) {
            task.first_chunk = int32_t(chunk);
            task.partial = partial;
            if (chunk >= shared) plan.attends.push_back(task);
        }
    }
    return partial;
}

// Tasks of a chunk that sequences share, one KV head: as many of them together as a task takes.
// first_partials: of every sequence, where its partials for this head begin.
void add_shared(StepPlan& plan, const SharedChunks::Group& together, int32_t head, int64_t block_rows, int64_t group,
                const std::vector<int64_t>& first_partials) {
    const auto& sequences = together.sequences;
    const size_t most = task_rows(plan, kChunkPositions, block_rows, group);
    for (size_t at = 0; at < sequences.size(); at += most) {
        const int32_t count = int32_t(std::min<size_t>(most, sequences.size() - at)), before = int32_t(plan.members.size());
        for (size_t i = at; i < at + count; i++) plan.members.push_back({sequences[i], first_partials[sequences[i]] + together.chunk * group});
        plan.attends.push_back({sequences[at], head, 0, count, int32_t(together.chunk), 1, 0, before, count});
    }
}

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
    const SharedChunks common(step, first.view, !has_windows);
    std::vector<int64_t> first_partials(step.num_sequences);
    int64_t partials = 0;
    for (int32_t head = 0; head < heads; head++) {
        for (int32_t s = 0; s < step.num_sequences; s++) {
            first_partials[s] = partials;
            partials = add_own(plan, {s, head, 0, 0, 0, 0, -1, 0, 0}, block_rows, group, common.shared(s), splits, partials);
        }
        for (const auto& together : common.groups()) add_shared(plan, together, head, block_rows, group, first_partials);
    }
    if (static_cast<int64_t>(plan.partials.size()) < partials * plan.partial_size) plan.partials.resize(partials * plan.partial_size);
    // The longest first, so that threads end together; those of about the same length head by head, whose K and V then
    // stay in a thread's cache.
    std::stable_sort(plan.attends.begin(), plan.attends.end(),
                     [&](const AttendTask& a, const AttendTask& b) { return magnitude(plan, a) > magnitude(plan, b); });
}
