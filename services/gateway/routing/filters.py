"""Which workers can serve a query at all. Pure functions; order is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.kv_layout import can_convert
from core.worker_info import Role
from services.gateway.routing.base import Candidate, RouteQuery


def serving(candidates: Iterable[Candidate], query: RouteQuery) -> list[Candidate]:
    """Workers of the model, with the tokenizer of the prompt."""
    return [
        candidate
        for candidate in candidates
        if query.model in candidate.info.models
        and candidate.info.model_bundle_digest == query.bundle_digest
    ]


def long_enough(candidates: Iterable[Candidate], query: RouteQuery) -> list[Candidate]:
    """Workers whose model length admits prompt and answer."""
    needed = query.num_prompt_tokens + query.max_tokens
    return [candidate for candidate in candidates if candidate.info.max_model_len >= needed]


def owners(candidates: Sequence[Candidate], query: RouteQuery) -> list[Candidate]:
    """Workers that may own the query: those that decode; for a single token, prefill workers first."""
    decode = [candidate for candidate in candidates if candidate.info.role.serves_decode]
    if query.max_tokens > 1:
        return decode
    prefill = [candidate for candidate in candidates if candidate.info.role.serves_prefill]
    return prefill or decode


def prefill_for(owner: Candidate, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Workers that can hand the prompt's KV to `owner`: other ones, same identity, a transfer plan exists.

    A mixed worker runs its prompts itself rather than ask another mixed one.
    """
    is_mixed = owner.info.role is Role.MIXED
    return [
        candidate
        for candidate in candidates
        if candidate.info.id != owner.info.id
        and candidate.info.role.serves_prefill
        and not (is_mixed and candidate.info.role is Role.MIXED)
        and candidate.info.identity == owner.info.identity
        and can_convert(candidate.info.layout, owner.info.layout)
    ]
