"""What routing decides about: a query, the workers that could serve it, and the route chosen."""

from __future__ import annotations

from dataclasses import dataclass

from core.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What routing must know of a request.

    model, bundle_digest: served name, and the tokenizer that made the prompt's tokens.
    num_prompt_tokens, max_tokens, num_choices: its size.
    """

    model: str
    bundle_digest: str
    num_prompt_tokens: int
    max_tokens: int
    num_choices: int = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """One live worker as one query sees it.

    info: its record.
    num_requests: requests it has or is about to get, those just routed included.
    queued_tokens: prompt tokens it has yet to compute, those just routed included.
    cached_tokens: tokens of this query's prompt that it holds.
    last_routed: ordinal of the last route that it owns, 0 for none.
    """

    info: WorkerInfo
    num_requests: int = 0
    queued_tokens: int = 0
    cached_tokens: int = 0
    last_routed: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """Who runs what.

    owner: the candidate that owns the request to its last token.
    prefill: candidates for the prompt, best first; empty when the owner runs it.
    """

    owner: Candidate
    prefill: tuple[Candidate, ...] = ()

    @property
    def is_split(self) -> bool:
        """Whether another worker than the owner is asked for the prompt."""
        return bool(self.prefill)
