"""Whether a variant of the kernels gives the bits that plain C++ gives on this machine.

A few small operations of every kind and a recorded step, on one thread, before a variant is put in use: compilers and
processors differ, and a variant that is only nearly right would break what batches, splits and restarts rely on. Costs
some milliseconds a variant and process. What is found is remembered; nothing is chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product

import torch
from torch import Tensor

from core.errors import ConfigError
from kernels.cpu.eager import Eager
from kernels.cpu.packing import pack
from kernels.cpu.team import Team
from kernels.gguf_formats import FORMAT_BY_NAME
from kernels.kv_view import KVView
from kernels.recording import Recorder, Recording, sample_recording
from kernels.step import StepMetadata
from kernels.weights import BlockWeight, ChannelWeight, DenseWeight, Weight
from kernels.workspace import Workspace

PLAIN = "plain"

_ROWS = (
    1,
    7,
    8,
    17,
)  # every number of rows that the variants' loops take at once, and one left over
_COLUMNS, _OUTPUTS = 256, 35
_QUANTISED = ("Q4_1", "Q8_0", "Q2_K", "Q6_K")  # 4 and 8 bits by groups of 32, and of 16
_LARGEST_BYTE = 0x77  # no two of them are a float16 that is infinite or no number
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 72
# Of attention: float16 that is read as it lies in memory, in pairs of vectors and with one left over; and padded heads.
_HEAD_DIMS = (64, 80, _HEAD_DIM)
_BLOCK_SIZE, _POSITIONS = 16, 70  # of attention: one tile and some
_KV_TYPES = (torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8)
_GATED = 64  # columns between the gate and the product after it
_VOCABULARY = (
    2500  # of logits: blocks of ids summed side by side, some left over, the last one not whole
)
_NUM_TOP = 20
_BLOCK_BYTES, _BLOCKS = 40_000, (2, 0)  # more than one piece of a move


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
    for dtype, head_dim in product(_KV_TYPES, _HEAD_DIMS):
        yield from _attention_results(operations, dtype, head_dim)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2):
        yield f"conversion to {_name(dtype)}", _converted(operations, dtype)
    yield from _sampling_results(operations)
    yield from _other_results(operations)


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
    yield "argmax", operations.argmax((4 * _numbers(num_rows, _VOCABULARY)).round())
    yield "recorded step", _recorded(operations, num_rows)


def _recorded(operations: Eager, num_rows: int) -> Tensor:
    """What a program does as one operation: norms and gates that quantise what products read."""
    recorder, recording = Recorder(), sample_recording()
    recording.output = _step_of_a_model(recorder, recording)
    recording.calls = recorder.calls
    ids, rows = torch.arange(num_rows), torch.arange(num_rows)
    metadata = StepMetadata(ids, torch.zeros(1, 1, dtype=torch.int32), (0, num_rows), (num_rows,))
    return operations.compile_step(recording).run(ids, ids, metadata, rows).clone()


def _step_of_a_model(recorder: Recorder, recording: Recording) -> Tensor:
    (gate, down), norm = _step_weights(), _numbers(_COLUMNS)
    hidden = recorder.embedding(recording.token_ids, _weights()["dense"])
    gate_up = recorder.linear(recorder.rms_norm(hidden, norm, 1e-5), gate)
    added = recorder.linear(recorder.silu_mul(gate_up), down)
    normed, hidden = recorder.add_rms_norm(added, hidden, norm, 1e-5)
    added = recorder.linear(recorder.gelu_mul(recorder.linear(normed, gate)), down)
    last, _ = recorder.add_rms_norm(added, hidden, norm, 1e-5)
    return recorder.take_rows(last, recording.wanted)


def _attention_results(
    operations: Eager, dtype: torch.dtype, head_dim: int
) -> Iterator[tuple[str, Tensor]]:
    shape = (_POSITIONS, _KV_HEADS, head_dim)
    layer, metadata = _pool(dtype, head_dim), _step(_POSITIONS)
    name = f"attention over {_name(dtype)} in heads of {head_dim}"
    operations.write_kv(_numbers(*shape), _numbers(*shape).flip(0), layer, metadata)
    yield f"{name}: what is written", layer.values
    for num_rows in _ROWS:
        query = _numbers(num_rows, _HEADS, head_dim)
        result = operations.paged_attention(query, layer, _step(num_rows), head_dim**-0.5)
        yield f"{name} of {num_rows} rows", result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _converted(operations: Eager, dtype: torch.dtype) -> Tensor:
    """A pool of int8 with scales, read, and written as `dtype`."""
    source, destination = _pool(torch.int8), _pool(dtype, has_scales=False)
    source.values.view(torch.uint8).flatten()[:] = torch.arange(source.values.numel()) % 255
    assert source.scales is not None
    source.scales.copy_(_numbers(*source.scales.shape).abs())
    blocks = range(source.num_blocks)
    operations.convert_kv(source, blocks, destination, blocks[::-1])
    return destination.values


def _sampling_results(operations: Eager) -> Iterator[tuple[str, Tensor]]:
    temperatures, top_k = [1.0, 0.7, 2.0, 0.3], [0, 40, 0, 900]
    top_p, min_p = [1.0, 0.9, 0.5, 1.0], [0.0, 0.0, 0.01, 0.0]
    logits, rows = 6 * _numbers(4, _VOCABULARY), range(4)
    numbers = operations.uniforms(rows, rows, rows)
    yield "random numbers", numbers
    yield "draw", operations.draw(logits, numbers, temperatures, top_k, top_p, min_p, Workspace())
    answers = operations.token_logprobs(logits, rows, rows, [_NUM_TOP] * len(rows), Workspace())
    numbers_of_each = [[logprob, rank, *ids, *tops] for logprob, rank, ids, tops in answers]
    yield "log-probabilities", torch.tensor(numbers_of_each, dtype=torch.float64)


def _other_results(operations: Eager) -> Iterator[tuple[str, Tensor]]:
    partials, log_sums = _numbers(3, 5, _HEADS, _HEAD_DIM), 9 * _numbers(3, 5, _HEADS)
    yield "merge", operations.merge_partials(partials, log_sums)
    pool = torch.arange(3 * _BLOCK_BYTES).to(torch.uint8).view(3, _BLOCK_BYTES)
    staging = operations.gather_blocks(pool, _BLOCKS)
    operations.scatter_blocks(staging, pool, _BLOCKS[::-1])
    operations.copy_blocks(pool, [(2, 1)])
    yield "moved blocks", torch.cat((staging, pool))


@cache
def _weights() -> dict[str, Weight]:
    """A packed weight for every inner loop of the products."""
    dense = DenseWeight(_numbers(_OUTPUTS, _COLUMNS))
    return {"dense": pack(dense), **{name: pack(_blocks(name)) for name in _QUANTISED}}


@cache
def _step_weights() -> tuple[Weight, Weight]:
    """Quantised weights of a gate and of what follows it; their products are of the size of 1."""
    shapes = ((2 * _GATED, _COLUMNS), (_COLUMNS, _GATED))
    quants = [(_numbers(*shape) * 127).to(torch.int8) for shape in shapes]
    gate, down = (pack(ChannelWeight(each, torch.full((len(each),), 1e-3))) for each in quants)
    return gate, down


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


def _pool(dtype: torch.dtype, head_dim: int = _HEAD_DIM, *, has_scales: bool = True) -> KVView:
    shape = (1 + -(-_POSITIONS // _BLOCK_SIZE), _KV_HEADS, 2, _BLOCK_SIZE)
    scales = torch.zeros(shape) if has_scales and dtype.itemsize == 1 else None
    return KVView(torch.zeros(*shape, head_dim).to(dtype), scales)


def _step(num_rows: int) -> StepMetadata:
    """The last `num_rows` of a sequence that fills the pool's blocks from 1 on."""
    slots = _BLOCK_SIZE + torch.arange(_POSITIONS)[-num_rows:]
    table = 1 + torch.arange(-(-_POSITIONS // _BLOCK_SIZE), dtype=torch.int32)
    return StepMetadata(slots, table[None], (0, num_rows), (_POSITIONS,))
