"""Every enum and struct of `native/interface.h`, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum


class Op(IntEnum):
    """BatonOp."""

    EMBED = 0
    NORM = 1
    PRODUCT = 2
    ANGLES = 3
    ROPE = 4
    WRITE_KV = 5
    ATTEND = 6
    MERGE = 7
    GATED = 8
    QUANTISE = 9
    TAKE = 10
    MARK = 11
    ARGMAX = 12
    UNIFORMS = 13
    DRAW = 14
    LOGPROBS = 15
    MOVE_BLOCKS = 16
    CONVERT_KV = 17
    MERGE_PARTIALS = 18


class WeightKind(IntEnum):
    """BatonWeightKind."""

    DENSE_F32 = 0
    DENSE_F16 = 1
    DENSE_BF16 = 2
    QUANT_4 = 3
    QUANT_8 = 4
    WHOLE_4 = 5


class KvType(IntEnum):
    """BatonKvType."""

    F32 = 0
    F16 = 1
    BF16 = 2
    FP8_E4M3 = 3
    FP8_E5M2 = 4
    INT8 = 5


ROWS_TOKENS, ROWS_WANTED = 0, 1


class Rows(ctypes.Structure):
    """BatonRows."""

    _fields_ = [("data", c_void_p), ("stride", c_int64), ("thread_stride", c_int64)]


class QuantRows(ctypes.Structure):
    """BatonQuantRows."""

    _fields_ = [
        ("values", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("width", c_int64),
        ("thread_rows", c_int64),
        ("thread_width", c_int64),
    ]


class NativeWeight(ctypes.Structure):
    """BatonWeight."""

    _fields_ = [
        ("data", c_void_p),
        ("row_scales", c_void_p),
        ("num_rows", c_int64),
        ("num_columns", c_int64),
        ("kind", c_int32),
        ("group", c_int32),
        ("offset", c_int32),
        ("has_min", c_int32),
        ("half_scales", c_int32),
        ("reserved", c_int32),
    ]


class NativeKvView(ctypes.Structure):
    """BatonKvView."""

    _fields_ = [
        ("values", c_void_p),
        ("scales", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("half_stride", c_int64),
        ("scale_block_stride", c_int64),
        ("scale_head_stride", c_int64),
        ("scale_half_stride", c_int64),
        ("type", c_int32),
        ("block_size", c_int32),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
    ]


class Step(ctypes.Structure):
    """BatonStep."""

    _fields_ = [
        ("num_tokens", c_int64),
        ("num_sequences", c_int64),
        ("num_wanted", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("wanted", c_void_p),
        ("joined_rows", c_int64),
    ]


class Instruction(ctypes.Structure):
    """BatonInstruction."""

    _fields_ = [("op", c_int32), ("row_count", c_int32), ("arguments", c_void_p)]


class Embed(ctypes.Structure):
    """BatonEmbed."""

    _fields_ = [("weight", POINTER(NativeWeight)), ("out", Rows)]


class Norm(ctypes.Structure):
    """BatonNorm."""

    _fields_ = [
        ("hidden", Rows),
        ("residual", Rows),
        ("weight", c_void_p),
        ("out", Rows),
        ("quantised", QuantRows),
        ("width", c_int64),
        ("count", c_int64),
        ("hidden_vector_stride", c_int64),
        ("out_vector_stride", c_int64),
        ("epsilon", c_float),
        ("reserved", c_int32),
    ]


class Product(ctypes.Structure):
    """BatonProduct."""

    _fields_ = [
        ("weight", POINTER(NativeWeight)),
        ("inputs", Rows),
        ("quantised", QuantRows),
        ("bias", c_void_p),
        ("out", Rows),
    ]


class Angles(ctypes.Structure):
    """BatonAngles."""

    _fields_ = [
        ("frequencies", c_void_p),
        ("cos", Rows),
        ("sin", Rows),
        ("half", c_int64),
        ("factor", c_float),
        ("reserved", c_int32),
    ]


class Rope(ctypes.Structure):
    """BatonRope."""

    _fields_ = [
        ("heads", Rows),
        ("cos", Rows),
        ("sin", Rows),
        ("out", Rows),
        ("num_heads", c_int64),
        ("head_dim", c_int64),
    ]


class WriteKv(ctypes.Structure):
    """BatonWriteKv."""

    _fields_ = [("key", Rows), ("value", Rows), ("view", NativeKvView)]


class Attend(ctypes.Structure):
    """BatonAttend."""

    _fields_ = [
        ("query", Rows),
        ("out", Rows),
        ("view", NativeKvView),
        ("sinks", c_void_p),
        ("num_heads", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
    ]


class Gated(ctypes.Structure):
    """BatonGated."""

    _fields_ = [
        ("gate_up", Rows),
        ("out", Rows),
        ("quantised", QuantRows),
        ("width", c_int64),
        ("is_gelu", c_int32),
        ("reserved", c_int32),
    ]


class Quantise(ctypes.Structure):
    """BatonQuantise."""

    _fields_ = [("inputs", Rows), ("quantised", QuantRows)]


class Take(ctypes.Structure):
    """BatonTake."""

    _fields_ = [("inputs", Rows), ("out", Rows), ("width", c_int64)]


class Argmax(ctypes.Structure):
    """BatonArgmax."""

    _fields_ = [("inputs", Rows), ("out", c_void_p), ("width", c_int64)]


class Mark(ctypes.Structure):
    """BatonMark."""

    _fields_ = [("layer", c_int64)]


class Uniforms(ctypes.Structure):
    """BatonUniforms."""

    _fields_ = [
        ("seeds", c_void_p),
        ("positions", c_void_p),
        ("choices", c_void_p),
        ("out", c_void_p),
        ("purpose", c_int64),
    ]


class Draw(ctypes.Structure):
    """BatonDraw."""

    _fields_ = [
        ("logits", Rows),
        ("uniforms", c_void_p),
        ("temperatures", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
    ]


class Logprobs(ctypes.Structure):
    """BatonLogprobs."""

    _fields_ = [
        ("logits", Rows),
        ("rows", c_void_p),
        ("token_ids", c_void_p),
        ("num_top", c_void_p),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("top_stride", c_int64),
        ("width", c_int64),
    ]


class MoveBlocks(ctypes.Structure):
    """BatonMoveBlocks."""

    _fields_ = [
        ("source", c_void_p),
        ("destination", c_void_p),
        ("source_blocks", c_void_p),
        ("destination_blocks", c_void_p),
        ("source_stride", c_int64),
        ("destination_stride", c_int64),
        ("block_bytes", c_int64),
    ]


class ConvertKv(ctypes.Structure):
    """BatonConvertKv."""

    _fields_ = [
        ("source", NativeKvView),
        ("destination", NativeKvView),
        ("source_blocks", c_void_p),
        ("destination_blocks", c_void_p),
    ]


class MergePartials(ctypes.Structure):
    """BatonMergePartials."""

    _fields_ = [
        ("outputs", c_void_p),
        ("log_sums", c_void_p),
        ("out", c_void_p),
        ("num_partials", c_int64),
        ("num_heads", c_int64),
        ("head_dim", c_int64),
    ]


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "BatonRows": Rows,
    "BatonQuantRows": QuantRows,
    "BatonWeight": NativeWeight,
    "BatonKvView": NativeKvView,
    "BatonStep": Step,
    "BatonInstruction": Instruction,
    "BatonEmbed": Embed,
    "BatonNorm": Norm,
    "BatonProduct": Product,
    "BatonAngles": Angles,
    "BatonRope": Rope,
    "BatonWriteKv": WriteKv,
    "BatonAttend": Attend,
    "BatonGated": Gated,
    "BatonQuantise": Quantise,
    "BatonTake": Take,
    "BatonMark": Mark,
    "BatonArgmax": Argmax,
    "BatonUniforms": Uniforms,
    "BatonDraw": Draw,
    "BatonLogprobs": Logprobs,
    "BatonMoveBlocks": MoveBlocks,
    "BatonConvertKv": ConvertKv,
    "BatonMergePartials": MergePartials,
}
"""By their native names."""
