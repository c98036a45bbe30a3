"""What the sampler asks for, natively: one call for a batch of rows.

The ids are those of `kernels.reference.sampling`, its weights and sums bit by bit. Log-probabilities may differ from
the reference's in the last bit of a logarithm.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.structs import Draw, Logprobs, Op, Rows, Uniforms
from kernels.cpu.team import Team

_FLOATS, _INTS, _WORDS = "d", "q", "Q"


def uniforms(
    team: Team, seeds: Sequence[int], positions: Sequence[int], choices: Sequence[int], purpose: int
) -> Tensor:
    """See `kernels.ops.uniforms`."""
    assert len(seeds) == len(positions) == len(choices), "a position and a choice for each seed"
    out = torch.empty(len(seeds), dtype=torch.float64)
    kept = (array(_WORDS, seeds), array(_INTS, positions), array(_INTS, choices))
    arguments = Uniforms(*map(_address, kept), out.data_ptr(), purpose)
    team.run_alone(Op.UNIFORMS, arguments, len(out))
    return out


def draw(
    team: Team,
    logits: Tensor,
    uniforms: Tensor,
    temperatures: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> Tensor:
    """See `kernels.ops.draw`."""
    num_rows = len(logits)
    settings = (temperatures, top_k, top_p, min_p)
    assert all(len(each) == num_rows for each in settings), "a setting for each row"
    assert uniforms.dtype == torch.float64, "random numbers are float64"
    numbers = uniforms.contiguous()
    assert len(numbers) == num_rows, "a random number for each row"
    out = torch.empty(num_rows, dtype=torch.int64)
    kinds = (_FLOATS, _INTS, _FLOATS, _FLOATS)
    kept = [array(kind, each) for kind, each in zip(kinds, settings, strict=True)]
    rows, addresses = _rows(logits), map(_address, kept)
    arguments = Draw(rows, numbers.data_ptr(), *addresses, out.data_ptr(), logits.shape[1])
    team.run_alone(Op.DRAW, arguments, num_rows)
    assert bool((out >= 0).all()), "logits are not finite"
    return out


def token_logprobs(
    team: Team,
    logits: Tensor,
    rows: Sequence[int],
    token_ids: Sequence[int],
    num_top: Sequence[int],
) -> list[tuple[float, int, list[int], list[float]]]:
    """See `kernels.ops.token_logprobs`."""
    if not rows:
        return []
    count, vocab_size = len(rows), logits.shape[1]
    assert count == len(token_ids) == len(num_top), "a token and a number for each row"
    assert 0 <= min(rows) <= max(rows) < len(logits), "rows of the logits"
    assert 0 <= min(token_ids) <= max(token_ids) < vocab_size, "ids that the model has"
    num_listed = [min(number, vocab_size) for number in num_top]
    most = max(num_listed)
    logprobs, ranks = torch.empty(count, dtype=torch.float64), torch.empty(count, dtype=torch.int64)
    top_ids = torch.empty(count, most, dtype=torch.int64)
    top_logprobs = torch.empty(count, most, dtype=torch.float64)
    kept = (array(_INTS, rows), array(_INTS, token_ids), array(_INTS, num_listed))
    results = (logprobs, ranks, top_ids, top_logprobs)
    addresses = (*map(_address, kept), *(result.data_ptr() for result in results))
    arguments = Logprobs(_rows(logits), *addresses, most, vocab_size)
    team.run_alone(Op.LOGPROBS, arguments, count)
    assert not bool(logprobs.isnan().any()), "logits are not finite"
    listed = zip(*(result.tolist() for result in results), num_listed, strict=True)
    return [
        (logprob, rank, ids[:number], tops[:number]) for logprob, rank, ids, tops, number in listed
    ]


def _address(values: array[int] | array[float]) -> int:
    return values.buffer_info()[0]


def _rows(logits: Tensor) -> Rows:
    assert logits.dtype == torch.float32, "logits are float32"
    assert logits.stride(1) == 1, "a row's logits follow each other"
    return Rows(logits.data_ptr(), logits.stride(0))
