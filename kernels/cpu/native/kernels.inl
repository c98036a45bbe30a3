// One variant: every operation compiled for one instruction set. Included by variant_*.cpp after their macros.
#include "operations.h"
#include "lanes.h"
#include "rows.inl"
#include "products.inl"
#include "products_whole.inl"
#if defined(BATON_AMX)
#include "products_amx.inl"
#endif
#include "slots.inl"
#include "folds.inl"
#include "attention_float.inl"
#include "attention_whole.inl"
#if defined(BATON_AMX)
#include "attention_amx.inl"
#endif
#include "attention.inl"
#include "sampling.inl"
#include "logprobs.inl"
#include "blocks.inl"
#include "merging.inl"

namespace {

const Operation kOperations[BATON_NUM_OPS] = {
    {tiles_by_rows, run_by_rows<embed_rows>, embed_rows},       // BATON_OP_EMBED
    {tiles_by_rows, run_by_rows<norm_rows>, norm_rows},         // BATON_OP_NORM
    {tiles_of_product, run_product, product_rows},              // BATON_OP_PRODUCT
    {tiles_by_rows, run_by_rows<angles_rows>, angles_rows},     // BATON_OP_ANGLES
    {tiles_by_rows, run_by_rows<rope_rows>, rope_rows},         // BATON_OP_ROPE
    {tiles_by_rows, run_by_rows<write_kv_rows>, write_kv_rows}, // BATON_OP_WRITE_KV
    {tiles_of_attend, run_attend, nullptr},                     // BATON_OP_ATTEND
    {tiles_of_merge, run_merge, nullptr},                       // BATON_OP_MERGE
    {tiles_by_rows, run_by_rows<gated_rows>, gated_rows},       // BATON_OP_GATED
    {tiles_by_rows, run_by_rows<quantise_rows>, quantise_rows}, // BATON_OP_QUANTISE
    {tiles_by_rows, run_by_rows<take_rows>, nullptr},           // BATON_OP_TAKE
    {nullptr, nullptr, nullptr},                                // BATON_OP_MARK
    {tiles_by_rows, run_by_rows<argmax_rows>, nullptr},         // BATON_OP_ARGMAX
    {one_tile, run_uniforms, nullptr},                          // BATON_OP_UNIFORMS
    {tiles_by_rows, run_by_rows<draw_rows>, nullptr},           // BATON_OP_DRAW
    {tiles_by_rows, run_by_rows<logprobs_rows>, nullptr},       // BATON_OP_LOGPROBS
    {tiles_of_move, run_move, nullptr},                         // BATON_OP_MOVE_BLOCKS
    {tiles_by_rows, run_by_rows<convert_rows>, nullptr},        // BATON_OP_CONVERT_KV
    {tiles_by_rows, run_by_rows<merge_partials_rows>, nullptr}, // BATON_OP_MERGE_PARTIALS
};

}  // namespace
