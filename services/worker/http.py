"""A small HTTP endpoint for /metrics and /health: GET only, one request a connection, no framework.

A scraper and a health probe need no more, and a worker starts faster without one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

REQUEST_TIMEOUT_S = 10.0
_MAX_HEAD_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Answer:
    """What a page answers."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "application/json"


Page = Callable[[], Answer]


class HttpEndpoint:
    """Serves a fixed set of pages. Start it, read `port`, close it."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self, host: str, port: int) -> None:
        """Begin to listen; OSError when the port is taken."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.write(_encode(self._answer(head)))
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _answer(self, head: bytes) -> Answer:
        method, _, rest = head.decode("latin-1").partition(" ")
        path = rest.split(" ", 1)[0].split("?", 1)[0]
        if method != "GET":
            return Answer(b'{"error": "only GET is served here"}', HTTPStatus.METHOD_NOT_ALLOWED)
        page = self._pages.get(path)
        if page is None:
            return Answer(b'{"error": "no such page"}', HTTPStatus.NOT_FOUND)
        return page()


def _encode(answer: Answer) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + answer.body
