"""A client that costs the measured server little: it keeps what arrives with its time and reads it afterwards.

One asyncio protocol a stream with a C parser of HTTP; no work a token but an append, since client and server share
the machine's cores.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import httptools

from benchmarks.peers.timeline import Timeline

TIMEOUT_S = 600.0
Event = Mapping[str, Any]
ReadEvent = Callable[[Event], tuple[int, Sequence[int]]]
"""An event of a server's stream -> (tokens told so far or 0 to add up the ids, ids of the tokens that are new)."""


class ServerRefusedError(RuntimeError):
    """A server answered with another status than 200."""


class _Answer(asyncio.Protocol):
    """Collects (time, bytes of the body) until the response ends."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self.chunks: list[tuple[float, bytes]] = []
        self.sent_s = 0.0
        self._request = request
        self._done = done
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def send(self) -> None:
        self.sent_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.chunks.append((self._now_s - self.sent_s, body))

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if not self._done.done():
            if status == 200:
                self._done.set_result(None)
            else:
                text = b"".join(body for _, body in self.chunks)[:500]
                self._done.set_exception(ServerRefusedError(f"status {status}: {text!r}"))
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("closed within an answer"))


async def stream_all(
    port: int, path: str, bodies: Sequence[Mapping[str, Any]], read_event: ReadEvent
) -> list[Timeline]:
    """Send all bodies at once, each on its own connection, and follow the streams to their ends."""
    loop = asyncio.get_running_loop()
    waits: list[asyncio.Future[None]] = [loop.create_future() for _ in bodies]
    answers = []
    for body, done in zip(bodies, waits, strict=True):
        request = _request(port, path, json.dumps(body).encode())
        answer = _Answer(request, done)
        await loop.create_connection(partial(_same, answer), "127.0.0.1", port)
        answers.append(answer)
    started = time.perf_counter()
    for answer in answers:
        answer.send()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*waits)
    # Streams sent together share one origin: the moment before the first was sent.
    return [
        read_timeline(
            [(at + answer.sent_s - started, body) for at, body in answer.chunks], read_event
        )
        for answer in answers
    ]


def read_timeline(chunks: Sequence[tuple[float, bytes]], read_event: ReadEvent) -> Timeline:
    """The timeline of a stream of server-sent events that arrived as these pieces."""
    times: list[float] = []
    counts: list[int] = []
    token_ids: list[int] = []
    for at_s, event in _events(chunks):
        told, new_ids = read_event(event)
        token_ids += new_ids
        count = told or len(token_ids)
        if count > (counts[-1] if counts else 0):
            times.append(at_s)
            counts.append(count)
    return Timeline(tuple(times), tuple(counts), tuple(token_ids))


def _events(chunks: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, Event]]:
    """JSON events with the time at which the last byte of each had come."""
    rest = b""
    for at_s, body in chunks:
        *lines, rest = (rest + body).split(b"\n")
        for line in lines:
            text = line.strip()
            if text.startswith(b"data:") and not text.endswith(b"[DONE]"):
                yield at_s, json.loads(text[5:])


def _same(answer: _Answer) -> _Answer:
    return answer


def _request(port: int, path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
