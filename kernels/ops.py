"""The operations models and the sampler are written in: one public function each, tensors in, tensors out.

Which code runs is chosen once a process (`kernels.backends`); `kernels.reference` is the specification that every
other backend is tested against. Shapes: T rows (tokens of a step), H hidden, Hq query heads, Hkv KV heads, D head_dim.

A layer of the KV pool is a `KVView`, strided over the pool's bytes; its element type is the pool's, not the rows'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.kv_view import KVView
from kernels.program import EagerProgram, StepProgram, progress
from kernels.recording import Recorder, StepFunction, sample_metadata, sample_recording
from kernels.step import StepMetadata
from kernels.weights import Weight
from kernels.workspace import Workspace

_active: Any = reference


def use_backend(backend: Any) -> None:
    """Run all operations of this process on `backend` (see `kernels.backends`)."""
    global _active
    _active = backend


def compile_step(function: StepFunction) -> StepProgram:
    """A model's step as a program of the backend in use.

    A backend that replays has the function's operations recorded, once, with sample inputs: the function must not
    look at values. Others call it each time.
    """
    if not hasattr(_active, "compile_step"):
        return EagerProgram(function)
    backend, recorder, recording = _active, Recorder(), sample_recording()
    use_backend(recorder)
    try:
        recording.output = function(
            recording.token_ids, recording.positions, sample_metadata(), recording.wanted
        )
    finally:
        use_backend(backend)
    recording.calls = recorder.calls
    program: StepProgram = backend.compile_step(recording)
    return program


def embedding(token_ids: Tensor, weight: Weight) -> Tensor:
    """Rows of a weight `[vocab, H]`: `[T, H]`."""
    return _active.embedding(token_ids, weight)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`hidden / rms(hidden) * weight` over the last dimension, the mean square in float32."""
    return _active.rms_norm(hidden, weight, epsilon)


def add_rms_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + hidden), residual + hidden); the sum may reuse the memory of either."""
    return _active.add_rms_norm(hidden, residual, weight, epsilon)


def linear(inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`inputs [T, K] @ weight[N, K]^T + bias`: `[T, N]`."""
    return _active.linear(inputs, weight, bias)


def pack(weight: Weight) -> Weight:
    """The weight in the order that this backend's `linear` reads best; itself where nothing is gained.

    The result serves `linear` only, and only in this process.
    """
    return _active.pack(weight)


def pack_rows(weight: Weight) -> Weight:
    """The weight in the order that this backend's `embedding` reads; itself where any order will do.

    What it gives may be packed for products as well, and is then shared by both.
    """
    return _active.pack_rows(weight)


def rope_angles(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`factor * cos(position * frequency)` and the sines, for positions `[T]`, frequencies `[D/2]`: `[T, D/2]` each."""
    return _active.rope_angles(positions, frequencies, factor, dtype)


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[T, heads, D]`, element i with element i + D/2; cos and sin are `[T, D/2]`."""
    return _active.rope(heads, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for `gate_up [T, 2 * N]`: `[T, N]`."""
    return _active.silu_mul(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up`, with the tanh approximation of gelu, for `gate_up [T, 2 * N]`: `[T, N]`."""
    return _active.gelu_mul(gate_up)


def write_kv(key: Tensor, value: Tensor, layer: KVView, metadata: StepMetadata) -> None:
    """Put each row's K and V (`[T, Hkv, D]`) into its slot; a row with slot -1 is written nowhere.

    What a slot then holds, scales included, is in `kernels.reference.kv_formats`.
    """
    _active.write_kv(key, value, layer, metadata)


def paged_attention(
    query: Tensor,
    layer: KVView,
    metadata: StepMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of `query [T, Hq, D]` over the pool: `[T, Hq, D]`.

    A row at position p sees positions `(p - window, p]`, or `[0, p]` without a window. With a soft cap, scores s
    become `soft_cap * tanh(s / soft_cap)`. sinks, `[Hq]` float32, are logits (neither scaled nor capped) that join a
    head's softmax and carry no value. Slots outside what a row sees never reach the result, whatever they hold.
    """
    return _active.paged_attention(query, layer, metadata, scale, window, soft_cap, sinks)


def merge_partials(outputs: Tensor, log_sums: Tensor) -> Tensor:
    """Attention `[T, Hq, D]` from P disjoint ranges of positions, folded left in their order.

    outputs: `[P, T, Hq, D]` float32, the attention of each range alone. log_sums: `[P, T, Hq]` float32, the logarithm
    of its sum of exponentials; -inf where a range saw nothing: it weighs nothing, whatever its output holds. A row
    that no range saw is zeros.
    """
    return _active.merge_partials(outputs, log_sums)


def take_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """Rows `[R]` of `hidden [T, H]`: `[R, H]`; `hidden` itself where those are all of them in order."""
    return _active.take_rows(hidden, rows)


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks of a byte pool `[num_blocks, block_bytes]`, each pair (source, destination) in order."""
    _active.copy_blocks(pool, pairs)


def gather_blocks(pool: Tensor, block_ids: Sequence[int]) -> Tensor:
    """Whole blocks of a byte pool `[num_blocks, block_bytes]`, in the order named: `[n, block_bytes]`, own memory."""
    return _active.gather_blocks(pool, block_ids)


def scatter_blocks(staging: Tensor, pool: Tensor, block_ids: Sequence[int]) -> None:
    """Put `staging [n, block_bytes]` into blocks of a byte pool, which must differ from each other."""
    _active.scatter_blocks(staging, pool, block_ids)


def convert_kv(
    source: KVView,
    source_blocks: Sequence[int],
    destination: KVView,
    destination_blocks: Sequence[int],
) -> None:
    """Put whole blocks of one layer into another pool's blocks, which must differ, in the form that pool keeps.

    Both pools have the same heads, head size and block size. Each slot is what `write_kv` would make of the numbers
    it holds in the source, in float32.
    """
    _active.convert_kv(source, source_blocks, destination, destination_blocks)


def mark(layer: int) -> None:
    """Say that the KV of `layer` of the running step is in the pool (`kernels.program.Progress`)."""
    if isinstance(_active, Recorder):
        _active.mark(layer)
    else:
        progress.mark(layer)


# ---------------------------------------------------------------- sampling: rows of logits `[rows, vocab]`, float32


def argmax(logits: Tensor) -> Tensor:
    """The lowest id of the largest logit of each row: int64 `[rows]`."""
    return _active.argmax(logits)


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], choices: Sequence[int], purpose: int = 0
) -> Tensor:
    """A number in [0, 1) a row, float64 `[rows]`: a function of seed, output position, choice and purpose alone."""
    return _active.uniforms(seeds, positions, choices, purpose)


def draw(
    logits: Tensor,
    uniforms: Tensor,
    temperatures: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    workspace: Workspace,
) -> Tensor:
    """The first kept id of each row whose cumulative weight exceeds its number's share of the total: int64 `[rows]`.

    The whole rule, ties and order of sums included, is in `kernels.reference.sampling`.
    """
    return _active.draw(logits, uniforms, temperatures, top_k, top_p, min_p, workspace)


def allow_only(row: Tensor, token_ids: Tensor) -> None:
    """Ban, in place, every id of a row `[vocab]` that is not among `token_ids`."""
    _active.allow_only(row, token_ids)


def ban(row: Tensor, token_ids: Tensor) -> None:
    """Make ids of a row `[vocab]` impossible, in place; a ban on every id that is left bans none."""
    _active.ban(row, token_ids)


def add_bias(row: Tensor, token_ids: Tensor, bias: Tensor) -> None:
    """Add bias to the logits of ids of a row `[vocab]`, in place."""
    _active.add_bias(row, token_ids, bias)


def penalise_repetition(row: Tensor, seen: Tensor, penalty: float) -> None:
    """Divide positive and multiply other logits of ids that were seen, in place; repeats count once."""
    _active.penalise_repetition(row, seen, penalty)


def penalise_frequency(
    row: Tensor, output: Tensor, frequency_penalty: float, presence_penalty: float
) -> None:
    """Subtract, in place, a penalty for each time an id occurs in the output, and one if it does at all."""
    _active.penalise_frequency(row, output, frequency_penalty, presence_penalty)


def token_logprobs(
    logits: Tensor,
    rows: Sequence[int],
    token_ids: Sequence[int],
    num_top: Sequence[int],
    workspace: Workspace,
) -> list[tuple[float, int, list[int], list[float]]]:
    """For each of some rows of the logits: an id's log-probability and rank, and its best ids with theirs.

    The rank counts strictly larger logits (1 is best); of equals the lower id is listed first.
    """
    return _active.token_logprobs(logits, rows, token_ids, num_top, workspace)
