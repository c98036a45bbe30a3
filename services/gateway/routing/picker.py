"""The choice: one owner and the prefill workers it may ask, made together.

Equal states give equal choices: ties go to the worker that was owner longest ago, then to the lower id.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import ContextTooLong, OverloadedError
from services.gateway.config import RoutingConfig
from services.gateway.routing import filters
from services.gateway.routing.base import Candidate, Route, RouteQuery
from services.gateway.routing.scorers import check_weights, total_scores


class Picker:
    """Filters, scores and picks. Pure: all state is in the candidates."""

    def __init__(self, config: RoutingConfig) -> None:
        check_weights("decode-scorer-weights", config.decode_weights)
        check_weights("prefill-scorer-weights", config.prefill_weights)
        self._config = config

    def pick(self, candidates: Sequence[Candidate], query: RouteQuery) -> Route:
        """The route of a query; OverloadedError or ContextTooLong says why there is none."""
        serving = filters.serving(candidates, query)
        owners = filters.owners(serving, query)
        if not owners:
            raise OverloadedError(_why_no_owner(serving, query.model))
        fitting = filters.long_enough(owners, query)
        if not fitting:
            most = max(owner.info.max_model_len for owner in owners)
            raise context_too_long(most, query.num_prompt_tokens, query.max_tokens)
        owner = self._ranked(fitting, query, self._config.decode_weights)[0]
        if not self._may_split(owner, query):
            return Route(owner)
        prefill = filters.prefill_for(owner, filters.long_enough(serving, query))
        ranked = self._ranked(prefill, query, self._config.prefill_weights)
        if not ranked or not self._splitting_pays(owner, ranked[0], query):
            return Route(owner)
        return Route(owner, tuple(ranked[: self._config.max_prefill_candidates]))

    def _may_split(self, owner: Candidate, query: RouteQuery) -> bool:
        """Whether the owner has enough to do. One output token needs no decode, so no KV is sent."""
        own_tokens = query.num_prompt_tokens - owner.spared_tokens
        return query.max_tokens > 1 and own_tokens >= self._config.split_min_tokens

    def _splitting_pays(self, owner: Candidate, prefill: Candidate, query: RouteQuery) -> bool:
        """Whether another worker should compute the prompt: one does where the owner lacks enough of it.

        Where the owner has little to compute and much to load, only one that is done sooner does.
        """
        lacking = query.num_prompt_tokens - owner.cached_tokens
        if lacking >= self._config.split_min_tokens:
            return True
        return prefill.work_tokens(query) < owner.work_tokens(query)

    def _ranked(
        self, candidates: Sequence[Candidate], query: RouteQuery, weights: dict[str, float]
    ) -> list[Candidate]:
        scores = total_scores(candidates, query, weights, self._config)
        order = sorted(
            range(len(candidates)),
            key=lambda i: (
                -round(scores[i], 9),
                candidates[i].last_routed,
                candidates[i].info.id,
            ),
        )
        return [candidates[place] for place in order]


def context_too_long(limit: int, num_prompt_tokens: int, max_tokens: int) -> ContextTooLong:
    """The error for a prompt and an answer that together exceed a model's length."""
    total = num_prompt_tokens + max_tokens
    return ContextTooLong(
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{max_tokens} output tokens and your prompt contains {num_prompt_tokens} input tokens, "
        f"for a total of {total} tokens. Please reduce the length of the input or max_tokens.",
        param="input_tokens",
    )


def _why_no_owner(serving: Sequence[Candidate], model: str) -> str:
    if not serving:
        return f"no live worker serves the model `{model}` now"
    ids = ", ".join(candidate.info.id for candidate in serving)
    return f"only prefill workers serve the model `{model}` now ({ids}): none can decode"
