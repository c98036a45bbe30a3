"""What routing decides about: a query, the workers that could serve it, and the route chosen.

What a worker holds of a prompt is weighed by where it lies: on the device it costs nothing, in a tier below it costs
the time to load it, told in tokens that the worker would compute meanwhile. So more tokens held, or the same ones
nearer, never make a prediction worse.
"""

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
    device_tokens: tokens from the head of this query's prompt that lie on its device.
    tier_tokens: those after them that lie in a local tier below.
    last_routed: ordinal of the last route that it owns, 0 for none.
    """

    info: WorkerInfo
    num_requests: int = 0
    queued_tokens: int = 0
    device_tokens: int = 0
    tier_tokens: int = 0
    last_routed: int = 0

    @property
    def load_cost(self) -> float:
        """What one token read back from a tier takes, against computing it: at most 1, as what is slower is computed.

        By the worker's measured rates; where one is missing nothing says that loading is faster.
        """
        rates = self.info.rates
        if not 0 < rates.prefill_tokens_per_s < rates.load_tokens_per_s:
            return 1.0
        return rates.prefill_tokens_per_s / rates.load_tokens_per_s

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that it need not compute: those on the device, and those that are worth loading."""
        return self.device_tokens + (self.tier_tokens if self.load_cost < 1 else 0)

    @property
    def spared_tokens(self) -> float:
        """How much less it has to do for what it holds, in computed tokens; loading takes its part."""
        return self.device_tokens + self.tier_tokens * (1 - self.load_cost)

    def work_tokens(self, query: RouteQuery) -> float:
        """What lies before the end of the query's prompt here, in computed tokens: the queue, loading, computing."""
        return self.queued_tokens + query.num_prompt_tokens - self.spared_tokens


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
