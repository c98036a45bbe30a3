"""From a body's bytes to a request that passed every check: model, token ids, sampling, text, shape of the answer.

Pure work over what it is given, so it may run in a thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from core.errors import InvalidRequest
from core.request import SamplingParams
from services.gateway.choice import TextOptions
from services.gateway.config import GatewayConfig
from services.gateway.http_errors import UnsupportedParameter
from services.gateway.models import ServedModel
from services.gateway.openai.logprobs import LogprobFormat
from services.gateway.openai.messages import normalise_messages, template_variables
from services.gateway.openai.prompts import Prompt, read_prompts
from services.gateway.openai.protocol import ChatBody, CompletionBody, SamplingBody
from services.gateway.openai.sampling import (
    build_sampling,
    build_text_options,
    check_stream_options,
    resolve_max_tokens,
)
from services.gateway.openai.unsupported import refuse_unsupported
from services.gateway.openai.validation import parse_body
from services.gateway.openai.writers import ChatWriter, CompletionWriter, Writer

Resolver = Callable[[str | None], ServedModel]
"""Finds the model that a request names."""

_DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Arrival:
    """What preparing a request needs beside its body.

    config: the gateway's limits.
    name: the id that the client gave in a header, or empty.
    trace_parent: W3C traceparent header, or empty.
    at: when it came.
    """

    config: GatewayConfig
    name: str
    trace_parent: str
    at: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed every check.

    name: the id part of the answer. prompts: token ids, one generation each. samplings: one a prompt.
    """

    name: str
    model: ServedModel
    body: SamplingBody
    prompts: tuple[Prompt, ...]
    samplings: tuple[SamplingParams, ...]
    options: TextOptions
    writer: Writer
    arrival: Arrival


def prepare_chat(data: bytes, resolve: Resolver, arrival: Arrival) -> Prepared:
    """A chat request."""
    body = parse_body(data, ChatBody)
    refuse_unsupported(body.model_extra, is_chat=True)
    check_stream_options(body)
    messages = normalise_messages(body.messages, arrival.config.max_messages)
    variables = template_variables(body.chat_template_kwargs, body.reasoning_effort)
    adds_prompt, continues = template_ending(
        body.add_generation_prompt, body.continue_final_message, body
    )
    logprobs = _chat_logprobs(body)
    model = resolve(body.model)
    limit = 0 if body.truncate_prompt_tokens is not None else model.max_model_len
    token_ids = model.text.encode_chat(
        messages,
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
        variables=variables,
        add_special_tokens=bool(body.add_special_tokens),
        max_tokens=limit,
    )
    asked = (
        body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    )
    prompts = (_truncated(Prompt(token_ids), body, model),)
    samplings = _samplings(body, model, prompts, asked, None, logprobs)
    name = arrival.name or body.request_id or uuid.uuid4().hex
    writer = ChatWriter(
        f"chatcmpl-{name}",
        model.name,
        _logprob_format(body, model, logprobs),
        with_token_ids=bool(body.return_token_ids),
    )
    options = build_text_options(body, arrival.config.max_stop_strings)
    return Prepared(name, model, body, prompts, samplings, options, writer, arrival)


def prepare_completion(data: bytes, resolve: Resolver, arrival: Arrival) -> Prepared:
    """A completions request."""
    body = parse_body(data, CompletionBody)
    refuse_unsupported(body.model_extra, is_chat=False)
    check_stream_options(body)
    if body.echo and body.logprobs is not None:
        raise UnsupportedParameter(
            "echo with logprobs is not supported: log-probabilities of the prompt are not served",
            param="echo",
        )
    model = resolve(body.model)
    read = read_prompts(
        body.prompt,
        model,
        add_special_tokens=body.add_special_tokens is not False,
        most=arrival.config.max_prompts,
        refuses_long=body.truncate_prompt_tokens is None,
    )
    prompts = tuple(_truncated(prompt, body, model) for prompt in read)
    samplings = _samplings(
        body, model, prompts, body.max_tokens, _DEFAULT_COMPLETION_TOKENS, body.logprobs
    )
    name = arrival.name or body.request_id or uuid.uuid4().hex
    writer = CompletionWriter(
        f"cmpl-{name}",
        model.name,
        _logprob_format(body, model, body.logprobs),
        echoes=_echoes(body, prompts, samplings, model),
        with_token_ids=bool(body.return_token_ids),
    )
    options = build_text_options(body, arrival.config.max_stop_strings)
    return Prepared(name, model, body, prompts, samplings, options, writer, arrival)


def template_ending(
    adds_prompt: bool | None, continues: bool | None, body: BaseModel
) -> tuple[bool, bool]:
    """How a rendered conversation ends. Going on with the last message excludes beginning a new one."""
    if continues and adds_prompt and "add_generation_prompt" in body.model_fields_set:
        raise InvalidRequest(
            "continue_final_message must be false when add_generation_prompt is true",
            param="continue_final_message",
        )
    return adds_prompt is not False and not continues, bool(continues)


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest(
            "top_logprobs is only allowed when logprobs is true", param="top_logprobs"
        )
    return None


def _logprob_format(
    body: SamplingBody, model: ServedModel, logprobs: int | None
) -> LogprobFormat | None:
    if logprobs is None:
        return None
    as_ids = bool(body.return_tokens_as_token_ids)
    return LogprobFormat(model.text.vocabulary, logprobs, as_ids=as_ids)


def _truncated(prompt: Prompt, body: SamplingBody, model: ServedModel) -> Prompt:
    """The end of the prompt, where the client asked to have it cut; -1 keeps what leaves room for one token."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    most = model.max_model_len - 1 if most == -1 else most
    if len(prompt.token_ids) <= most:
        return prompt
    kept = prompt.token_ids[len(prompt.token_ids) - most :]
    if not kept:
        raise InvalidRequest(
            "truncate_prompt_tokens must be -1 or at least 1, got 0", param="truncate_prompt_tokens"
        )
    return Prompt(kept)


def _samplings(
    body: SamplingBody,
    model: ServedModel,
    prompts: Sequence[Prompt],
    asked: int | None,
    default: int | None,
    logprobs: int | None,
) -> tuple[SamplingParams, ...]:
    """The sampling parameters of each prompt; they differ where the context limits what was not asked for."""
    made: dict[int, SamplingParams] = {}
    lengths = [
        resolve_max_tokens(asked, default, len(prompt.token_ids), model) for prompt in prompts
    ]
    for max_tokens in lengths:
        if max_tokens not in made:
            made[max_tokens] = build_sampling(body, model, max_tokens, logprobs)
    return tuple(made[max_tokens] for max_tokens in lengths)


def _echoes(
    body: CompletionBody,
    prompts: Sequence[Prompt],
    samplings: Sequence[SamplingParams],
    model: ServedModel,
) -> tuple[str, ...]:
    """The text before each choice, by its index; empty when nothing is echoed."""
    if not body.echo:
        return ()
    texts = [
        model.text.decode(prompt.token_ids, skip_special=True)
        if prompt.text is None
        else prompt.text
        for prompt in prompts
    ]
    return tuple(
        text for text, sampling in zip(texts, samplings, strict=True) for _ in range(sampling.n)
    )
