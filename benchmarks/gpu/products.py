"""Products with quantised weights beside the library's with bfloat16 weights of the same shape."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.timing import measure, ratio
from benchmarks.report import print_table
from kernels import triton
from kernels.gguf_formats import FORMAT_BY_NAME
from kernels.weights import BlockWeight, ChannelWeight, GroupWeight, Weight

NUM_COLUMNS, NUM_OUTPUTS = 4096, 28672
ROW_COUNTS = (1, 16, 64, 2048)
BLOCK_FORMATS = ("Q4_0", "Q4_K", "Q6_K", "Q8_0")
GROUP_SIZE = 128


def weights(device: torch.device, num_outputs: int, num_columns: int) -> dict[str, Weight]:
    """One weight of each kind, packed; what they hold is of no interest here."""

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    raw: dict[str, Weight] = {
        name: BlockWeight(
            zeros(num_outputs, FORMAT_BY_NAME[name].row_bytes(num_columns), dtype=torch.uint8),
            FORMAT_BY_NAME[name],
            torch.bfloat16,
        )
        for name in BLOCK_FORMATS
    }
    scales = zeros(num_outputs, num_columns // GROUP_SIZE, dtype=torch.float32)
    packed = zeros(num_outputs, num_columns // 2, dtype=torch.uint8)
    raw["int4"] = GroupWeight(packed, scales, scales, GROUP_SIZE, torch.bfloat16)
    values = zeros(num_outputs, num_columns, dtype=torch.int8)
    raw["int8"] = ChannelWeight(values, zeros(num_outputs, dtype=torch.float32), torch.bfloat16)
    return {name: triton.pack(weight) for name, weight in raw.items()}


def run(
    device: torch.device,
    num_outputs: int = NUM_OUTPUTS,
    num_columns: int = NUM_COLUMNS,
    row_counts: tuple[int, ...] = ROW_COUNTS,
) -> dict[str, Any]:
    """Every format at every number of rows: milliseconds, and how many times as long bfloat16 takes."""
    quantised = weights(device, num_outputs, num_columns)
    options: Any = {"dtype": torch.bfloat16, "device": device}
    plain = torch.randn(num_outputs, num_columns, **options)
    figures: dict[str, Any] = {}
    for num_rows in row_counts:
        inputs = torch.randn(num_rows, num_columns, **options)
        calls: dict[str, Any] = {"bfloat16 library": lambda inputs=inputs: F.linear(inputs, plain)}
        for name, weight in quantised.items():
            calls[name] = lambda inputs=inputs, weight=weight: triton.linear(inputs, weight)
        figures[f"{num_rows} rows"] = measure(calls, device)
    rows = [
        (count, name, side.get("ms", side.get("failed")), ratio(sides, "bfloat16 library", name))
        for count, sides in figures.items()
        for name, side in sides.items()
    ]
    print_table(
        f"products, {num_columns} inputs, {num_outputs} outputs",
        ("rows", "weight", "ms", "library's bfloat16 / this"),
        rows,
    )
    return figures
