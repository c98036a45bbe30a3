"""Paged attention beside torch's SDPA and FlexAttention, which read dense KV that lies in order.

What they give is also the check of large shapes: the result on a bfloat16 pool must equal SDPA's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.timing import measure, ratio
from benchmarks.report import print_table
from kernels import triton
from kernels.kv_view import KVView
from kernels.step import StepMetadata

BLOCK_SIZE = 16
TOLERANCE = 1.6e-2  # two units in the last place of bfloat16

POOLS = {
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Case:
    """num_sequences prompts of `length` tokens; of each the last `num_rows` are in the step."""

    name: str
    num_sequences: int
    num_rows: int
    length: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128


CASES = (
    Case("decode, 64 sequences of 4096", 64, 1, 4096),
    Case("decode, 1 sequence of 32768", 1, 1, 32768),
    Case("decode, 256 sequences of 1024", 256, 1, 1024),
    Case("prefill, 4096 tokens", 1, 4096, 4096),
    Case("prefill, 512 tokens behind 8192", 1, 512, 8704),
)


class Sides:
    """One case's tensors: dense KV, and the same numbers in a pool of every format, blocks in random order."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        options: Any = {"dtype": torch.bfloat16, "device": device}
        count, length = case.num_sequences, case.length
        self.keys, self.values = (
            torch.randn(count, case.num_kv_heads, length, case.head_dim, **options)
            for _ in range(2)
        )  # [sequences, Hkv, length, D]
        shape = (count, case.num_heads, case.num_rows, case.head_dim)
        self.dense_query = torch.randn(shape, **options)
        self.query = self.dense_query.transpose(1, 2).flatten(0, 1).contiguous()  # [T, Hq, D]
        blocks = -(-length // BLOCK_SIZE)
        order = torch.randperm(count * blocks, device=device) + 1
        self.tables = order.view(count, blocks).int()
        self.step = self._metadata(case.num_rows)
        self.scale = case.head_dim**-0.5

    def _metadata(self, num_rows: int) -> StepMetadata:
        """The last `num_rows` rows of every sequence."""
        count, length = self.case.num_sequences, self.case.length
        position = torch.arange(length - num_rows, length, device=self.tables.device)
        blocks = self.tables[:, position // BLOCK_SIZE].long()
        slots = (blocks * BLOCK_SIZE + position % BLOCK_SIZE).flatten()
        starts = tuple(range(0, (count + 1) * num_rows, num_rows))
        return StepMetadata(slots, self.tables, starts, (length,) * count)

    def pool(self, kv_dtype: str) -> KVView:
        """A pool of that format that holds the keys and values."""
        case = self.case
        shape = (self.tables.numel() + 1, case.num_kv_heads, 2, BLOCK_SIZE)
        has_scales = kv_dtype.endswith("_per_token_head")
        view = KVView(
            torch.empty(*shape, case.head_dim, dtype=POOLS[kv_dtype], device=self.tables.device),
            torch.empty(shape, device=self.tables.device) if has_scales else None,
        )
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (self.keys, self.values)]
        triton.write_kv(*rows, view, self._metadata(case.length))
        return view

    def ours(self, kv_dtype: str) -> Callable[[], Tensor]:
        """One layer's call, its plan made at the first one, as in a step."""
        view = self.pool(kv_dtype)
        return lambda: triton.paged_attention(self.query, view, self.step, self.scale)

    def sdpa(self) -> Tensor:
        """torch's own, the mask only where rows are some of many."""
        length, rows = self.case.length, self.case.num_rows
        mask = None
        if 1 < rows < length:
            ones = torch.ones(rows, length, dtype=torch.bool, device=self.tables.device)
            mask = ones.tril(length - rows)
        return F.scaled_dot_product_attention(
            self.dense_query,
            self.keys,
            self.values,
            attn_mask=mask,
            is_causal=rows == length,
            scale=self.scale,
            enable_gqa=True,
        )

    def flex(self) -> Callable[[], Tensor]:
        """FlexAttention, compiled, with its block mask made beforehand."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        length, rows = self.case.length, self.case.num_rows
        first = length - rows

        def sees(_batch: Tensor, _head: Tensor, row: Tensor, position: Tensor) -> Tensor:
            return position <= row + first

        device = str(self.tables.device)
        mask = create_block_mask(sees, None, None, rows, length, device=device)
        compiled: Any = torch.compile(flex_attention)
        return lambda: compiled(
            self.dense_query,
            self.keys,
            self.values,
            block_mask=mask,
            scale=self.scale,
            enable_gqa=True,
        )

    def max_error(self) -> float:
        """The largest difference from SDPA, absolute or relative, whichever is less."""
        expected = self.sdpa().transpose(1, 2).flatten(0, 1).float()
        error = (self.ours("bfloat16")().float() - expected).abs()
        return float((error / expected.abs().clamp(min=1.0)).max())

    def kv_bytes(self, kv_dtype: str) -> int:
        """Bytes of KV that a step of one row a sequence must read."""
        per_head = self.case.head_dim * POOLS[kv_dtype].itemsize
        per_head += 4 if kv_dtype.endswith("_per_token_head") else 0
        return 2 * self.case.num_sequences * self.case.length * self.case.num_kv_heads * per_head

    def operations(self) -> int:
        """Floating-point operations that causal attention cannot do without."""
        rows, length = self.case.num_rows, self.case.length
        seen = rows * length - rows * (rows - 1) // 2
        return 4 * self.case.num_sequences * self.case.num_heads * self.case.head_dim * seen


def run_case(case: Case, device: torch.device, ceiling_gb_per_s: float) -> dict[str, Any]:
    """Every pool's format, SDPA and FlexAttention on one case."""
    sides = Sides(case, device)
    error = sides.max_error()
    calls: dict[str, Callable[[], object]] = {name: sides.ours(name) for name in POOLS}
    calls["sdpa"] = sides.sdpa
    if device.type == "cuda":
        flex: list[
            Callable[[], Tensor]
        ] = []  # compiled when it is first called, so that failing is a figure

        def call_flex() -> Tensor:
            if not flex:
                flex.append(sides.flex())
            return flex[0]()

        calls["flex"] = call_flex
    figures = measure(calls, device)
    for name in POOLS:
        if "ms" not in figures[name]:
            continue
        if case.num_rows == 1:
            speed = sides.kv_bytes(name) / figures[name]["ms"] / 1e6
            figures[name] |= {"gb_per_s": speed, "share_of_copy": speed / ceiling_gb_per_s}
        else:
            figures[name]["tflops"] = sides.operations() / figures[name]["ms"] / 1e9
    return {
        "max_error": error,
        "is_right": error <= TOLERANCE,
        "sdpa_over_ours": ratio(figures, "sdpa", "bfloat16"),
        "flex_over_ours": ratio(figures, "flex", "bfloat16"),
        "sides": figures,
    }


def run(device: torch.device, ceiling_gb_per_s: float) -> dict[str, Any]:
    """Every case."""
    figures = {case.name: run_case(case, device, ceiling_gb_per_s) for case in CASES}
    rows = [
        (
            name,
            side,
            *(
                figure.get(key, "-")
                for key in ("ms", "gb_per_s", "share_of_copy", "tflops", "failed")
            ),
        )
        for name, case in figures.items()
        for side, figure in case["sides"].items()
    ]
    header = ("case", "side", "ms", "GB/s", "share of copy", "TFLOP/s", "failed")
    print_table("attention", header, rows)
    return figures
