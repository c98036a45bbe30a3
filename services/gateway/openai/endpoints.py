"""POST /v1/chat/completions and /v1/completions: a prepared request becomes a job, a job an answer."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from core.ids import RequestId
from core.request import Request
from services.gateway.asgi import EventStream, JsonResponse, cancel_on_disconnect
from services.gateway.generation import Generation, Losses
from services.gateway.openai.job import Job
from services.gateway.openai.prepare import (
    Arrival,
    Prepared,
    Resolver,
    prepare_chat,
    prepare_completion,
)
from services.gateway.openai.protocol import SamplingBody
from services.gateway.openai.stream import UsageWish, events
from services.gateway.state import Admission, GatewayState

_Result = TypeVar("_Result")

_LONGEST_NAME = 256
_READING_GRACE_S = 30.0
"""How long after a request's time limit a client may still be reading what was sent."""
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_LONG_BODY_BYTES = 32 << 10
"""Bodies from this size on are parsed and tokenised in a thread, so that other streams go on meanwhile."""


async def chat_completions(state: GatewayState, http: HttpRequest) -> Response:
    """POST /v1/chat/completions."""
    return await _answer(state, http, prepare_chat)


async def completions(state: GatewayState, http: HttpRequest) -> Response:
    """POST /v1/completions."""
    return await _answer(state, http, prepare_completion)


async def read_checked(
    state: GatewayState, http: HttpRequest, prepare: Callable[[bytes, Resolver], _Result]
) -> _Result:
    """Read the body and run `prepare` over it, in a thread where it may take long."""
    data = await state.bodies.read(http)
    resolve = state.model_resolver()
    if len(data) < _LONG_BODY_BYTES:
        return prepare(data, resolve)
    return await asyncio.to_thread(prepare, data, resolve)


async def _answer(
    state: GatewayState,
    http: HttpRequest,
    prepare: Callable[[bytes, Resolver, Arrival], Prepared],
) -> Response:
    arrival = Arrival(
        state.config,
        name=http.headers.get("x-request-id", "")[:_LONGEST_NAME],
        trace_parent=_trace_parent(http),
        at=time.monotonic(),
    )
    state.check_room(1)
    prepared = await read_checked(
        state, http, lambda data, resolve: prepare(data, resolve, arrival)
    )
    admission = state.admit(len(prepared.prompts))
    try:
        if prepared.body.stream:
            return await _stream(state, http, prepared, admission)
        return await _whole(state, http, prepared, admission)
    finally:
        if not prepared.body.stream:
            admission.release()


async def _whole(
    state: GatewayState, http: HttpRequest, prepared: Prepared, admission: Admission
) -> Response:
    """An answer in one piece."""
    job = _make_job(state, prepared, Losses(state.config.max_retries))
    admission.cancel = job.cancel
    async with cancel_on_disconnect(http.receive, job.cancel):
        choices = await job.collect()
    return JsonResponse(prepared.writer.whole(choices, job.usage()))


async def _stream(
    state: GatewayState, http: HttpRequest, prepared: Prepared, admission: Admission
) -> Response:
    """A stream whose first event is there, or the error that came instead."""
    job = _make_job(state, prepared, Losses(state.config.max_retries))
    admission.cancel = job.cancel
    pieces = events(job, prepared.writer, _usage_wish(prepared.body, state))
    try:
        async with cancel_on_disconnect(http.receive, job.cancel):
            first = await anext(pieces)
    except BaseException:
        await pieces.aclose()
        admission.release()
        raise
    timeout_s = state.config.request_timeout_s
    return EventStream(
        first,
        pieces,
        cancel=job.cancel,
        done=admission.release,
        limit_s=timeout_s + _READING_GRACE_S if timeout_s else None,
    )


def _usage_wish(body: SamplingBody, state: GatewayState) -> UsageWish:
    options = body.stream_options
    forced = state.config.enable_force_include_usage
    at_end = forced or (options is not None and bool(options.include_usage))
    always = forced or (options is not None and bool(options.continuous_usage_stats))
    return UsageWish(at_end, at_end and always)


def _make_job(state: GatewayState, prepared: Prepared, losses: Losses) -> Job:
    """Fresh generations. Their ids are unique in the cluster, whatever the client called its request."""
    run = f"{prepared.name}-{uuid.uuid4().hex[:12]}"
    timeout_s = state.config.request_timeout_s
    deadline_ms = None
    if timeout_s:
        deadline_ms = max(0, int(1000 * (prepared.arrival.at + timeout_s - time.monotonic())))
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
            trace_parent=prepared.arrival.trace_parent,
        )
        generations.append(
            Generation(
                state.generation,
                prepared.model,
                request,
                prepared.options,
                prepared.arrival.at,
                losses,
            )
        )
    return Job(generations)


def _trace_parent(http: HttpRequest) -> str:
    """The W3C traceparent header, if it is one."""
    value = http.headers.get("traceparent", "")
    return value if _TRACE_PARENT.fullmatch(value) else ""
