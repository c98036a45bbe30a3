"""Request bodies: how large, how long, how deep; and what is refused before it is read."""

import asyncio
import gc
import json
import time

import psutil
import pytest

from core.errors import InvalidRequest
from services.gateway.openai.protocol import CompletionBody
from services.gateway.openai.validation import parse_body
from tests.support.fake_worker import running_worker, say
from tests.support.gateways import CHAT, COMPLETION, Gateway, http_gateway

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MIB = 1 << 20


async def send(
    gateway: Gateway, head: str, *pieces: bytes, pause_s: float = 0.0
) -> tuple[int, dict]:
    """Status and body of a hand-made request; sending stops when the answer comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1 << 24)
    writer.write(head.encode() + b"\r\n")
    reading = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    for piece in pieces:
        if reading.done():
            break
        try:
            writer.write(piece)
            await writer.drain()
        except ConnectionError:
            break
        await asyncio.sleep(pause_s)
    answer = (await reading).decode()
    length = int(answer.lower().split("content-length: ")[1].split("\r\n")[0])
    body = json.loads(await reader.readexactly(length))
    writer.close()
    return int(answer.split()[1]), body


def chat_body(num_bytes: int) -> bytes:
    return json.dumps(CHAT | {"messages": [{"role": "user", "content": "a" * num_bytes}]}).encode()


@pytest.mark.public_case("B62")
@pytest.mark.parametrize("size_mib", [1, 3, 40])
async def test_bodies_below_the_limit_are_handled(size_mib):
    """Too long for the model is the model's limit, and said so; it is no 413."""
    async with running_worker(say("x")) as worker, http_gateway(worker) as gateway:
        answer = await gateway.client.post(
            "/v1/chat/completions",
            content=chat_body(size_mib * MIB),
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.public_case("B62")
async def test_a_long_prompt_that_fits_is_served():
    text = "one two three " * 220_000
    async with running_worker(say("x"), max_model_len=3_000_000) as worker:
        async with http_gateway(worker) as gateway:
            answer = await gateway.chat(messages=[{"role": "user", "content": text}], max_tokens=1)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens"] > 500_000


def test_punctuation_inside_a_long_text_counts_for_nothing():
    text = 'say "[" ' * 1000 + "[1,2],{3:4}," * 300_000
    body = parse_body(json.dumps(COMPLETION | {"prompt": text}).encode(), CompletionBody)
    assert body.prompt == text
    with pytest.raises(InvalidRequest, match="at most 1000000 JSON elements"):
        parse_body(json.dumps(COMPLETION | {"prompt": [1, 2] * 600_000}).encode(), CompletionBody)


@pytest.mark.public_case("B62")
async def test_a_declared_body_above_the_limit_is_refused_unread():
    async with running_worker(say("x")) as worker, http_gateway(worker) as gateway:
        status, body = await send(gateway, HEAD + f"Content-Length: {200 * MIB}\r\n")
        assert (status, body["error"]["code"]) == (413, "body_too_large")
        assert str(64 * MIB) in body["error"]["message"]


@pytest.mark.public_case("B62")
async def test_a_chunked_body_above_the_limit_is_cut_off():
    process = psutil.Process()
    piece = b"%x\r\n" % MIB + b" " * MIB + b"\r\n"
    async with running_worker(say("x")) as worker:
        async with http_gateway(worker, max_body_bytes=16 * MIB) as gateway:
            gc.collect()
            before = process.memory_info().rss
            status, body = await send(
                gateway, HEAD + "Transfer-Encoding: chunked\r\n", *[piece] * 200
            )
            assert (status, body["error"]["code"]) == (413, "body_too_large")
            assert process.memory_info().rss - before < 2 * 16 * MIB


@pytest.mark.public_case("B62")
async def test_a_slow_upload_is_cut_by_time():
    async with running_worker(say("x")) as worker:
        async with http_gateway(worker, body_timeout_s=0.3) as gateway:
            started = time.monotonic()
            status, body = await send(
                gateway, HEAD + "Content-Length: 1000\r\n", *[b" "] * 100, pause_s=0.05
            )
            assert (status, body["error"]["code"]) == (408, "request_timeout")
            assert time.monotonic() - started < 2


@pytest.mark.public_case("B62")
async def test_a_body_shorter_than_declared_holds_nothing():
    async with running_worker(say("x")) as worker, http_gateway(worker) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write((HEAD + "Content-Length: 1000\r\n\r\n").encode() + b"{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await gateway.chat()).status_code == 200
        assert gateway.state.num_inflight == 0


@pytest.mark.public_case("B62")
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"[" * 1_000_000, id="deep"),
        pytest.param(b'{"a":' * 100_000, id="deep objects"),
        pytest.param(b'{"messages":' + b"[" * 9999 + b"]" * 9999 + b"}", id="deep and closed"),
        pytest.param(json.dumps(CHAT | {"stop": ["x"] * 2000}).encode(), id="many stops"),
        pytest.param(
            json.dumps(CHAT | {"tools": [{"type": "function"}] * 100_000}).encode(), id="tools"
        ),
        pytest.param(
            json.dumps(CHAT | {"messages": CHAT["messages"] * 300_000}).encode(), id="messages"
        ),
        pytest.param(
            json.dumps({"model": "fake", "messages": [5] * 2_000_000}).encode(), id="elements"
        ),
        pytest.param(b"", id="nothing"),
        pytest.param(b"null", id="null"),
        pytest.param(b"7", id="number"),
        pytest.param(b'"x"', id="string"),
    ],
)
async def test_bodies_of_strange_shape_are_refused_soon(body):
    async with running_worker(say("x")) as worker, http_gateway(worker) as gateway:
        started = time.monotonic()
        answer = await gateway.client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
        assert "error" in answer.json()
        assert time.monotonic() - started < 5
        assert (await gateway.chat()).status_code == 200


@pytest.mark.public_case("B62")
async def test_compressed_bodies_are_refused_unread():
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with running_worker(say("x")) as worker, http_gateway(worker) as gateway:
        answer = await gateway.client.post("/v1/chat/completions", content=b"x", headers=headers)
        assert answer.status_code == 415
        assert "Content-Encoding" in answer.json()["error"]["message"]


@pytest.mark.public_case("B62")
async def test_short_requests_go_on_beside_a_long_one():
    """Long bodies are parsed and tokenised in a thread."""
    text = "one two three " * 220_000
    async with running_worker(say("x"), max_model_len=3_000_000) as worker:
        async with http_gateway(worker) as gateway:
            began = time.monotonic()
            long = asyncio.create_task(gateway.client.post("/tokenize", json={"prompt": text}))
            await asyncio.sleep(0.05)
            slowest = 0.0
            while not long.done():
                started = time.monotonic()
                answer = await gateway.client.post("/tokenize", json={"prompt": "hi"})
                assert answer.status_code == 200
                slowest = max(slowest, time.monotonic() - started)
            assert (await long).status_code == 200
            assert slowest < max(0.5, (time.monotonic() - began) / 2)


async def test_a_charset_beside_the_content_type_is_fine():
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    async with running_worker(say("x")) as worker, http_gateway(worker) as gateway:
        answer = await gateway.client.post(
            "/v1/chat/completions", content=json.dumps(CHAT), headers=headers
        )
        assert answer.status_code == 200


async def test_bodies_being_read_share_a_budget():
    async with running_worker(say("x")) as worker:
        async with http_gateway(worker, max_body_bytes=1 << 16, body_timeout_s=1) as gateway:
            half = b" " * (1 << 15)
            head = HEAD + f"Content-Length: {1 << 16}\r\n\r\n"
            slow = []
            for _ in range(8):
                _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                writer.write(head.encode() + half)
                await writer.drain()
                slow.append(writer)
            await asyncio.sleep(0.1)
            assert (await gateway.chat()).status_code == 429
            for writer in slow:
                writer.close()
            await gateway.wait_for(lambda: gateway.state.bodies._room_bytes == 4 << 16)
            assert (await gateway.chat()).status_code == 200
