"""Workers that die, freeze or refuse: who is asked next, and what the client sees."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvindex.memory import MemoryIndex
from services.rpc.v1 import baton_pb2 as pb
from tests.support.fake_worker import FakeWorker, output, refuse, running_worker, say
from tests.support.gateways import CHAT, COMPLETION, Gateway, chunks_of, eventually, http_gateway
from tests.support.text_bundles import small_tokenizer

TEXT = "one two three four the capital of France is Paris"
NUM_TEXT_TOKENS = len(small_tokenizer().encode(TEXT).ids) + 1  # EOS too


async def silence(request: pb.Request) -> AsyncIterator[list[pb.ChoiceOutput]]:
    """Takes the request and never says anything."""
    await asyncio.sleep(60)
    yield []


async def abort(request: pb.Request) -> AsyncIterator[list[pb.ChoiceOutput]]:
    yield [output(request, [], finish_reason="abort")]


async def open_stream(gateway: Gateway, body: dict[str, Any]) -> asyncio.Task[str]:
    async def read() -> str:
        answer = await gateway.client.post("/v1/completions", json=body | {"stream": True})
        assert answer.status_code == 200, answer.text
        return answer.text

    return asyncio.create_task(read())


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", []))


@pytest.mark.public_case("B39")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_worker_lost_before_the_first_token_is_replaced_unseen(stream):
    async with running_worker(say(TEXT), "w2") as w2:
        w1 = FakeWorker(silence, "w1")
        await w1.start()
        async with http_gateway(w1, w2) as gateway:
            asking = asyncio.create_task(gateway.complete(stream=stream, max_tokens=50))
            await eventually(lambda: w1.submits, "submitted to w1")
            await w1.stop()
            answer = await asking
            assert answer.status_code == 200
            text = (
                text_of(chunks_of(answer.text)) if stream else answer.json()["choices"][0]["text"]
            )
            assert text == TEXT
            assert (
                "baton:requests_rerouted_total 1.0" in (await gateway.client.get("/metrics")).text
            )
            # The same seed, so that the other worker gives the same answer.
            seeds = {submit.request.sampling.seed for submit in w1.submits + w2.submits}
            assert len(seeds) == 1


@pytest.mark.public_case("B39")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_an_answer_whose_worker_dies_midway_goes_on_with_another(stream, num_choices):
    """The other worker is given what the client has: no token comes twice, none is missing, usage counts each once."""
    body = {"max_tokens": 50, "n": num_choices, "logprobs": 1, "temperature": 1}
    async with running_worker(say(TEXT), "w2") as w2:
        w1 = FakeWorker(say(TEXT, delay_s=0.1), "w1")
        await w1.start()
        async with http_gateway(w1, w2, request_timeout_s=60) as gateway:
            usage = {"stream_options": {"include_usage": True}} if stream else {}
            asking = asyncio.create_task(gateway.complete(stream=stream, **body, **usage))
            await eventually(lambda: w1.submits, "submitted to w1")
            await asyncio.sleep(0.1)
            await w1.stop()
            answer = await asking
            assert answer.status_code == 200
            chunks = chunks_of(answer.text) if stream else [answer.json()]
            for choice in range(num_choices):
                parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
                assert "".join(part["text"] for part in parts) == TEXT
                offsets = [o for p in parts if p["logprobs"] for o in p["logprobs"]["text_offset"]]
                assert offsets == sorted(offsets)
                assert len(offsets) == NUM_TEXT_TOKENS
                assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["stop"]
            assert chunks[-1]["usage"]["completion_tokens"] == num_choices * NUM_TEXT_TOKENS
        (submit,) = w2.submits
        had = [list(tokens.token_ids) for tokens in submit.request.output_token_ids]
        assert len(had) == num_choices
        assert all(0 < len(tokens) < NUM_TEXT_TOKENS for tokens in had)
        first = w1.submits[0].request
        assert submit.request.deadline_remaining_ms < first.deadline_remaining_ms - 50
        assert submit.request.sampling == first.sampling
        assert list(submit.request.prompt_token_ids) == list(first.prompt_token_ids)


async def test_a_stream_that_nobody_can_go_on_with_ends_with_one_error_after_a_clean_prefix():
    w1 = FakeWorker(say(TEXT, delay_s=0.03), "w1")
    await w1.start()
    async with http_gateway(w1) as gateway:
        reading = await open_stream(gateway, COMPLETION | {"max_tokens": 50})
        await asyncio.sleep(0.15)
        await w1.stop()
        *chunks, error = chunks_of(await reading)
        assert error["error"]["code"] == "worker_lost"
        assert set(error) == {"error"}
        text = text_of(chunks)
        assert text
        assert TEXT.startswith(text)


async def test_a_choice_that_a_stop_string_ended_stays_ended():
    """The first of two choices has ended by a stop string of the gateway's when the worker dies; it says no more."""
    ids = small_tokenizer().encode(TEXT).ids
    first_ended = asyncio.Event()

    async def script(request: pb.Request) -> AsyncIterator[list[pb.ChoiceOutput]]:
        yield [output(request, ids[:6], 0), output(request, ids[:2], 1)]
        first_ended.set()
        await asyncio.sleep(60)

    async with running_worker(say(TEXT), "w2") as w2:
        w1 = FakeWorker(script, "w1")
        await w1.start()
        async with http_gateway(w1, w2) as gateway:
            wish = {"max_tokens": 50, "n": 2, "temperature": 1, "stop": ["three"]}
            reading = await open_stream(gateway, COMPLETION | wish)
            await first_ended.wait()
            await asyncio.sleep(0.1)
            await w1.stop()
            chunks = chunks_of(await reading)
            for choice in (0, 1):
                parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
                assert "".join(part["text"] for part in parts) == "one two "
                assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["stop"]
        (submit,) = w2.submits
        had = [list(tokens.token_ids) for tokens in submit.request.output_token_ids]
        assert had[1] == ids[:2]
        assert had[0] == ids[: len(had[0])]
        assert len(had[0]) > 2, "it had ended before the worker died"


async def test_a_worker_that_gives_up_what_has_ended_is_no_loss():
    """A stop string has ended the choice here, in the same frame: that the worker aborts it is its own affair."""
    ids = small_tokenizer().encode(TEXT).ids

    async def script(request: pb.Request) -> AsyncIterator[list[pb.ChoiceOutput]]:
        yield [output(request, ids[:6]), output(request, [], finish_reason="abort")]

    async with running_worker(script, "w1") as w1, http_gateway(w1) as gateway:
        answer = await gateway.complete(max_tokens=50, stop=["three"])
        assert answer.status_code == 200
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("one two ", "stop")
        assert "baton:requests_rerouted_total 0.0" in (await gateway.client.get("/metrics")).text


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_that_come_with_the_end_of_their_worker_are_given_out(stream):
    """One frame holds tokens and, behind them, the worker's giving up: the next one and the client get them."""
    ids = small_tokenizer().encode(TEXT).ids

    async def leave(request: pb.Request) -> AsyncIterator[list[pb.ChoiceOutput]]:
        start = sum(len(tokens.token_ids) for tokens in request.output_token_ids)
        left = ids[start : start + 3]
        yield [output(request, left[:1])]
        yield [output(request, left[1:]), output(request, [], finish_reason="abort")]

    async with running_worker(leave, "w1") as w1, running_worker(leave, "w2") as w2:
        async with running_worker(say(TEXT), "w3") as w3, http_gateway(w1, w2, w3) as gateway:
            for _ in range(3):
                answer = await gateway.complete(max_tokens=50, stream=stream)
                chunks = chunks_of(answer.text) if stream else [answer.json()]
                assert text_of(chunks) == TEXT
            assert w3.submits
            assert w1.submits or w2.submits


async def test_a_worker_that_leaves_hands_its_requests_over():
    """What a worker aborts by itself, as at the end of its time to drain, goes on elsewhere."""

    async def leave(request: pb.Request) -> AsyncIterator[list[pb.ChoiceOutput]]:
        ids = small_tokenizer().encode(TEXT).ids
        yield [output(request, ids[:3])]
        yield [output(request, [], finish_reason="abort")]

    async with running_worker(leave, "w1") as w1, running_worker(say(TEXT), "w2") as w2:
        async with http_gateway(w1, w2) as gateway:
            text = ""
            for _ in range(4):  # whoever is asked first
                text = (await gateway.complete(max_tokens=50)).json()["choices"][0]["text"]
                assert text == TEXT
            assert w1.submits
            assert w2.submits


async def test_without_another_worker_the_loss_is_a_503():
    w1 = FakeWorker(silence, "w1")
    await w1.start()
    async with http_gateway(w1) as gateway:
        asking = asyncio.create_task(gateway.complete(stream=True))
        await eventually(lambda: w1.submits, "submitted")
        await w1.stop()
        answer = await asking
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("worker_lost", "ServiceUnavailableError")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_routed_again_only_so_often(stream):
    async with (
        running_worker(abort, "w1") as w1,
        running_worker(abort, "w2") as w2,
        running_worker(abort, "w3") as w3,
        http_gateway(w1, w2, w3, max_retries=1) as gateway,
    ):
        assert (await gateway.complete(stream=stream)).status_code == 503
        assert len(w1.submits) + len(w2.submits) + len(w3.submits) == 2


@pytest.mark.public_case("B37")
async def test_a_worker_that_falls_silent_gives_its_waiting_requests_back():
    """Its lease lapses while its port still accepts: waiting requests move, and it is out of rotation."""
    index = MemoryIndex()
    async with running_worker(silence, "w1") as w1, running_worker(say(TEXT), "w2") as w2:
        for worker, lease_ms in ((w1, 400), (w2, 60_000)):
            await index.register(worker.info, lease_ms)
            await index.heartbeat(worker.info.id, worker.info.epoch, _idle(), lease_ms)
        config = {"seeds": (), "silence_limit_ms": 100}
        async with http_gateway(w1, w2, index=index, **config) as gateway:
            asking = asyncio.create_task(gateway.complete(max_tokens=50))
            await eventually(lambda: w1.submits, "submitted to w1")
            body = (await asking).json()
            assert body["choices"][0]["text"] == TEXT
            assert len(w2.submits) == 1
            live = [worker.info.id for worker in gateway.state.directory.live_workers()]
            assert live == ["w2"]
            # It comes back with its next heartbeat.
            await index.register(w1.info, 60_000)
            await index.heartbeat(w1.info.id, w1.info.epoch, _idle(), 60_000)
            await gateway.wait_for_workers(2)


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("ContextTooLong", 400, "context_length_exceeded"),
        ("InvalidRequest", 400, "invalid_value"),
        ("NoCapacity", 429, "no_capacity"),
        ("DeadlineExceeded", 504, "deadline_exceeded"),
        ("EngineDeadError", 503, "engine_dead"),
        ("ModelNotFound", 404, "model_not_found"),
        ("SomethingNew", 500, "internal_error"),
    ],
)
@pytest.mark.public_case("B18")
@pytest.mark.parametrize("stream", [True, False])
async def test_what_a_worker_refuses_is_the_clients_http_status(kind, status, code, stream):
    async with running_worker(refuse(kind, "the pool holds 320 tokens")) as w1:
        async with http_gateway(w1) as gateway:
            answer = await gateway.chat(stream=stream)
            assert answer.status_code == status
            error = answer.json()["error"]
            assert (error["code"], error["message"]) == (code, "the pool holds 320 tokens")
            assert gateway.state.num_inflight == 0


async def test_a_deadline_ends_the_request_here_and_on_the_worker():
    slow = say(TEXT, ends=False, delay_s=0.02)
    async with running_worker(slow) as w1, http_gateway(w1, request_timeout_s=0.3) as gateway:
        answer = await gateway.complete(max_tokens=2000)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        await eventually(lambda: w1.num_running == 0, "freed")
        answer = await gateway.complete(max_tokens=2000, stream=True)
        *chunks, error = chunks_of(answer.text)
        assert error["error"]["code"] == "deadline_exceeded"
        assert text_of(chunks)
        await eventually(lambda: w1.num_running == 0, "freed")


async def test_a_worker_that_comes_back_is_used_again():
    w1 = FakeWorker(say(TEXT), "w1")
    await w1.start()
    port = int(w1.address.rpartition(":")[2])
    async with http_gateway(w1) as gateway:
        assert (await gateway.chat()).status_code == 200
        await w1.stop()
        await gateway.wait_for_workers(0)
        assert (await gateway.client.get("/health")).status_code == 503
        answer = await gateway.chat()
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "no worker is ready yet"
        again = FakeWorker(say(TEXT), "w1", epoch=2)
        await again.start(port)
        try:
            await gateway.wait_for_workers(1)
            assert (await gateway.chat()).status_code == 200
        finally:
            await again.stop()


async def test_a_model_that_lost_its_workers_is_not_unknown():
    async with running_worker(say("x"), "w2", models=("other",)) as w2:
        w1 = FakeWorker(say("x"), "w1")
        await w1.start()
        async with http_gateway(w1, w2) as gateway:
            assert (await gateway.chat()).status_code == 200
            await w1.stop()
            await gateway.wait_for_workers(1)
            assert (await gateway.client.post("/v1/chat/completions", json=CHAT)).status_code == 503
            assert (await gateway.chat(model="never")).status_code == 404


def _idle() -> Any:
    from core.worker_info import WorkerLoad

    return WorkerLoad()
