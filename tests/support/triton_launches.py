"""Calls of every launcher at the shapes of a served model: what is compiled ahead of time for each card.

The tensors are as small as the shapes allow and never read: a recorded launch only has types, strides and numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from engine.kvcache.storage import allocate_pool
from kernels import triton as backend
from kernels.gguf_formats import FORMAT_BY_NAME
from kernels.kv_view import KVView
from kernels.step import StepMetadata
from kernels.triton.drawing import log_normalisers
from kernels.triton.logprobs import row_logprobs
from kernels.triton.planes import PLANE_FORMATS
from kernels.weights import BlockWeight, ChannelWeight, DenseWeight, GroupWeight, Weight
from kernels.workspace import Workspace

HIDDEN = 4096
NUM_HEADS, NUM_KV_HEADS = 32, 8
BLOCK_SIZE = 16
NUM_ROWS = 4
NUM_OUTPUTS = 1024


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def layer(kv_dtype: str, head_dim: int) -> KVView:
    group = KVGroup(GroupKind.FULL_ATTENTION, (0,), NUM_KV_HEADS, SlotFormat.of(kv_dtype, head_dim))
    return allocate_pool(KVLayout(BLOCK_SIZE, (group,)), 2).layer_views(0)[0]


def step(rows_a_sequence: int, length: int) -> StepMetadata:
    return StepMetadata(
        slot_mapping=torch.zeros(rows_a_sequence, dtype=torch.int64),
        block_tables=torch.zeros(1, -(-length // BLOCK_SIZE), dtype=torch.int32),
        query_start=(0, rows_a_sequence),
        seq_lens=(length,),
    )


def attend(
    kv_dtype: str,
    num_rows: int,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
) -> None:
    query = rows(num_rows, NUM_HEADS, head_dim, dtype=dtype)
    sinks = torch.zeros(NUM_HEADS) if has_sinks else None
    view, metadata = layer(kv_dtype, head_dim), step(num_rows, 4096)
    backend.paged_attention(query, view, metadata, head_dim**-0.5, window, soft_cap, sinks)


def write(kv_dtype: str, head_dim: int = 128) -> None:
    heads = rows(NUM_ROWS, NUM_KV_HEADS, head_dim)
    backend.write_kv(heads, heads, layer(kv_dtype, head_dim), step(NUM_ROWS, NUM_ROWS))


def product(weight: Weight, num_rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    backend.linear(rows(num_rows, HIDDEN, dtype=dtype), weight, rows(weight.shape[0], dtype=dtype))


def blocks(name: str, dtype: torch.dtype = torch.bfloat16) -> BlockWeight:
    block_format = FORMAT_BY_NAME[name]
    raw = torch.zeros(NUM_OUTPUTS, block_format.row_bytes(HIDDEN), dtype=torch.uint8)
    return BlockWeight(raw, block_format, dtype)


def packed_product(name: str, num_rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    product(backend.pack(blocks(name, dtype)), num_rows, dtype)


def group_product(num_rows: int) -> None:
    """Four bits with a scale and a zero for 128 columns."""
    packed = torch.zeros(NUM_OUTPUTS, HIDDEN // 2, dtype=torch.uint8)
    scales = torch.zeros(NUM_OUTPUTS, HIDDEN // 128)
    product(backend.pack(GroupWeight(packed, scales, scales, 128)), num_rows)


def channel_weight() -> ChannelWeight:
    values = torch.zeros(NUM_OUTPUTS, HIDDEN, dtype=torch.int8)
    return ChannelWeight(values, torch.zeros(NUM_OUTPUTS), torch.bfloat16)


def dense_weight(dtype: torch.dtype = torch.bfloat16) -> DenseWeight:
    return DenseWeight(torch.zeros(NUM_OUTPUTS, HIDDEN, dtype=dtype))


def move_blocks() -> None:
    pool = torch.zeros(4, 2 * 32 * 8 * 16 * 128, dtype=torch.uint8)
    backend.copy_blocks(pool, [(0, 1)])
    backend.scatter_blocks(backend.gather_blocks(pool, [2, 3]), pool, [0, 1])


def convert(source: str, destination: str) -> None:
    backend.convert_kv(layer(source, 128), [0], layer(destination, 128), [1])


LOGITS = (2, 128_256)
PREFILL, DECODE = 512, 1
KINDS = {"prefill": PREFILL, "decode": DECODE}
KV_DTYPES = ("bfloat16", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head")
ROW_CLASSES = {"few": 1, "some": 64, "many": 512}

EXAMPLES: dict[str, Callable[[], object]] = {
    "rms_norm": lambda: backend.rms_norm(rows(4, HIDDEN), rows(HIDDEN), 1e-5),
    "rms_norm of heads": lambda: backend.rms_norm(rows(4, 40, 128)[:, :32], rows(128), 1e-5),
    "add_rms_norm": lambda: backend.add_rms_norm(
        rows(4, HIDDEN), rows(4, HIDDEN), rows(HIDDEN), 1e-5
    ),
    "rope": lambda: backend.rope(rows(4, 48, 128)[:, :40], rows(4, 64), rows(4, 64)),
    "silu_mul": lambda: backend.silu_mul(rows(4, 2 * 14336)),
    "gelu_mul": lambda: backend.gelu_mul(rows(4, 2 * 14336)),
    "merge_partials": lambda: backend.merge_partials(
        torch.zeros(4, 2, 32, 128), torch.zeros(4, 2, 32)
    ),
    "blocks": move_blocks,
    "argmax": lambda: backend.argmax(torch.zeros(LOGITS)),
    "draw": lambda: log_normalisers(torch.zeros(LOGITS), Workspace()),  # the same kernels
    "row_logprobs": lambda: row_logprobs(torch.zeros(LOGITS[1]), 0.0, 0, 20),
    "uniforms": lambda: backend.uniforms([1], [2], [3]),
    **{f"write_kv {name}": partial(write, name) for name in KV_DTYPES},
    **{f"convert_kv {name}": partial(convert, "bfloat16", name) for name in KV_DTYPES},
    **{f"convert_kv from {name}": partial(convert, name, "bfloat16") for name in KV_DTYPES[1:]},
    **{
        f"attention {kind} {name}": partial(attend, name, num_rows)
        for name in KV_DTYPES
        for kind, num_rows in KINDS.items()
    },
    **{
        f"attention {kind} {name} of {head_dim}": partial(attend, name, num_rows, head_dim)
        for name in ("bfloat16", "fp8_e4m3", "int8_per_token_head")
        for head_dim in (64, 256)
        for kind, num_rows in KINDS.items()
    },
    **{
        f"attention {kind} float32 of {head_dim}": partial(
            attend, "float32", num_rows, head_dim, torch.float32
        )
        for head_dim in (64, 128, 256)
        for kind, num_rows in KINDS.items()
    },
    **{
        f"attention {kind} float16": partial(
            attend, "int8_per_token_head", num_rows, 128, torch.float16
        )
        for kind, num_rows in KINDS.items()
    },
    **{
        f"attention {kind} with window, cap and sinks": partial(
            attend, "bfloat16", num_rows, 128, torch.bfloat16, 1024, 50.0, True
        )
        for kind, num_rows in KINDS.items()
    },
    "linear dense": lambda: product(dense_weight(), 8),
    **{
        f"linear int8 {kind}": partial(product, channel_weight(), num_rows)
        for kind, num_rows in ROW_CLASSES.items()
    },
    **{
        f"linear int4 {kind}": partial(group_product, num_rows)
        for kind, num_rows in ROW_CLASSES.items()
    },
    **{
        f"linear {name} {kind}": partial(packed_product, name, num_rows)
        for name in ("Q4_0", "Q4_K", "Q2_K", "Q8_0", "Q5_K", "Q6_K")
        for kind, num_rows in ROW_CLASSES.items()
    },
    "linear dense float32": lambda: product(dense_weight(torch.float32), 8, torch.float32),
    "linear Q4_K float32": partial(packed_product, "Q4_K", 8, torch.float32),
    "linear Q8_0 float32": partial(packed_product, "Q8_0", 8, torch.float32),
    **{
        f"pack {name}": partial(lambda name: backend.pack(blocks(name)), name)
        for name in PLANE_FORMATS
    },
    **{
        f"embedding {name}": partial(
            lambda name: backend.embedding(torch.zeros(4, dtype=torch.int64), blocks(name)), name
        )
        for name in PLANE_FORMATS
    },
}

CORE = (
    "rms_norm",
    "add_rms_norm",
    "rope",
    "silu_mul",
    "blocks",
    "draw",
    "row_logprobs",
    "uniforms",
    "write_kv bfloat16",
    "write_kv int8_per_token_head",
    "convert_kv fp8_per_token_head",
    "attention prefill bfloat16",
    "attention prefill int8_per_token_head",
    "attention decode bfloat16",
    "attention decode fp8_e4m3",
    "attention decode with window, cap and sinks",
    "linear dense",
    "linear int8 few",
    "linear int8 many",
    "linear int4 few",
    "linear Q2_K few",
    "linear Q4_K many",
    "linear Q6_K some",
    "embedding Q3_K",
)
"""Every kernel, and the variants of attention and products that take most registers and memory."""
