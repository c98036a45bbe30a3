"""One step's decision, and what came of it.

The decision is counts, never token values, so that a step can be planned before the tokens of the last are known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from core.ids import BlockId
from engine.sampler.rows import SampledToken
from engine.sequence import Sequence


class ScheduledItem(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence run in this step.

    num_samples: tokens drawn from the last row: 0 in the middle of a prompt, else the choices the sequence stands for.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_samples: int


@dataclass(slots=True)
class SchedulerOutput:
    """What one step runs.

    items: at most one a sequence, in the order of the batch.
    copies: (source, destination) blocks to copy, in this order, before anything is written.
    preempted: sequences that lost their blocks to let this step run.
    num_batched_tokens: tokens of all items.
    """

    items: list[ScheduledItem] = field(default_factory=list)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    num_batched_tokens: int = 0


class SequenceUpdate(NamedTuple):
    """New tokens of one choice, and whether they ended it.

    sequence: whose they are. For a session every choice's update names the one session sequence.
    choice: which choice.
    tokens: what was sampled, none when a choice ended without a new token.
    finish_reason: empty while the choice goes on; `stop`, `length` or `abort`.
    stop_token_id: the stop token that ended it, when it was not the model's own end token.
    """

    sequence: Sequence
    choice: int
    tokens: list[SampledToken]
    finish_reason: str
    stop_token_id: int | None


def make_updates(
    choices: Iterable[Sequence], tokens: Iterable[SampledToken]
) -> list[SequenceUpdate]:
    """One update a choice that just got one token."""
    return [
        SequenceUpdate(choice, choice.choice, [token], choice.finish_reason, choice.stop_token_id)
        for choice, token in zip(choices, tokens, strict=True)
    ]
