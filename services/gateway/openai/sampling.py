"""From a request's fields to SamplingParams: defaults of model and API, limits, the seed."""

from __future__ import annotations

import os
from typing import Any

from core.errors import InvalidRequest
from core.request import SamplingParams
from services.gateway.choice import TextOptions
from services.gateway.models import ServedModel
from services.gateway.openai.protocol import SamplingBody
from services.gateway.openai.validation import check_type, shown
from services.gateway.routing.picker import context_too_long

LEAST_TEMPERATURE = 0.01
"""Temperatures between 0 and this are raised to it: below, logits divided by it overflow."""

_LONGEST_STOP_CHARS = 4096


def resolve_max_tokens(
    asked: int | None, default: int | None, num_prompt_tokens: int, model: ServedModel
) -> int:
    """Output tokens to allow; ContextTooLong when they do not fit behind the prompt.

    default: what a request that says nothing gets, as far as it fits; None fills the context.
    """
    room = model.max_model_len - num_prompt_tokens
    if asked is not None:
        if asked > room:
            raise context_too_long(model.max_model_len, num_prompt_tokens, asked)
        return asked
    if room < 1:
        raise context_too_long(model.max_model_len, num_prompt_tokens, 1)
    return room if default is None else min(default, room)


def build_sampling(
    body: SamplingBody, model: ServedModel, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The sampling parameters of a request; a model's generation defaults fill what it leaves out."""
    defaults = model.text.defaults
    temperature = _first(body.temperature, defaults.temperature, 1.0)
    n = _first(body.n, 1)
    if temperature == 0 and n > 1:
        raise InvalidRequest(f"n must be 1 when temperature is 0 (greedy), got {n}", param="n")
    return SamplingParams(
        seed=_seed(body.seed),
        n=n,
        temperature=max(temperature, LEAST_TEMPERATURE) if temperature else 0.0,
        top_k=max(_first(body.top_k, defaults.top_k, 0), 0),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        presence_penalty=_first(body.presence_penalty, 0.0),
        frequency_penalty=_first(body.frequency_penalty, 0.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        max_tokens=max_tokens,
        min_tokens=_first(body.min_tokens, 0),
        stop_token_ids=_token_ids("stop_token_ids", body.stop_token_ids or [], model),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        logit_bias=_logit_bias(body.logit_bias or {}, model),
    )


def build_text_options(body: SamplingBody, max_stop_strings: int) -> TextOptions:
    """How a request wants its text."""
    return TextOptions(
        stop=_stop_strings(body.stop, max_stop_strings),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )


def check_stream_options(body: SamplingBody) -> None:
    """stream_options belong to streams."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options is only allowed when stream is true", param="stream_options"
        )


def _stop_strings(value: Any, most: int) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    check_type("stop", stops, list, "a text or a list of texts")
    if len(stops) > most:
        raise InvalidRequest(f"stop must hold at most {most} texts, got {len(stops)}", param="stop")
    for place, stop in enumerate(stops):
        check_type(f"stop[{place}]", stop, str, "a text")
        if not 1 <= len(stop) <= _LONGEST_STOP_CHARS:
            raise InvalidRequest(
                f"stop[{place}] must have 1 to {_LONGEST_STOP_CHARS} characters, got {len(stop)}",
                param="stop",
            )
    return tuple(stops)


def _seed(asked: int | None) -> int:
    """A seed in [0, 2**64): the client's, or a random one."""
    if asked is None:
        return int.from_bytes(os.urandom(8), "little")
    return asked % 2**64


def _token_ids(name: str, ids: list[int], model: ServedModel) -> tuple[int, ...]:
    size = model.text.vocabulary.size
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < size:
            message = f"{name}[{place}] must be in [0, {size - 1}], got {token_id}"
            raise InvalidRequest(message, param=name)
    return tuple(ids)


def _logit_bias(biases: dict[str, float], model: ServedModel) -> tuple[tuple[int, float], ...]:
    """Pairs in order of token id; biases are clamped to [-100, 100]."""
    size = model.text.vocabulary.size
    pairs: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < size):
            message = f"logit_bias: {shown(key)} must be a token id in [0, {size - 1}]"
            raise InvalidRequest(message, param="logit_bias")
        pairs[int(key)] = min(100.0, max(-100.0, bias))
    return tuple(sorted(pairs.items()))


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)
