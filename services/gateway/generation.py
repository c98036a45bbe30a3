"""One engine request from route to last token: submitted, continued elsewhere when its worker is lost, measured.

Owns the request's place on a worker's stream and in the ledger, and gives both back when its stream of deltas ends,
however it ends. Never repeats a token and never leaves one out: the next worker is given what was given out.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from core.errors import EngineDeadError, OverloadedError, ServeError, WorkerLostError
from core.ids import WorkerId
from core.request import Request
from services.gateway.choice import ChoiceAssembler, ChoiceDelta, TextOptions
from services.gateway.http_errors import ClientGone
from services.gateway.legs.base import ActiveRequest, LegsDriver
from services.gateway.metrics import GatewayMetrics, ModelMetrics
from services.gateway.models import ServedModel
from services.gateway.routing.router import RoutedRequest, Router
from services.rpc.status import error_of_kind
from services.rpc.v1 import baton_pb2 as pb

_RETRYABLE = (WorkerLostError, EngineDeadError)


@dataclass(frozen=True, slots=True)
class GenerationServices:
    """What every generation uses."""

    router: Router
    driver: LegsDriver
    metrics: GatewayMetrics


class Losses:
    """Workers that one client's request has lost, over all its prompts and tries: one budget for all of them."""

    def __init__(self, max_retries: int) -> None:
        self.workers: set[WorkerId] = set()
        self.first_error: ServeError | None = None
        self._max_retries = max_retries

    def note(self, worker: WorkerId, error: ServeError) -> None:
        """A worker is lost; the first error is what the client is told when no other can be found."""
        self.workers.add(worker)
        self.first_error = self.first_error or error

    @property
    def may_retry(self) -> bool:
        """Whether another worker may be tried."""
        return len(self.workers) <= self._max_retries


class Generation:
    """The deltas of one request. Read by one task, once."""

    def __init__(
        self,
        services: GenerationServices,
        model: ServedModel,
        request: Request,
        options: TextOptions,
        arrived_at: float,
        losses: Losses,
    ) -> None:
        """losses: shared by all generations of the client's request."""
        self.request = request
        self._begun_at = time.monotonic()
        self._losses = losses
        self.num_cached_tokens = 0
        self._services = services
        self._model = model
        self._metrics = RequestMetrics(services.metrics.model(request.model), request, arrived_at)
        self._active: ActiveRequest | None = None
        self._has_output = False  # of the worker that has the request now
        self._cancelled: ServeError | None = None
        vocabulary = model.text.vocabulary
        self._assemblers = [
            ChoiceAssembler(choice, vocabulary, options) for choice in range(request.sampling.n)
        ]

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(assembler.num_tokens for assembler in self._assemblers)

    def cancel(self, error: ServeError | None = None) -> None:
        """End the deltas with `error` (the client is gone, say) and the work on the worker, now."""
        self._cancelled = error or ClientGone("the client closed its connection")
        if self._active is not None:
            self._active.fail(self._cancelled)

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """What each wake-up brought, until every choice has ended."""
        while True:
            routed = await self._route()
            try:
                async for deltas in self._attempt(routed):
                    yield deltas
                return
            except _RETRYABLE as error:
                self._losses.note(routed.route.owner.info.id, error)
                if not self._losses.may_retry:
                    self._metrics.failed("error")
                    raise
                self._services.metrics.retries.inc()
            except ServeError as error:
                self._metrics.failed("abort" if isinstance(error, ClientGone) else "error")
                raise
            finally:
                routed.end()

    async def _route(self) -> RoutedRequest:
        if self._cancelled is not None:
            raise self._cancelled
        if self._losses.workers:
            self.request = self._continued()
        try:
            return await self._services.router.route(
                self.request, self._model.bundle_digest, excluded=self._losses.workers
            )
        except OverloadedError:
            if self._losses.first_error is not None:
                raise self._losses.first_error from None
            raise

    def _continued(self) -> Request:
        """The request as the next worker must see it: with the tokens and the time that it has had."""
        request, deadline_ms = self.request, self.request.deadline_ms
        if deadline_ms is not None:
            now = time.monotonic()
            deadline_ms = max(0, deadline_ms - int(1000 * (now - self._begun_at)))
            self._begun_at = now
        outputs = tuple(tuple(assembler.token_ids) for assembler in self._assemblers)
        return replace(request, deadline_ms=deadline_ms, output_token_ids=outputs)

    async def _attempt(self, routed: RoutedRequest) -> AsyncGenerator[list[ChoiceDelta], None]:
        """Run the request on one route."""
        if self._cancelled is not None:
            raise self._cancelled
        route = routed.route
        self._has_output = False
        num_open = sum(not assembler.is_finished for assembler in self._assemblers)
        active = self._active = self._services.driver.start(
            self.request, route.owner.info, [candidate.info for candidate in route.prefill]
        )
        try:
            while num_open:
                outputs = await active.receive()
                deltas, error = self._assemble_all(outputs, routed)
                num_open -= sum(bool(delta.finish_reason) for delta in deltas)
                if deltas:
                    self._metrics.stepped(deltas, self._assemblers, self.num_cached_tokens)
                    if not num_open:
                        active.close("stop string")
                    yield deltas
                if error is not None:
                    raise error
        finally:
            self._active = None
            active.close("client is gone")

    def _assemble_all(
        self, outputs: Sequence[pb.ChoiceOutput], routed: RoutedRequest
    ) -> tuple[list[ChoiceDelta], ServeError | None]:
        """The deltas of one wake-up, and the error that stood behind them: what came before it counts as given."""
        deltas: list[ChoiceDelta] = []
        for output in outputs:
            try:
                delta = self._assemble(output, routed)
            except ServeError as error:
                return deltas, error
            if delta is not None:
                deltas.append(delta)
        return deltas, None

    def _assemble(self, output: pb.ChoiceOutput, routed: RoutedRequest) -> ChoiceDelta | None:
        assembler = self._assemblers[output.choice]
        if assembler.is_finished:  # by a stop string, which the worker knows nothing of
            return None
        if output.finish_reason == "error":
            raise error_of_kind(output.error_kind, output.error_message)
        if output.finish_reason == "abort":  # nobody here has asked for that
            raise WorkerLostError("the worker gave the request up")
        if output.token_ids and not self._has_output:
            self._has_output = True
            routed.prompt_computed()
        if output.HasField("num_cached_tokens"):
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.timestamps_ms and not output.choice:
            self._services.metrics.moments(self.request.model, output.timestamps_ms)
        return assembler.push(output)


class RequestMetrics:
    """The latencies and counts of one request."""

    def __init__(self, metrics: ModelMetrics, request: Request, arrived_at: float) -> None:
        self._metrics = metrics
        self._request = request
        self._arrived_at = arrived_at
        self._first_at = 0.0
        self._has_second = False
        self._last_at = [0.0] * request.sampling.n

    def stepped(
        self,
        deltas: Sequence[ChoiceDelta],
        assemblers: Sequence[ChoiceAssembler],
        num_cached_tokens: int,
    ) -> None:
        """Count one wake-up's deltas."""
        now = time.monotonic()
        metrics = self._metrics
        if not self._first_at:
            self._first_at = now
            metrics.time_to_first_token.observe(now - self._arrived_at)
            self._count_prompt(num_cached_tokens)
        if not self._has_second and assemblers[0].num_tokens > 1:
            self._has_second = True
            metrics.time_to_second_token.observe(now - self._arrived_at)
        for delta in deltas:
            metrics.generation_tokens.inc(len(delta.token_ids))
            last_at = self._last_at[delta.choice]
            if last_at and delta.token_ids:
                metrics.inter_token_latency.observe(now - last_at)
            self._last_at[delta.choice] = now
            if delta.finish_reason:
                self._finished(delta.finish_reason, assemblers[delta.choice].num_tokens, now)

    def failed(self, reason: str) -> None:
        """Count a request that ended with an error or without a reader."""
        self._metrics.finished[reason].inc()

    def _count_prompt(self, num_cached_tokens: int) -> None:
        metrics, sampling = self._metrics, self._request.sampling
        num_prompt_tokens = len(self._request.prompt_token_ids)
        metrics.prompt_tokens.inc(num_prompt_tokens)
        metrics.prompt_tokens_cached.inc(num_cached_tokens)
        metrics.request_prompt_tokens.observe(num_prompt_tokens)
        metrics.request_max_tokens.observe(sampling.max_tokens)
        metrics.request_n.observe(sampling.n)

    def _finished(self, reason: str, num_tokens: int, now: float) -> None:
        metrics = self._metrics
        metrics.finished.get(reason, metrics.finished["error"]).inc()
        metrics.e2e_latency.observe(now - self._arrived_at)
        metrics.request_generation_tokens.observe(num_tokens)
        if num_tokens > 1:
            metrics.time_per_output_token.observe((now - self._first_at) / (num_tokens - 1))
