// What a variant offers for each operation: how many tiles a step cuts it into, and how to run one of them.
//
// Tiles of one operation are independent and may run on any thread in any order; no result depends on the cut.
#pragma once
#include <cstdint>
#include <vector>

#include "interface.h"
#include "scratch.h"

// One piece of attention: rows of one sequence, one KV head, a range of 1,024-position chunks; or one row of each of
// several sequences, one KV head, a chunk that they share.
struct AttendTask {
    int32_t sequence;
    int32_t head;
    int32_t first_row;    // inside the sequence's rows of this step
    int32_t num_rows;
    int32_t first_chunk;
    int32_t num_chunks;   // all of the rows' chunks, or one of several whose partials are merged afterwards
    int64_t partial;      // where its partial begins, in query vectors; -1: writes the result itself
    int32_t first_member; // in StepPlan.members
    int32_t num_members;  // sequences that share the chunk; 0: it is one sequence's own
};

// A sequence that shares a chunk, and where its own partial of it begins.
struct SharedMember {
    int32_t sequence;
    int64_t partial;
};

// One group of query vectors whose partials are merged.
struct MergeTask {
    int32_t sequence;
    int32_t head;
    int32_t first_row;
    int32_t num_rows;
    int32_t num_partials;
    int64_t partial;  // the first; the next ones follow
};

// What a step shares between operations: cut once, used by every layer.
struct StepPlan {
    BatonStep step;
    std::vector<AttendTask> attends;
    std::vector<MergeTask> merges;
    std::vector<SharedMember> members;
    std::vector<float> partials;   // [query vectors][head_dim + 2]: values, largest score, sum
    int64_t partial_size = 0;      // head_dim + 2, padded
    int32_t num_threads = 1;
    int64_t most_scores = 0;       // of one task: about a millisecond's, after which a thread may give its core back
};

// Rows [first, last) of a step. thread: whose own rows they are in buffers that each thread has for itself; -1: such
// buffers hold all rows of the step.
struct RowRange {
    int64_t first, last;
    int32_t thread;
};

using RowsFunction = void (*)(const void* arguments, const RowRange& range, const StepPlan& plan, Scratch& scratch);

struct Operation {
    int64_t (*num_tiles)(const void* arguments, int64_t rows, const StepPlan& plan);
    void (*run)(const void* arguments, int64_t rows, const StepPlan& plan, int64_t tile, Scratch& scratch);
    RowsFunction run_rows;  // where a row's result depends on that row alone; else nullptr
};

struct Variant {
    const char* name;
    bool (*is_supported)();
    const Operation* operations;  // [BATON_NUM_OPS]; those that are only about order have no functions
    int64_t most_scores;  // of one attend task: query vectors times positions
};

constexpr int64_t kTilePositions = 64;     // positions folded together
constexpr int64_t kChunkPositions = 1024;  // positions of one partial
constexpr int64_t kMaxQueries = 192;        // query vectors of one attend task
constexpr int64_t kRowsTogether = 16;      // rows that the matrix units multiply at once

extern const Variant kVariantPlain;
extern const Variant kVariantAvx2;
extern const Variant kVariantAvx512;
extern const Variant kVariantAmx;
