"""Whether a variant of the kernels gives the bits that plain C++ gives on this machine.

A few small operations of every kind, on one thread, before a variant is put in use: compilers and processors differ,
and a variant that is only nearly right would break what batches, splits and restarts rely on. Costs some milliseconds
a variant and process. What is found is remembered; nothing is chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from core.errors import ConfigError
from kernels.cpu.eager import Eager
from kernels.cpu.packing import pack
from kernels.cpu.team import Team
from kernels.gguf_formats import FORMAT_BY_NAME
from kernels.kv_view import KVView
from kernels.step import StepMetadata
from kernels.weights import BlockWeight, DenseWeight, Weight

PLAIN = "plain"

_ROWS = (1, 17)  # one row, and enough for the tiles of the widest variant with one left over
_COLUMNS, _OUTPUTS = 256, 35
_QUANTISED = ("Q4_1", "Q8_0", "Q2_K", "Q6_K")  # 4 and 8 bits by groups of 32, and of 16
_LARGEST_BYTE = 0x77  # no two of them are a float16 that is infinite or no number
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 72
_BLOCK_SIZE, _POSITIONS = 16, 70  # of attention: one tile and some
_KV_TYPES = (torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8)


def choose(names: Sequence[str], judge: Callable[[str], str]) -> tuple[str, str]:
    """(the first variant in which `judge` finds no fault, a phrase on those before it).

    Raises ConfigError where there is none.
    """
    faults: list[str] = []
    for name in names:
        fault = judge(name)
        if not fault:
            return name, "; ".join(faults)
        faults.append(f"{name} passed over: its {fault} differs from that of {PLAIN}")
    raise ConfigError(f"kernel variant: {'; '.join(faults)}")


@cache
def difference(variant: str) -> str:
    """The first operation whose bits are not plain's; empty where all are."""
    if variant == PLAIN:
        return ""
    return first_difference(Eager(Team(1, variant)), Eager(Team(1, PLAIN)))


def first_difference(candidate: Eager, plain: Eager) -> str:
    """The first operation to which the two give different bits; empty where there is none."""
    for (name, own), (_, expected) in zip(_results(candidate), _results(plain), strict=True):
        if not torch.equal(own.view(torch.uint8), expected.view(torch.uint8)):
            return name
    return ""


def _results(operations: Eager) -> Iterator[tuple[str, Tensor]]:
    """The same operations on the same numbers, each with a name, computed as they are asked for."""
    for num_rows in _ROWS:
        for name, result in _row_results(operations, num_rows):
            yield f"{name} of {num_rows} rows", result
    for dtype in _KV_TYPES:
        yield from _attention_results(operations, dtype)


def _row_results(operations: Eager, num_rows: int) -> Iterator[tuple[str, Tensor]]:
    inputs = _numbers(num_rows, _COLUMNS)
    yield "norm", operations.rms_norm(inputs, _numbers(_COLUMNS), 1e-5)
    yield "silu gate", operations.silu_mul(8 * inputs)
    yield "gelu gate", operations.gelu_mul(8 * inputs)
    positions = 997 * torch.arange(num_rows)
    cos, sin = operations.rope_angles(positions, 0.7 ** torch.arange(_HEAD_DIM // 2), 1.0)
    yield "rotation's angle", torch.cat((cos, sin))
    heads = _numbers(num_rows, _HEADS, _HEAD_DIM)
    yield "rotation", operations.rope(heads, cos, sin)
    for name, weight in _weights().items():
        yield f"{name} product", operations.linear(inputs, weight)


def _attention_results(operations: Eager, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    shape = (_POSITIONS, _KV_HEADS, _HEAD_DIM)
    layer, metadata = _pool(dtype), _step(_POSITIONS)
    name = f"attention over {str(dtype).removeprefix('torch.')}"
    operations.write_kv(_numbers(*shape), _numbers(*shape).flip(0), layer, metadata)
    yield f"{name}: what is written", layer.values
    for num_rows in _ROWS:
        query = _numbers(num_rows, _HEADS, _HEAD_DIM)
        result = operations.paged_attention(query, layer, _step(num_rows), _HEAD_DIM**-0.5)
        yield f"{name} of {num_rows} rows", result


@cache
def _weights() -> dict[str, Weight]:
    """A packed weight for every inner loop of the products."""
    dense = DenseWeight(_numbers(_OUTPUTS, _COLUMNS))
    return {"dense": pack(dense), **{name: pack(_blocks(name)) for name in _QUANTISED}}


def _blocks(name: str) -> BlockWeight:
    block_format = FORMAT_BY_NAME[name]
    shape = (_OUTPUTS, block_format.row_bytes(_COLUMNS))
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, _LARGEST_BYTE + 1, shape, generator=generator, dtype=torch.uint8)
    return BlockWeight(raw, block_format, torch.float32)


@cache
def _numbers(*shape: int) -> Tensor:
    """Numbers between -1 and 1 without a pattern in their bits, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(len(shape))
    return torch.rand(shape, generator=generator) * 2 - 1


def _pool(dtype: torch.dtype) -> KVView:
    shape = (1 + -(-_POSITIONS // _BLOCK_SIZE), _KV_HEADS, 2, _BLOCK_SIZE)
    scales = torch.zeros(shape) if dtype.itemsize == 1 else None
    return KVView(torch.zeros(*shape, _HEAD_DIM).to(dtype), scales)


def _step(num_rows: int) -> StepMetadata:
    """The last `num_rows` of a sequence that fills the pool's blocks from 1 on."""
    slots = _BLOCK_SIZE + torch.arange(_POSITIONS)[-num_rows:]
    table = 1 + torch.arange(-(-_POSITIONS // _BLOCK_SIZE), dtype=torch.int32)
    return StepMetadata(slots, table[None], (0, num_rows), (_POSITIONS,))
