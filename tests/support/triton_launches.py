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
from kernels.kv_view import KVView
from kernels.step import StepMetadata

HIDDEN = 4096
NUM_HEADS, NUM_KV_HEADS = 32, 8
BLOCK_SIZE = 16
NUM_ROWS = 4


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


PREFILL, DECODE = 512, 1
KV_DTYPES = ("bfloat16", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head")

EXAMPLES: dict[str, Callable[[], object]] = {
    "rms_norm": lambda: backend.rms_norm(rows(4, HIDDEN), rows(HIDDEN), 1e-5),
    "rms_norm of heads": lambda: backend.rms_norm(rows(4, 40, 128)[:, :32], rows(128), 1e-5),
    "add_rms_norm": lambda: backend.add_rms_norm(
        rows(4, HIDDEN), rows(4, HIDDEN), rows(HIDDEN), 1e-5
    ),
    "rope": lambda: backend.rope(rows(4, 48, 128)[:, :40], rows(4, 64), rows(4, 64)),
    "silu_mul": lambda: backend.silu_mul(rows(4, 2 * 14336)),
    "gelu_mul": lambda: backend.gelu_mul(rows(4, 2 * 14336)),
    **{f"write_kv {name}": partial(write, name) for name in KV_DTYPES},
    **{
        f"attention {kind} {name}": partial(attend, name, num_rows)
        for name in KV_DTYPES
        for kind, num_rows in (("prefill", PREFILL), ("decode", DECODE))
    },
    **{
        f"attention {kind} of {head_dim}": partial(attend, "bfloat16", num_rows, head_dim)
        for head_dim in (64, 256)
        for kind, num_rows in (("prefill", PREFILL), ("decode", DECODE))
    },
    **{
        f"attention {kind} float32": partial(attend, "float32", num_rows, 128, torch.float32)
        for kind, num_rows in (("prefill", PREFILL), ("decode", DECODE))
    },
    **{
        f"attention {kind} with window, cap and sinks": partial(
            attend, "bfloat16", num_rows, 128, torch.bfloat16, 1024, 50.0, True
        )
        for kind, num_rows in (("prefill", PREFILL), ("decode", DECODE))
    },
}
