"""Signals that say how well a worker suits a query, each in [0, 1], higher is better.

A scorer sees all candidates of one choice, so it may compare them. Its weight is in RoutingConfig; a new signal is a
function here and a row in SCORERS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from core.errors import ConfigError
from services.gateway.config import RoutingConfig
from services.gateway.routing.base import Candidate, RouteQuery

Scorer = Callable[[Sequence[Candidate], RouteQuery, RoutingConfig], list[float]]


def score_prefix(
    candidates: Sequence[Candidate], query: RouteQuery, config: RoutingConfig
) -> list[float]:
    """Share of the prompt's work that the worker is spared by what it holds."""
    return [candidate.spared_tokens / query.num_prompt_tokens for candidate in candidates]


def score_load(
    candidates: Sequence[Candidate], query: RouteQuery, config: RoutingConfig
) -> list[float]:
    """How little the worker has to do, against the busiest one and a few requests more.

    The few requests keep an idle cluster from treating one request as full load.
    """
    loads = [_load_tokens(candidate, config) for candidate in candidates]
    scale = max(loads) + 8 * max(config.request_load_tokens, 1)
    return [1 - load / scale for load in loads]


def score_prefill_work(
    candidates: Sequence[Candidate], query: RouteQuery, config: RoutingConfig
) -> list[float]:
    """How little lies before the end of this prompt: tokens queued, those to be loaded, those not cached."""
    work = [candidate.work_tokens(query) for candidate in candidates]
    most = max(work)
    return [1 - tokens / most if most else 1.0 for tokens in work]


def _load_tokens(candidate: Candidate, config: RoutingConfig) -> int:
    return candidate.queued_tokens + config.request_load_tokens * candidate.num_requests


SCORERS: Mapping[str, Scorer] = {
    "prefix": score_prefix,
    "load": score_load,
    "prefill_work": score_prefill_work,
}


def check_weights(flag: str, weights: Mapping[str, float]) -> None:
    """ConfigError for a weight whose scorer does not exist."""
    for name in weights:
        if name not in SCORERS:
            raise ConfigError(f"--{flag}: {name!r} is unknown; known: {', '.join(sorted(SCORERS))}")


def total_scores(
    candidates: Sequence[Candidate],
    query: RouteQuery,
    weights: Mapping[str, float],
    config: RoutingConfig,
) -> list[float]:
    """The weighted sum of the scorers named in `weights`, a candidate each."""
    totals = [0.0] * len(candidates)
    if not candidates:
        return totals
    for name, weight in weights.items():
        for place, score in enumerate(SCORERS[name](candidates, query, config)):
            totals[place] += weight * score
    return totals
