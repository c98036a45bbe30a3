"""Chooses tokens for a batch of rows; the rule is `kernels.reference.sampling`.

Greedy rows that nothing adjusts take one pass together. All others are taken some rows at a time, copied where one of
them is adjusted, and drawn.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from core.request import SamplingParams
from engine.sampler.rows import Logprobs, SampledToken, SampleRow
from kernels import ops
from kernels.workspace import Workspace

_CHUNK_ROWS = 32  # bounds the copies of adjusted rows
_LEAST_TEMPERATURE = 0.01
"""Smaller temperatures above 0 are raised to this, as users of vLLM know it."""


class Sampler:
    """What it answers for a row depends on that row alone, never on its company or on earlier steps.

    Holds scratch memory, so one thread uses it at a time.
    """

    def __init__(self) -> None:
        self._workspace = Workspace()

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """One token for each of `rows`. logits: float32 [num_logits_rows, vocab_size], not changed."""
        plain, adjusted, drawn = _by_kind(rows)
        token_ids = [0] * len(rows)
        if plain:
            chosen = ops.argmax(_select(logits, [rows[index].logits_row for index in plain]))
            _put(token_ids, plain, chosen)
        for chunk in _chunks(adjusted):
            _put(token_ids, chunk, ops.argmax(_adjusted(logits, [rows[i] for i in chunk])))
        if drawn:
            self._draw_all(logits, rows, drawn, token_ids)
        logprobs = self._logprobs(logits, rows, token_ids)
        return [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(token_ids)]

    def _draw_all(
        self, logits: Tensor, rows: Sequence[SampleRow], drawn: list[int], token_ids: list[int]
    ) -> None:
        """Put the tokens of the rows that need a random number, by index, into `token_ids`."""
        numbers = _numbers([rows[index] for index in drawn])
        for start, chunk in zip(range(0, len(drawn), _CHUNK_ROWS), _chunks(drawn), strict=True):
            members = [rows[index] for index in chunk]
            own_numbers = numbers[start : start + len(chunk)]
            _put(token_ids, chunk, self._draw(_adjusted(logits, members), members, own_numbers))

    def _draw(self, values: Tensor, rows: list[SampleRow], numbers: Tensor) -> Tensor:
        params = [row.params for row in rows]
        return ops.draw(
            values,
            numbers,
            temperatures=[max(p.temperature, _LEAST_TEMPERATURE) for p in params],
            top_k=[p.top_k for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            workspace=self._workspace,
        )

    def _logprobs(
        self, logits: Tensor, rows: Sequence[SampleRow], token_ids: list[int]
    ) -> dict[int, Logprobs]:
        """For each row that wants them, by index: of the logits as the model gave them."""
        wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        if not wanted:
            return {}
        answers = ops.token_logprobs(
            logits,
            rows=[rows[index].logits_row for index in wanted],
            token_ids=[token_ids[index] for index in wanted],
            num_top=[rows[index].params.logprobs or 0 for index in wanted],
            workspace=self._workspace,
        )
        return {i: Logprobs(*answer) for i, answer in zip(wanted, answers, strict=True)}


def _by_kind(rows: Sequence[SampleRow]) -> tuple[list[int], list[int], list[int]]:
    """Indices of greedy rows that nothing adjusts, of other greedy rows, and of rows that need a random number."""
    plain: list[int] = []
    adjusted: list[int] = []
    drawn: list[int] = []
    for index, row in enumerate(rows):
        if not row.params.is_greedy:
            drawn.append(index)
        else:
            (adjusted if _is_adjusted(row) else plain).append(index)
    return plain, adjusted, drawn


def _is_adjusted(row: SampleRow) -> bool:
    params = row.params
    return bool(
        row.banned_token_ids
        or row.allowed_token_ids is not None
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
    )


def _select(logits: Tensor, indices: list[int]) -> Tensor:
    """Rows of the logits by index: a view where they follow each other, a copy otherwise."""
    first, end = indices[0], indices[0] + len(indices)
    if indices == list(range(first, end)):
        return logits if len(indices) == logits.shape[0] else logits[first:end]
    return _take(logits, indices)


def _take(logits: Tensor, indices: list[int]) -> Tensor:
    """A copy of rows of the logits, where the logits are."""
    return logits[torch.tensor(indices, device=logits.device)]


def _adjusted(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """The logits of a few rows as [rows, vocab_size], not to be changed: a copy if any of them is adjusted."""
    indices = [row.logits_row for row in rows]
    adjusted = [place for place, row in enumerate(rows) if _is_adjusted(row)]
    if not adjusted:
        return _select(logits, indices)
    own = _take(logits, indices)
    for place in adjusted:
        _adjust(own[place], rows[place])
    return own


def _numbers(rows: list[SampleRow]) -> Tensor:
    """The random number of each row: float64 [rows]."""
    return ops.uniforms(
        [row.params.seed for row in rows],
        [row.output_position for row in rows],
        [row.choice for row in rows],
    )


def _put(token_ids: list[int], indices: list[int], chosen: Tensor) -> None:
    for index, token_id in zip(indices, chosen.tolist(), strict=True):
        token_ids[index] = token_id


def _chunks(indices: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(indices), _CHUNK_ROWS):
        yield indices[start : start + _CHUNK_ROWS]


def _adjust(values: Tensor, row: SampleRow) -> None:
    """What changes which token even a greedy row takes, in the order of the specification. values: [vocab_size]."""
    params = row.params
    if row.allowed_token_ids is not None:
        ops.allow_only(values, _ids(row.allowed_token_ids, values))
    if row.banned_token_ids:
        ops.ban(values, _ids(row.banned_token_ids, values))
    if params.logit_bias:
        pairs = [pair for pair in params.logit_bias if 0 <= pair[0] < len(values)]
        bias = torch.tensor([bias for _, bias in pairs], dtype=values.dtype, device=values.device)
        ops.add_bias(values, _ids([token_id for token_id, _ in pairs], values), bias)
    _penalise(values, row, params)


def _penalise(values: Tensor, row: SampleRow, params: SamplingParams) -> None:
    output = _ids(row.output_token_ids, values)
    if params.repetition_penalty != 1.0:
        seen = torch.cat((_ids(row.prompt_token_ids, values), output))
        ops.penalise_repetition(values, seen, params.repetition_penalty)
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        ops.penalise_frequency(values, output, params.frequency_penalty, params.presence_penalty)


def _ids(token_ids: Sequence[int], values: Tensor) -> Tensor:
    """Ids that the model has, as an index into its logits [vocab_size]: one beyond its vocabulary names none."""
    if not token_ids:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    ids = torch.frombuffer(array("q", token_ids), dtype=torch.int64)
    return ids[(ids >= 0) & (ids < len(values))].to(values.device)
