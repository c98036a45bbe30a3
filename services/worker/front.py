"""The front of a worker: owns the gRPC server, the engine process and all that lies between.

    STARTING  port bound, calls answer "still loading", health NOT_SERVING
    SERVING   engine ready, registered
    STOPPING  deregistered, new requests refused, running ones drained
    STOPPED   nothing left: no process, no port, no stream

An engine that dies takes its worker along: every stream ends with the reason, health says
NOT_SERVING, `run` raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from core.errors import ConfigError, EngineDeadError, ServeError, WorkerLostError
from core.worker_info import WorkerInfo, WorkerLoad
from engine.messages import (
    AnnouncePrefill,
    CallPrefill,
    DeclinePrefill,
    EndPrefill,
    EngineProgress,
    EngineReady,
    FirstTokens,
    GrantPrefill,
    RefusePrefill,
    RoomForPrefill,
    SnapshotTaken,
    StepDone,
    ToFront,
)
from services.rpc.channel import server_options
from services.rpc.v1 import baton_pb2 as pb
from services.rpc.v1 import baton_pb2_grpc as pb_grpc
from services.worker.config import WorkerConfig
from services.worker.engine_client import ENGINE_COMMAND, EngineClient
from services.worker.engine_watch import EngineWatch
from services.worker.gateway_streams import GatewayStreams
from services.worker.pages import WorkerPages
from services.worker.prefill_client import PrefillCalls
from services.worker.prefill_sessions import PrefillSessions
from services.worker.record import advertised_host, build_record
from services.worker.registration import Registration
from services.worker.service import WorkerService, WorkerState
from services.worker.snapshots import Snapshots
from services.worker.status_pipe import Listening, Progress, Ready, StatusPipe

LOAD_REPORT_INTERVAL_S = 0.5
STREAM_END_GRACE_S = 1.0
"""How long streams may take to carry their last frames away once the worker ends."""

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Worker"].full_name
_log = logging.getLogger(__name__)


class WorkerFront:
    """One worker. `start`, then `run` until it returns or raises, then `stop`; or `async with`."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        status: StatusPipe | None = None,
        engine_command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self._config = config
        self._status = status or StatusPipe()
        self._engine = EngineClient(config.engine, self._on_message, command=engine_command)
        self._state = WorkerState(
            GatewayStreams(self._engine.send),
            PrefillSessions(self._engine.send),
            Snapshots(self._engine.send),
        )
        self._calls: PrefillCalls | None = None
        self._pages = WorkerPages(self._state)
        self._registration: Registration | None = None
        self._watch = EngineWatch(
            config.engine_silence_ms, config.engine_death_ms, self._on_silence, self._engine.kill
        )
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=server_options())
        self.port = 0
        self._helpers: list[asyncio.Task[None]] = []
        self._stopped = False

    @property
    def info(self) -> WorkerInfo:
        """The record of this worker; raises while there is none."""
        return self._state.ready_info()

    @property
    def control_address(self) -> str:
        """Where others reach the control service."""
        return f"{advertised_host(self._config)}:{self.port}"

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine."""
        return self._engine.pid

    @property
    def metrics_port(self) -> int:
        """Port of the HTTP endpoint, -1 for none."""
        return self._pages.port

    async def start(self) -> None:
        """Bind, load, register. Raises the one error that explains why this worker cannot serve."""
        await self._listen()
        await self._engine.start()
        ready = await self._engine.wait_ready()
        info = build_record(self._config, self.port, ready)
        self._calls = PrefillCalls(self._engine.send, info, ready.transports)
        self._state.streams.models = frozenset((*info.models, *info.adapters))
        self._state.bundle = ready.bundle
        self._state.info = info
        self._registration = Registration(
            self._config.index, info, self._state.snapshots, lambda: not self._watch.is_silent
        )
        transports = ", ".join(offer.kind for offer in ready.transports)
        details = {"kernels": ready.kernels, "transports": transports}
        self._pages.begin(info, self._calls, self._registration, details)
        self._registration.start()
        self._helpers.append(asyncio.create_task(self._report_loads()))
        self._helpers.append(asyncio.create_task(self._watch.run()))
        await self._set_health(serving=True)
        self._status.send(Ready(info.id, list(info.models)))

    async def run(self) -> None:
        """Serve until the engine ends; raises EngineDeadError, or what it said, unless it was asked
        to stop.
        """
        error = await asyncio.shield(self._engine.ended)
        if error is not None:
            await self._fail(error)
            raise error

    async def stop(self) -> None:
        """End everything, bounded by drain_ms and a few seconds. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._state.streams.refuse(WorkerLostError("the worker is shutting down"))
        with contextlib.suppress(ServeError):
            await self._set_health(serving=False)
        for helper in self._helpers:
            helper.cancel()
        if self._registration is not None:
            await self._registration.close()
        await self._engine.stop(self._config.drain_ms)
        self._state.streams.fail(WorkerLostError("the worker is shutting down"))
        if self._calls is not None:
            await self._calls.close()
        await self._server.stop(STREAM_END_GRACE_S)
        await self._pages.close()

    async def __aenter__(self) -> WorkerFront:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def _listen(self) -> None:
        pb_grpc.add_WorkerServicer_to_server(WorkerService(self._state), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._set_health(serving=False)
        address = f"{self._config.host}:{self._config.port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError:
            raise ConfigError(f"--port: {address} cannot be bound; is it in use?") from None
        await self._server.start()
        await self._pages.listen(self._config.host, self._config.metrics_port)
        self._status.send(Listening(self.control_address, self._pages.port))

    async def _fail(self, error: ServeError) -> None:
        """The engine is dead: say so to everybody, now and until the process ends."""
        _log.error("%s", error)
        self._state.error = error
        lost = EngineDeadError(error.message)
        await self._set_health(serving=False)
        self._state.streams.fail(lost)
        self._state.sessions.fail(lost)
        self._state.snapshots.fail(lost)

    async def _set_health(self, *, serving: bool) -> None:
        value = health_pb2.HealthCheckResponse
        status = value.SERVING if serving else value.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def _report_loads(self) -> None:
        while True:
            await asyncio.sleep(LOAD_REPORT_INTERVAL_S)
            if not self._watch.is_silent:
                self._state.streams.report_load()

    def _on_silence(self) -> None:
        """Prompts that others wait for are better computed elsewhere."""
        silence_ms = self._config.engine_silence_ms
        self._state.sessions.fail(
            WorkerLostError(f"the engine has said nothing for more than {silence_ms} ms")
        )

    def _on_message(self, message: ToFront) -> None:
        self._watch.heard()
        match message:
            case StepDone():
                self._on_step(message)
            case AnnouncePrefill() | FirstTokens() | RefusePrefill():
                self._state.sessions.handle(message)
            case (
                CallPrefill() | GrantPrefill() | DeclinePrefill() | RoomForPrefill() | EndPrefill()
            ):
                assert self._calls is not None
                self._calls.handle(message)
            case SnapshotTaken():
                self._state.snapshots.handle(message)
            case EngineProgress():
                self._status.send(Progress(message.message))
            case EngineReady():
                self._status.send(Progress("engine ready"))

    def _on_step(self, step: StepDone) -> None:
        self._state.streams.deliver(step.outputs)
        # Requests that ended in this step are forgotten by now, so the load does not name them.
        load = self._named(step.load)
        self._state.streams.note_load(load)
        self._pages.note_step(step)
        if self._registration is not None:
            self._registration.note_step(step, load)

    def _named(self, load: WorkerLoad) -> WorkerLoad:
        """The load with the requests that it counts: what the front has passed on and not yet seen
        end.
        """
        return WorkerLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_blocks=load.num_free_blocks,
            waiting_prefill_tokens=load.waiting_prefill_tokens,
            named_request_ids=(*self._state.streams.names(), *self._state.sessions.names()),
        )
