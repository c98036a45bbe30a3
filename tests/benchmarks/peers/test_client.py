"""The streaming client against a server of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from benchmarks.peers.client import ServerRefusedError, stream_all

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


async def serve(handler: Handler) -> tuple[asyncio.Server, int]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def test_two_streams_share_one_origin_of_time() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + chunk(b'data: {"ids": [7]}\n\ndata: {"i'))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(chunk(b'ds": [8, 9]}\n\n') + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server, port = await serve(handler)
    async with server:
        lines = await stream_all(port, "/x", [{}, {}], lambda event: (0, event["ids"]))
    assert [line.token_ids for line in lines] == [(7, 8, 9), (7, 8, 9)]
    assert all(line.counts == (1, 3) for line in lines)
    assert all(line.last_s - line.first_s > 0.03 for line in lines)


async def test_a_refusal_is_told_with_its_text() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 8\r\n\r\ntoo long")
        await writer.drain()
        writer.close()

    server, port = await serve(handler)
    async with server:
        with pytest.raises(ServerRefusedError, match=r"400.*too long"):
            await stream_all(port, "/x", [{}], lambda event: (0, ()))


async def test_a_connection_that_closes_within_an_answer_is_an_error() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + chunk(b'data: {"ids": [7]}\n\n'))
        await writer.drain()
        writer.close()

    server, port = await serve(handler)
    async with server:
        with pytest.raises(ConnectionError):
            await stream_all(port, "/x", [{}], lambda event: (0, event["ids"]))
