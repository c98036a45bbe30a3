"""What the sampler is given for one token to choose, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from core.request import SamplingParams


class SampleRow(NamedTuple):
    """One token to choose. Several of them may name one row of logits: choices of one prompt.

    logits_row: the row of the logits to choose from.
    params: how to choose; its seed is the key of the random number.
    output_position: index the token will have in the choice's output (0 is the first).
    choice: index of the choice; with the position it is the counter of the random number.
    prompt_token_ids, output_token_ids: history, for penalties; may be empty when no penalty is set.
    banned_token_ids: tokens that may not be chosen (end tokens before min_tokens).
    allowed_token_ids: when not None, the only tokens that may be chosen.
    """

    logits_row: int
    params: SamplingParams
    output_position: int
    choice: int = 0
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    banned_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] | None = None


class Logprobs(NamedTuple):
    """Log-probabilities under the model's own distribution: no temperature, penalty, bias or ban in them.

    logprob: of the chosen token.
    rank: 1 + the number of tokens that are strictly more probable than the chosen one.
    top_token_ids, top_logprobs: the most probable tokens, best first, the lower id first among equals.
    """

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


class SampledToken(NamedTuple):
    """A chosen token, with log-probabilities when its request wants them."""

    token_id: int
    logprobs: Logprobs | None = None
