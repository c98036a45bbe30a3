"""The copy bandwidth of the card, which bounds everything that reads once, and how near the row-wise kernels come."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.timing import measure
from benchmarks.report import print_table
from kernels import triton

COPIED_BYTES = 1 << 30
ROWS, HIDDEN, FEED_FORWARD = 4096, 4096, 14336
HEADS, HEAD_DIM = 40, 128


def copy_gb_per_s(device: torch.device, num_bytes: int = COPIED_BYTES) -> float:
    """Bytes read and written a second by torch's own copy of a large tensor."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    figures = measure({"copy": lambda: target.copy_(source)}, device)
    return float(2 * num_bytes / figures["copy"]["ms"] / 1e6)


def row_wise(device: torch.device, ceiling_gb_per_s: float, rows: int = ROWS) -> dict[str, Any]:
    """Norm, rotation and activation: gigabytes a second, and the share of the copy's."""
    options: Any = {"dtype": torch.bfloat16, "device": device}
    hidden, residual = (torch.randn(rows, HIDDEN, **options) for _ in range(2))
    weight = torch.randn(HIDDEN, **options)
    heads = torch.randn(rows, HEADS, HEAD_DIM, **options)
    angles = torch.randn(rows, HEAD_DIM // 2, **options)
    gate_up = torch.randn(rows, 2 * FEED_FORWARD, **options)
    calls = {
        "add_rms_norm": lambda: triton.add_rms_norm(hidden, residual, weight, 1e-5),
        "rope": lambda: triton.rope(heads, angles, angles),
        "silu_mul": lambda: triton.silu_mul(gate_up),
    }
    moved_bytes = {
        "add_rms_norm": 4 * hidden.nbytes,
        "rope": 2 * heads.nbytes,
        "silu_mul": 3 * gate_up.nbytes // 2,
    }
    figures = measure(calls, device)
    for name, figure in figures.items():
        if "ms" in figure:
            figure["gb_per_s"] = moved_bytes[name] / figure["ms"] / 1e6
            figure["share_of_copy"] = figure["gb_per_s"] / ceiling_gb_per_s
    print_table(
        f"row-wise kernels, {rows} rows (a copy moves {ceiling_gb_per_s:.0f} GB/s)",
        ("kernel", "ms", "GB/s", "share of copy"),
        [
            (name, *(figure.get(key, "-") for key in ("ms", "gb_per_s", "share_of_copy")))
            for name, figure in figures.items()
        ],
    )
    return figures
