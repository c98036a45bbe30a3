// The plain C interface of Baton's host kernels: pointers, strides and counts, no torch.
//
// A program is an array of instructions; each names an operation and points to that operation's arguments. Rows are
// row-major with a stride in elements. Counts that change from step to step (rows, sequences) come from the Step, so
// one recorded program serves every step. kernels/cpu/structs.py mirrors every struct here, field by field.
#pragma once
#include <cstdint>

extern "C" {

// float32 rows; nullptr where an operation's output or input is absent. Where a step joins operations (Step.joined_rows)
// thread t keeps the rows it is at in its own memory, t * thread_stride floats further on; 0: all threads share the rows.
struct BatonRows {
    float* data;
    int64_t stride;
    int64_t thread_stride;
};

// Rows quantised to 16 bits, one scale a row: value = scale * q, q = 256 * high + low with signed bytes, |q| <= 32639.
// A row of `values` is its high bytes and then its low ones, each plane in whole 64 bytes, zeros behind the last column.
// Sums are integers, for each group of 32 columns: -8 times the sums of its high and of its low bytes; both sums times
// 65536; the sum of q; and that of each half of the group.
struct BatonQuantRows {
    int8_t* values;  // [rows, 2, plane]
    float* scales;   // [rows]
    int32_t* sums;   // [rows, 7 * width / 32]
    int64_t width;
    int64_t thread_rows;   // each thread's own memory holds so many rows of thread_width columns; 0: it is shared
    int64_t thread_width;
};

enum BatonWeightKind : int32_t {
    BATON_DENSE_F32 = 0,
    BATON_DENSE_F16 = 1,
    BATON_DENSE_BF16 = 2,
    BATON_QUANT_4 = 3,
    BATON_QUANT_8 = 4,
    BATON_WHOLE_4 = 5,
};

// A matrix [num_rows, num_columns] in panels of 16 rows. Dense: [panels, num_columns, 16] elements. Quantised: for
// each panel and group of columns its quants, 16 scales and, with has_min, 16 minima (float16 or float32):
// w = scale * (quant - offset) + min. Whole: for each panel and group of 32 columns its quants and 16 pairs of 16-bit
// numbers: w = scale[row] * (pair[0] * (quant - 8) + pair[1]), the integer in parentheses at most 8191 in size.
struct BatonWeight {
    void* data;
    const float* row_scales;  // [num_rows], whole weights only
    int64_t num_rows;
    int64_t num_columns;
    int32_t kind;
    int32_t group;         // 32 or 16 columns share a scale
    int32_t offset;
    int32_t has_min;
    int32_t half_scales;
    int32_t reserved;
};

// One layer of the KV pool: [blocks, heads, 2, block_size, head_dim], strides in elements of the storage type.
enum BatonKvType : int32_t {
    BATON_KV_F32 = 0,
    BATON_KV_F16 = 1,
    BATON_KV_BF16 = 2,
    BATON_KV_FP8_E4M3 = 3,
    BATON_KV_FP8_E5M2 = 4,
    BATON_KV_INT8 = 5,
};
struct BatonKvView {
    void* values;
    float* scales;               // nullptr: every scale is 1
    int64_t block_stride;
    int64_t head_stride;
    int64_t half_stride;         // from K to V
    int64_t scale_block_stride;  // in floats
    int64_t scale_head_stride;
    int64_t scale_half_stride;
    int32_t type;
    int32_t block_size;
    int32_t num_heads;
    int32_t head_dim;
};

// What changes from step to step.
struct BatonStep {
    int64_t num_tokens;
    int64_t num_sequences;
    int64_t num_wanted;
    const int64_t* token_ids;    // [num_tokens]
    const int64_t* positions;    // [num_tokens]
    const int64_t* slots;        // [num_tokens], -1: written nowhere
    const int32_t* tables;       // [num_sequences, table_stride]
    int64_t table_stride;
    const int64_t* query_start;  // [num_sequences + 1]
    const int64_t* seq_lens;     // [num_sequences]
    const int64_t* wanted;       // [num_wanted] rows whose logits are asked for
    int64_t joined_rows;         // rows that a thread takes through all row-wise operations in a row; 0: one by one
};

enum BatonOp : int32_t {
    BATON_OP_EMBED = 0,
    BATON_OP_NORM = 1,
    BATON_OP_PRODUCT = 2,
    BATON_OP_ANGLES = 3,
    BATON_OP_ROPE = 4,
    BATON_OP_WRITE_KV = 5,
    BATON_OP_ATTEND = 6,
    BATON_OP_MERGE = 7,
    BATON_OP_GATED = 8,
    BATON_OP_QUANTISE = 9,
    BATON_OP_TAKE = 10,
    BATON_OP_MARK = 11,
    BATON_OP_ARGMAX = 12,
    BATON_OP_UNIFORMS = 13,
    BATON_OP_DRAW = 14,
    BATON_OP_LOGPROBS = 15,
    BATON_OP_MOVE_BLOCKS = 16,
    BATON_OP_CONVERT_KV = 17,
    BATON_OP_MERGE_PARTIALS = 18,
    BATON_NUM_OPS = 19,
};

enum BatonRowCount : int32_t { BATON_ROWS_TOKENS = 0, BATON_ROWS_WANTED = 1 };

struct BatonInstruction {
    int32_t op;
    int32_t row_count;  // BatonRowCount: how many rows this operation works on
    const void* arguments;
};

struct BatonEmbed {
    const BatonWeight* weight;
    BatonRows out;
};

// out = norm(hidden + residual) * weight over `count` vectors of `width` a row; the sum is stored back to `residual`.
// Without a residual nothing is added. quantised.values may be nullptr, out.data may be nullptr.
struct BatonNorm {
    BatonRows hidden;
    BatonRows residual;
    const float* weight;
    BatonRows out;
    BatonQuantRows quantised;
    int64_t width;
    int64_t count;
    int64_t hidden_vector_stride;
    int64_t out_vector_stride;
    float epsilon;
    int32_t reserved;
};

struct BatonProduct {
    const BatonWeight* weight;
    BatonRows inputs;  // dense weights
    BatonQuantRows quantised;  // quantised weights
    const float* bias;  // [num_rows] or nullptr
    BatonRows out;
};

struct BatonAngles {
    const float* frequencies;  // [half]
    BatonRows cos;
    BatonRows sin;
    int64_t half;
    float factor;
    int32_t reserved;
};

struct BatonRope {
    BatonRows heads;
    BatonRows cos;
    BatonRows sin;
    BatonRows out;
    int64_t num_heads;
    int64_t head_dim;
};

struct BatonWriteKv {
    BatonRows key;
    BatonRows value;
    BatonKvView view;
};

struct BatonAttend {
    BatonRows query;
    BatonRows out;
    BatonKvView view;
    const float* sinks;  // [num_heads] or nullptr
    int64_t num_heads;
    int64_t window;      // 0: none
    float scale;
    float soft_cap;      // 0: none
};

struct BatonGated {
    BatonRows gate_up;
    BatonRows out;
    BatonQuantRows quantised;
    int64_t width;
    int32_t is_gelu;
    int32_t reserved;
};

struct BatonQuantise {
    BatonRows inputs;
    BatonQuantRows quantised;
};

struct BatonTake {
    BatonRows inputs;
    BatonRows out;
    int64_t width;
};

// The lowest column of each row's largest value.
struct BatonArgmax {
    BatonRows inputs;
    int64_t* out;  // [rows]
    int64_t width;
};

struct BatonMark {
    int64_t layer;
};

// The operations from here on run alone, never in a step's program. Rows are what each says: num_tokens of the Step.

// A random number a row (kernels/reference/philox.py).
struct BatonUniforms {
    const uint64_t* seeds;     // [rows]
    const int64_t* positions;  // [rows]
    const int64_t* choices;    // [rows]
    double* out;               // [rows]
    int64_t purpose;
};

// An id a row (kernels/reference/sampling.py); -1 for a row whose logits are not finite, or all -inf.
struct BatonDraw {
    BatonRows logits;
    const double* uniforms;      // [rows], like all that follow
    const double* temperatures;
    const int64_t* top_k;
    const double* top_p;
    const double* min_p;
    int64_t* out;
    int64_t width;
};

// Of some rows of the logits: an id's log-probability and rank, and the best ids with theirs. No number is the
// log-probability in a row whose logits are not finite, and nothing is listed for it.
struct BatonLogprobs {
    BatonRows logits;
    const int64_t* rows;       // [rows] which of the logits
    const int64_t* token_ids;  // [rows]
    const int64_t* num_top;    // [rows], none above top_stride
    double* logprobs;          // [rows]
    int64_t* ranks;            // [rows]
    int64_t* top_ids;          // [rows, top_stride], like the next; what is not asked for stays as it is
    double* top_logprobs;
    int64_t top_stride;
    int64_t width;
};

// Whole blocks from one memory to another, or inside one: a row each, as if in order.
struct BatonMoveBlocks {
    const uint8_t* source;
    uint8_t* destination;
    const int64_t* source_blocks;       // [rows]
    const int64_t* destination_blocks;  // [rows]
    int64_t source_stride;              // bytes from block to block
    int64_t destination_stride;
    int64_t block_bytes;
};

// Whole blocks of one layer in another pool's format, a row each.
struct BatonConvertKv {
    BatonKvView source;
    BatonKvView destination;
    const int64_t* source_blocks;       // [rows]
    const int64_t* destination_blocks;  // [rows]
};

// Attention over disjoint ranges of positions, put together.
struct BatonMergePartials {
    const float* outputs;   // [num_partials, rows, num_heads, head_dim]
    const float* log_sums;  // [num_partials, rows, num_heads]
    float* out;             // [rows, num_heads, head_dim]
    int64_t num_partials;
    int64_t num_heads;
    int64_t head_dim;
};

}  // extern "C"
