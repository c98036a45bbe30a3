"""A client that leaves ends its request at once, on the worker and in every count."""

import asyncio
import json
import random
import socket

import httpx
import pytest

from tests.support.fake_worker import running_worker, say
from tests.support.gateways import CHAT, COMPLETION, Gateway, eventually, http_gateway

ENDLESS = say("one two three ", ends=False, delay_s=0.005)
LONG_PREFILL_S = 30.0


async def waits(request):
    """A long prefill: nothing comes for a long time."""
    await asyncio.sleep(LONG_PREFILL_S)
    yield []


async def begin(
    gateway: Gateway, path: str, body: dict
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1 << 24)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def check_idle(gateway: Gateway, *workers) -> None:
    """Every count is back at its idle value."""
    await eventually(lambda: gateway.state.num_inflight == 0, "nothing in flight")
    await eventually(lambda: not any(w.num_running for w in workers), "workers idle")
    ledger = gateway.state.router.ledger
    for worker in workers:
        connection = gateway.state.directory.connection(worker.info.id)
        assert connection.num_requests == 0
        assert ledger.num_requests(worker.info.id) == 0
    text = (await gateway.client.get("/metrics")).text
    assert "baton:inflight_requests 0.0" in text


@pytest.mark.public_case("B38")
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_during_the_prefill_frees_the_worker_at_once(stream):
    async with running_worker(waits) as worker, http_gateway(worker) as gateway:
        for number in range(20):
            _, writer = await begin(gateway, "/v1/chat/completions", CHAT | {"stream": stream})
            await eventually(lambda n=number: len(worker.submits) == n + 1, "submitted")
            writer.close()
            await eventually(lambda: worker.num_running == 0, "freed", timeout_s=1.0)
        await eventually(lambda: len(worker.cancelled) == 20, "every one cancelled")
        await check_idle(gateway, worker)
        metrics = (await gateway.client.get("/metrics")).text
        assert (
            'vllm:request_success_total{finished_reason="abort",model_name="fake"} 20.0' in metrics
        )


async def test_leaving_amid_a_stream_frees_the_worker_at_once():
    async with running_worker(ENDLESS) as worker, http_gateway(worker) as gateway:
        reader, writer = await begin(
            gateway, "/v1/completions", COMPLETION | {"stream": True, "max_tokens": 2000}
        )
        await reader.readuntil(b"two")
        writer.close()
        await eventually(lambda: worker.num_running == 0, "freed", timeout_s=1.0)
        await check_idle(gateway, worker)


async def test_leaving_ends_every_prompt_of_the_request():
    async with running_worker(ENDLESS) as worker, http_gateway(worker) as gateway:
        body = COMPLETION | {"prompt": ["one", "two", "three"], "max_tokens": 2000}
        _, writer = await begin(gateway, "/v1/completions", body)
        await eventually(lambda: worker.num_running == 3, "running")
        writer.close()
        await eventually(lambda: worker.num_running == 0, "freed", timeout_s=1.0)
        await check_idle(gateway, worker)


async def test_two_hundred_streams_of_which_a_third_leave_at_random():
    """Everyone who stays gets the whole text; afterwards nothing is held."""
    rng = random.Random(3)
    text = " ".join(["the capital of France is Paris"] * 8)
    script = say(text, tokens_a_step=2, delay_s=0.002)
    async with running_worker(script, "w1") as w1, running_worker(script, "w2") as w2:
        async with http_gateway(w1, w2) as gateway:
            limits = httpx.Limits(max_connections=None)
            url = f"http://127.0.0.1:{gateway.port}"
            async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:

                async def one(leaves_after: int | None) -> str:
                    body = COMPLETION | {"stream": True, "max_tokens": 500}
                    got = ""
                    async with client.stream("POST", "/v1/completions", json=body) as answer:
                        async for line in answer.aiter_lines():
                            if not line.startswith("data: {"):
                                continue
                            got += json.loads(line[6:])["choices"][0]["text"]
                            if leaves_after is not None and len(got) >= leaves_after:
                                return got
                    return got

                plans = [rng.randrange(len(text)) if n % 3 == 0 else None for n in range(200)]
                answers = await asyncio.gather(*map(one, plans))
            for plan, answer in zip(plans, answers, strict=True):
                assert answer == text if plan is None else text.startswith(answer)
            await check_idle(gateway, w1, w2)


async def test_too_many_at_once_is_a_429_and_passes():
    async with running_worker(ENDLESS) as worker:
        async with http_gateway(worker, max_inflight_requests=2) as gateway:
            running = [
                await begin(gateway, "/v1/completions", COMPLETION | {"max_tokens": 2000})
                for _ in range(2)
            ]
            await eventually(lambda: worker.num_running == 2, "running")
            answer = await gateway.complete(max_tokens=2)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert "the limit is 2" in answer.json()["error"]["message"]
            for _, writer in running:
                writer.close()
            await check_idle(gateway, worker)
            assert (await gateway.complete(max_tokens=2)).status_code == 200
            # A request of many prompts is not refused for its size alone.
            answer = await gateway.complete(prompt=["one"] * 5, max_tokens=2)
            assert answer.status_code == 200


async def test_a_client_that_reads_slowly_loses_nothing():
    async with running_worker(say("the capital of France ", ends=False)) as worker:
        async with http_gateway(worker) as gateway:
            body = COMPLETION | {"stream": True, "max_tokens": 1500}
            reader, writer = await begin(gateway, "/v1/completions", body)
            await eventually(lambda: worker.submits and not worker.num_running, "worker done")
            await asyncio.sleep(0.1)
            received = await reader.readuntil(b"[DONE]")
            assert received.count(b'"finish_reason":"length"') == 1
            writer.close()
            await check_idle(gateway, worker)


async def test_a_client_that_does_not_read_is_given_up(monkeypatch):
    """Its connection is full long before the time limit; nothing is held for it after that."""
    monkeypatch.setattr("services.gateway.openai.endpoints._READING_GRACE_S", 0.2)
    wide = "歪" * 40
    script = say(wide, ends=False, tokens_a_step=50)
    async with running_worker(script, max_model_len=10_000) as worker:
        async with http_gateway(worker, request_timeout_s=2.5) as gateway:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", gateway.port))
            body = COMPLETION | {"stream": True, "max_tokens": 9000, "logprobs": 20, "n": 3}
            data = json.dumps(body | {"temperature": 1}).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\n\r\n"
            )
            await asyncio.get_running_loop().sock_sendall(client, head.encode() + data)
            await eventually(lambda: worker.submits and not worker.num_running, "worker done")
            assert gateway.state.num_inflight == 1
            await check_idle(gateway, worker)
            client.close()
