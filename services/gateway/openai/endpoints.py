"""POST /v1/chat/completions and /v1/completions: from body to job to answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from core.errors import EngineDeadError, InvalidRequest, WorkerLostError
from core.ids import RequestId
from core.request import Request, SamplingParams
from services.gateway.asgi import EventStream, JsonResponse, cancel_on_disconnect, read_body
from services.gateway.choice import TextOptions
from services.gateway.generation import Generation
from services.gateway.http_errors import UnsupportedParameter
from services.gateway.models import ServedModel
from services.gateway.openai.job import Job
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
from services.gateway.openai.stream import UsageWish, events
from services.gateway.openai.unsupported import refuse_unsupported
from services.gateway.openai.validation import parse_body
from services.gateway.openai.writers import ChatWriter, CompletionWriter, Writer
from services.gateway.state import GatewayState

_Body = TypeVar("_Body", bound=BaseModel)
_Result = TypeVar("_Result")

_DEFAULT_COMPLETION_TOKENS = 16
_LONG_BODY_BYTES = 32 << 10
"""Bodies from this size on are parsed and tokenised in a thread, so that other streams go on meanwhile."""


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
    arrived_at: float


async def chat_completions(state: GatewayState, http: HttpRequest) -> Response:
    """POST /v1/chat/completions."""
    return await _answer(state, http, _prepare_chat)


async def completions(state: GatewayState, http: HttpRequest) -> Response:
    """POST /v1/completions."""
    return await _answer(state, http, _prepare_completion)


async def read_checked(
    state: GatewayState, http: HttpRequest, prepare: Callable[[bytes], _Result]
) -> _Result:
    """Read the body and run `prepare` over it, in a thread where it may take long."""
    config = state.config
    data = await read_body(http, config.max_body_bytes, config.body_timeout_s)
    if len(data) < _LONG_BODY_BYTES:
        return prepare(data)
    return await asyncio.to_thread(prepare, data)


async def _answer(
    state: GatewayState,
    http: HttpRequest,
    prepare: Callable[[GatewayState, bytes, str, float], Prepared],
) -> Response:
    arrived_at = time.monotonic()
    asked_name = http.headers.get("x-request-id", "")[:256]
    prepared = await read_checked(
        state, http, lambda data: prepare(state, data, asked_name, arrived_at)
    )
    admission = state.admit(len(prepared.prompts))
    try:
        if prepared.body.stream:
            return await _stream(state, http, prepared, admission.release)
        return await _whole(state, http, prepared)
    finally:
        if not prepared.body.stream:
            admission.release()


async def _whole(state: GatewayState, http: HttpRequest, prepared: Prepared) -> Response:
    """An answer in one piece. Nothing is sent before its end, so a lost worker costs time only."""
    for retries_left in range(state.config.max_retries, -1, -1):
        job = _make_job(state, prepared)
        try:
            async with cancel_on_disconnect(http.receive, job.cancel):
                choices = await job.collect()
            return JsonResponse(prepared.writer.whole(choices, job.usage()))
        except (WorkerLostError, EngineDeadError):
            if not retries_left:
                raise
            state.metrics.retries.inc()
    raise AssertionError("the last try returns or raises")


async def _stream(
    state: GatewayState, http: HttpRequest, prepared: Prepared, done: Callable[[], None]
) -> Response:
    """A stream whose first event is there, or the error that came instead."""
    job = _make_job(state, prepared)
    pieces = events(job, prepared.writer, _usage_wish(prepared.body, state))
    try:
        async with cancel_on_disconnect(http.receive, job.cancel):
            first = await anext(pieces)
    except BaseException:
        await pieces.aclose()
        done()
        raise
    return EventStream(first, pieces, job.cancel, done)


def _usage_wish(body: SamplingBody, state: GatewayState) -> UsageWish:
    options = body.stream_options
    forced = state.config.enable_force_include_usage
    at_end = forced or (options is not None and bool(options.include_usage))
    always = forced or (options is not None and bool(options.continuous_usage_stats))
    return UsageWish(at_end, at_end and always)


def _make_job(state: GatewayState, prepared: Prepared) -> Job:
    """Fresh generations. Their ids are unique in the cluster, whatever the client called its request."""
    run = f"{prepared.name}-{uuid.uuid4().hex[:12]}"
    timeout_s = state.config.request_timeout_s
    deadline_ms = None
    if timeout_s:
        deadline_ms = max(0, int(1000 * (prepared.arrived_at + timeout_s - time.monotonic())))
    generations = []
    for place, (prompt, sampling) in enumerate(
        zip(prepared.prompts, prepared.samplings, strict=True)
    ):
        request = Request(
            id=RequestId(f"{run}-{place}"),
            model=prepared.model.name,
            prompt_token_ids=tuple(prompt.token_ids),
            sampling=sampling,
            deadline_ms=deadline_ms,
            priority=prepared.body.priority or 0,
            cache_salt=prepared.body.cache_salt or "",
        )
        generations.append(
            Generation(
                state.generation, prepared.model, request, prepared.options, prepared.arrived_at
            )
        )
    return Job(generations)


# ---------------------------------------------------------------- from bytes to Prepared


def _prepare_chat(state: GatewayState, data: bytes, asked_name: str, arrived_at: float) -> Prepared:
    body = parse_body(data, ChatBody)
    refuse_unsupported(body.model_extra, is_chat=True)
    check_stream_options(body)
    messages = normalise_messages(body.messages, state.config.max_messages)
    variables = template_variables(body.chat_template_kwargs, body.reasoning_effort)
    adds_prompt, continues = template_ending(
        body.add_generation_prompt, body.continue_final_message, body
    )
    logprobs = _chat_logprobs(body)
    model = state.model(body.model)
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
    name = asked_name or body.request_id or uuid.uuid4().hex
    writer = ChatWriter(
        f"chatcmpl-{name}",
        model.name,
        _logprob_format(body, model, logprobs),
        with_token_ids=bool(body.return_token_ids),
    )
    options = build_text_options(body, state.config.max_stop_strings)
    return Prepared(name, model, body, prompts, samplings, options, writer, arrived_at)


def _prepare_completion(
    state: GatewayState, data: bytes, asked_name: str, arrived_at: float
) -> Prepared:
    body = parse_body(data, CompletionBody)
    refuse_unsupported(body.model_extra, is_chat=False)
    check_stream_options(body)
    if body.echo and body.logprobs is not None:
        raise UnsupportedParameter(
            "echo with logprobs is not supported: log-probabilities of the prompt are not served",
            param="echo",
        )
    model = state.model(body.model)
    read = read_prompts(
        body.prompt,
        model,
        add_special_tokens=body.add_special_tokens is not False,
        most=state.config.max_prompts,
        refuses_long=body.truncate_prompt_tokens is None,
    )
    prompts = tuple(_truncated(prompt, body, model) for prompt in read)
    samplings = _samplings(
        body, model, prompts, body.max_tokens, _DEFAULT_COMPLETION_TOKENS, body.logprobs
    )
    name = asked_name or body.request_id or uuid.uuid4().hex
    writer = CompletionWriter(
        f"cmpl-{name}",
        model.name,
        _logprob_format(body, model, body.logprobs),
        echoes=_echoes(body, prompts, samplings, model),
        with_token_ids=bool(body.return_token_ids),
    )
    options = build_text_options(body, state.config.max_stop_strings)
    return Prepared(name, model, body, prompts, samplings, options, writer, arrived_at)


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
