"""A gateway over fake workers: on a real port, or without one through the ASGI interface."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from kvindex.base import PrefixIndex
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from services.gateway.main import serve_gateway
from services.gateway.state import GatewayState
from tests.support.fake_worker import FakeWorker

CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "fake", "prompt": "one two three", "temperature": 0}


@dataclass
class Gateway:
    """What a test needs of a running gateway."""

    state: GatewayState
    client: httpx.AsyncClient
    port: int = 0

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=CHAT | fields)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json=COMPLETION | fields)

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream; fails unless it ends with [DONE]."""
        answer = await self.client.post(path, json=body | {"stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return chunks_of(answer.text)

    async def wait_for(
        self, holds: Callable[[], Any], what: str = "", timeout_s: float = 5.0
    ) -> None:
        await eventually(holds, what, timeout_s)

    async def wait_for_workers(self, count: int) -> None:
        await eventually(
            lambda: len(self.state.directory.live_workers()) == count, f"{count} workers"
        )


def chunks_of(text: str) -> list[dict[str, Any]]:
    import json

    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def eventually(holds: Callable[[], Any], what: str = "", timeout_s: float = 15.0) -> None:
    ends_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends_at, f"did not become true: {what}"
        await asyncio.sleep(0.005)


def gateway_config(*workers: FakeWorker, **changes: Any) -> GatewayConfig:
    fields: dict[str, Any] = {
        "port": 0,
        "seeds": tuple(worker.address for worker in workers),
        "seed_interval_ms": 50,
        "poll_interval_ms": 20,
        "drain_timeout_s": 0.5,
    }
    return GatewayConfig(**(fields | changes))


@asynccontextmanager
async def asgi_gateway(
    *workers: FakeWorker, index: PrefixIndex | None = None, **changes: Any
) -> AsyncIterator[Gateway]:
    """No port: requests go straight into the application. Bodies arrive whole, so no streaming is seen."""
    state = GatewayState(gateway_config(*workers, **changes), index)
    state.start()
    transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            gateway = Gateway(state, client)
            await gateway.wait_for_workers(len(workers))
            yield gateway
    finally:
        await state.close()


@asynccontextmanager
async def http_gateway(
    *workers: FakeWorker, index: PrefixIndex | None = None, **changes: Any
) -> AsyncIterator[Gateway]:
    """A real HTTP service on a free port."""
    config = gateway_config(*workers, **changes)
    async with serve_gateway(config, index) as (port, state):
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            gateway = Gateway(state, client, port)
            await gateway.wait_for_workers(len(workers))
            yield gateway
