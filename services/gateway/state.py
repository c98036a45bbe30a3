"""Everything one gateway holds: made once, closed once.

The order of closing is that of dependence: no new requests, running ones to their end, then workers and index.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from core.errors import ModelNotFound, OverloadedError
from core.ids import Epoch
from core.worker_info import Role
from kvindex.base import PrefixIndex
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
        self.router = Router(config, index, self.directory.live_workers, self.metrics, epoch)
        self.generation = GenerationServices(
            router=self.router,
            driver=DecodeOwnedDriver(self.directory.connection),
            metrics=self.metrics,
            max_retries=config.max_retries,
        )
        self.num_inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    def start(self) -> None:
        """Begin to look for workers."""
        self.directory.start()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests and wait for the running ones, for at most `timeout_s`."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

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

    def model(self, name: str | None) -> ServedModel:
        """The model that a request names, or the only or first one where it names none."""
        models = self.directory.models()
        if name is None and models:
            return models[min(models)]
        found = models.get(name or "")
        if found is not None:
            return found
        if models and not self.directory.was_served(name or ""):
            raise ModelNotFound(f"The model `{name}` does not exist.", param="model")
        raise OverloadedError(
            "no live worker serves this model now" if models else "no worker is ready yet"
        )

    def admit(self, num_prompts: int) -> Admission:
        """Room for these prompts; TooManyRequests when there is none. A lone large request is admitted."""
        if self.is_draining:
            raise OverloadedError("this gateway is shutting down")
        limit = self.config.max_inflight_requests
        if self.num_inflight and self.num_inflight + num_prompts > limit:
            raise TooManyRequests(
                f"{self.num_inflight} requests are in flight here; the limit is {limit}"
            )
        self.count_inflight(num_prompts)
        return Admission(self, num_prompts)

    def count_inflight(self, num_prompts: int) -> None:
        """Prompts that began, or ended when negative."""
        self.num_inflight += num_prompts
        if self.num_inflight:
            self._idle.clear()
        else:
            self._idle.set()


class Admission:
    """Room that a request takes until `release`."""

    def __init__(self, state: GatewayState, num_prompts: int) -> None:
        self._state = state
        self._num_prompts = num_prompts

    def release(self) -> None:
        """Give the room back. Idempotent."""
        num_prompts, self._num_prompts = self._num_prompts, 0
        if num_prompts:
            self._state.count_inflight(-num_prompts)
