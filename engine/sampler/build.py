"""From a step's decision to the rows that the sampler is asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from core.request import SamplingParams
from engine.sampler.rows import SampleRow
from engine.scheduler.output import ScheduledItem
from engine.sequence import Sequence


def build_rows(items: Iterable[ScheduledItem], eos_token_ids: Collection[int]) -> list[SampleRow]:
    """The rows of a step, in the order that `Scheduler.update` expects: by item, then by choice.

    Row r of the logits belongs to the r-th item that samples at all.
    """
    rows: list[SampleRow] = []
    logits_row = 0
    for item in items:
        if not item.num_samples:
            continue
        rows += _rows_of(item.sequence, item.num_samples, logits_row, eos_token_ids)
        logits_row += 1
    return rows


def _rows_of(
    sequence: Sequence, num_samples: int, logits_row: int, eos_token_ids: Collection[int]
) -> list[SampleRow]:
    params = sequence.sampling
    position = sequence.num_output_tokens
    prompt: tuple[int, ...] = ()
    output: list[int] = []
    if _needs_history(params):
        prompt, output = sequence.request.prompt_token_ids, sequence.output_token_ids
    banned = _ending_token_ids(params, eos_token_ids) if position < params.min_tokens else ()
    return [
        SampleRow(logits_row, params, position, choice, prompt, output, banned)
        for choice in range(sequence.choice, sequence.choice + num_samples)
    ]


def _needs_history(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def _ending_token_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    eos = () if params.ignore_eos else tuple(sorted(eos_token_ids))
    return (*eos, *params.stop_token_ids)
