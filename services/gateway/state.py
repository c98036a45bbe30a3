"""Everything one gateway holds: made once, closed once.

The order of closing is that of dependence: no new requests, running ones to their end, then workers and index.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from core.errors import ModelNotFound, OverloadedError, ServeError
from core.ids import Epoch
from core.worker_info import Role
from kvindex.base import PrefixIndex
from services.gateway.asgi import BodyReader
from services.gateway.config import GatewayConfig
from services.gateway.discovery import WorkerDirectory
from services.gateway.generation import GenerationServices
from services.gateway.http_errors import TooManyRequests
from services.gateway.legs.connection import GatewayIdentity
from services.gateway.legs.decode_owned import DecodeOwnedDriver
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import ServedModel
from services.gateway.routing.router import Router

_EPOCH_BITS = 63


class GatewayState:
    """One gateway's parts, and its admission of requests. index: None serves from seeds alone."""

    def __init__(self, config: GatewayConfig, index: PrefixIndex | None) -> None:
        epoch = Epoch(int.from_bytes(os.urandom(8), "little") >> (64 - _EPOCH_BITS))
        gateway_id = config.gateway_id or f"{socket.gethostname()}-{epoch & 0xFFFF:04x}"
        self.config = config
        self.index = index
        self.metrics = GatewayMetrics()
        self.directory = WorkerDirectory(config, index, GatewayIdentity(gateway_id, epoch))
        self.router = Router(config, index, self.directory, self.metrics, epoch)
        self.generation = GenerationServices(
            router=self.router,
            driver=DecodeOwnedDriver(self.directory.connection),
            metrics=self.metrics,
        )
        self.num_inflight = 0
        self.bodies = BodyReader(config.max_body_bytes, config.body_timeout_s)
        self._admissions: set[Admission] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    def start(self) -> None:
        """Begin to look for workers."""
        self.directory.start()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests and wait for the running ones; end those that are left after `timeout_s`."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        for admission in list(self._admissions):
            admission.cancel(OverloadedError("this gateway is shutting down"))

    async def close(self) -> None:
        """Give everything back."""
        await self.router.close()
        await self.directory.close()
        if self.index is not None:
            await self.index.close()

    def render_metrics(self) -> bytes:
        """The metrics as of now."""
        metrics, workers = self.metrics, self.directory.known_workers()
        metrics.inflight.set(self.num_inflight)
        metrics.index_connected.set(self.directory.index_is_connected)
        metrics.worker_inflight.clear()
        live_roles = [info.role for _, is_live, info, _ in workers if is_live and info is not None]
        for role in Role:
            metrics.workers.labels(role.value).set(live_roles.count(role))
        for worker_id, _, _, num_requests in workers:
            metrics.worker_inflight.labels(worker_id).set(num_requests)
        for name in self.directory.models():
            metrics.model(name)
        return metrics.render()

    def model_resolver(self) -> Callable[[str | None], ServedModel]:
        """What finds the model that a request names, the first served one for none; works in any thread."""
        models, was_served = self.directory.models(), self.directory.was_served

        def resolve(name: str | None) -> ServedModel:
            if name is None and models:
                return next(iter(models.values()))
            found = models.get(name or "")
            if found is not None:
                return found
            if models and not was_served(name or ""):
                raise ModelNotFound(f"The model `{name}` does not exist.", param="model")
            raise OverloadedError(
                "no live worker serves this model now" if models else "no worker is ready yet"
            )

        return resolve

    def admit(self, num_prompts: int) -> Admission:
        """Room for these prompts, or the error of `check_room`. A lone large request is admitted."""
        self.check_room(num_prompts)
        admission = Admission(num_prompts, self._release)
        self._admissions.add(admission)
        self.num_inflight += num_prompts
        self._idle.clear()
        return admission

    def check_room(self, num_prompts: int) -> None:
        """OverloadedError while this gateway ends, TooManyRequests when these prompts would be too many."""
        if self.is_draining:
            raise OverloadedError("this gateway is shutting down")
        limit = self.config.max_inflight_requests
        if self.num_inflight and self.num_inflight + num_prompts > limit:
            raise TooManyRequests(
                f"{self.num_inflight} requests are in flight here; the limit is {limit}"
            )

    def _release(self, admission: Admission) -> None:
        if admission in self._admissions:
            self._admissions.remove(admission)
            self.num_inflight -= admission.num_prompts
            if not self.num_inflight:
                self._idle.set()


class Admission:
    """Room that a request takes until `release`. cancel: how to end it early, once it has begun."""

    def __init__(self, num_prompts: int, release: Callable[[Admission], None]) -> None:
        self.num_prompts = num_prompts
        self.cancel: Callable[[ServeError], None] = lambda _: None
        self._release = release

    def release(self) -> None:
        """Give the room back. Idempotent."""
        self._release(self)
