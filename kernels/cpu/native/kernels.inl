// One variant: every operation compiled for one instruction set. Included by variant_*.cpp after their macros.
#include "operations.h"
#include "lanes.h"
#include "rows.inl"
#include "products.inl"
#if defined(BATON_AMX)
#include "products_amx.inl"
#endif
#include "attention.inl"
#include "sampling.inl"
#include "logprobs.inl"
#include "blocks.inl"
#include "merging.inl"

namespace {

const Operation kOperations[BATON_NUM_OPS] = {
    {tiles_by_rows, run_embed},       // BATON_OP_EMBED
    {tiles_by_rows, run_norm},        // BATON_OP_NORM
    {tiles_of_product, run_product},  // BATON_OP_PRODUCT
    {tiles_by_rows, run_angles},      // BATON_OP_ANGLES
    {tiles_by_rows, run_rope},        // BATON_OP_ROPE
    {tiles_by_rows, run_write_kv},    // BATON_OP_WRITE_KV
    {tiles_of_attend, run_attend},    // BATON_OP_ATTEND
    {tiles_of_merge, run_merge},      // BATON_OP_MERGE
    {tiles_by_rows, run_gated},       // BATON_OP_GATED
    {tiles_by_rows, run_quantise},    // BATON_OP_QUANTISE
    {tiles_by_rows, run_take},        // BATON_OP_TAKE
    {nullptr, nullptr},               // BATON_OP_MARK
    {tiles_by_rows, run_argmax},      // BATON_OP_ARGMAX
    {one_tile, run_uniforms},         // BATON_OP_UNIFORMS
    {tiles_by_rows, run_draw},        // BATON_OP_DRAW
    {tiles_by_rows, run_logprobs},    // BATON_OP_LOGPROBS
    {tiles_of_move, run_move},        // BATON_OP_MOVE_BLOCKS
    {tiles_by_rows, run_convert},     // BATON_OP_CONVERT_KV
    {tiles_by_rows, run_merge_partials},  // BATON_OP_MERGE_PARTIALS
};

}  // namespace
