"""/health, /metrics, /version, the API key, the OpenAPI description."""

import re

import pytest

from core.worker_info import Role
from tests.support.fake_worker import FakeWorker, output, running_worker, say
from tests.support.gateways import CHAT, COMPLETION, asgi_gateway

KEY = {"Authorization": "Bearer secret"}
FAMILIES = [
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
]


def value(text: str, name: str, **labels: str) -> float:
    """One sample of the exposition."""
    for line in text.splitlines():
        found = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
        if found and found[1] == name:
            have = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
            if have == labels:
                return float(found[3])
    raise AssertionError(f"{name}{labels} is not exported")


@pytest.mark.public_case("B50")
async def test_health_follows_who_can_decode():
    async with asgi_gateway() as gateway:
        for path in ("/health", "/ready", "/ping"):
            answer = await gateway.client.get(path)
            assert answer.status_code == 503
            assert answer.json()["status"] == "no worker found yet"
        assert (await gateway.client.post("/ping")).status_code == 503
        assert (await gateway.chat()).status_code == 503
    async with running_worker(say("x"), "p", role=Role.PREFILL) as prefill:
        async with asgi_gateway(prefill) as gateway:
            answer = await gateway.client.get("/health")
            assert answer.status_code == 503
            assert answer.json()["status"] == "no live worker can decode"
            refused = await gateway.chat()
            assert refused.status_code == 503
            assert "only prefill workers" in refused.json()["error"]["message"]
            assert (await gateway.chat(max_tokens=1)).status_code == 200
    async with running_worker(say("x"), "d", role=Role.DECODE) as decode:
        async with asgi_gateway(decode) as gateway:
            report = (await gateway.client.get("/health")).json()
            assert report["status"] == "ok"
            assert report["index"].startswith("none")
            assert report["workers"] == [
                {"id": "d", "role": "decode", "live": True, "inflight_requests": 0}
            ]
            assert (await gateway.chat()).status_code == 200


async def test_metrics_are_complete_before_the_first_request():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        text = (await gateway.client.get("/metrics")).text
    for family in FAMILIES:
        assert value(text, f"{family}_count", model_name="fake") == 0
    for counter in ("prompt_tokens", "generation_tokens", "prompt_tokens_cached"):
        assert value(text, f"vllm:{counter}_total", model_name="fake") == 0
    for reason in ("stop", "length", "abort", "error"):
        labels = {"model_name": "fake", "finished_reason": reason}
        assert value(text, "vllm:request_success_total", **labels) == 0
    assert value(text, "baton:workers_live", role="mixed") == 1
    assert value(text, "baton:inflight_requests") == 0


async def test_metrics_count_what_was_served():
    async with running_worker(say("one two three", cached=16)) as worker:
        async with asgi_gateway(worker) as gateway:
            usages = [(await gateway.chat()).json()["usage"] for _ in range(2)]
            usages.append((await gateway.complete(max_tokens=2)).json()["usage"])
            await gateway.chat(temperature=9)
            text = (await gateway.client.get("/metrics")).text
    model = {"model_name": "fake"}
    for family in FAMILIES:
        if "inter_token" not in family:
            assert value(text, f"{family}_count", **model) == 3, family
    total = sum(usage["completion_tokens"] for usage in usages)
    assert value(text, "vllm:generation_tokens_total", **model) == total
    assert value(text, "vllm:inter_token_latency_seconds_count", **model) == total - 3
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert value(text, "vllm:prompt_tokens_total", **model) == prompts
    assert value(text, "vllm:prompt_tokens_cached_total", **model) == 48
    assert value(text, "vllm:request_success_total", finished_reason="stop", **model) == 2
    assert value(text, "vllm:request_success_total", finished_reason="length", **model) == 1
    assert value(text, "baton:requests_rejected_total", code="invalid_value") == 1
    assert value(text, "baton:requests_local_total") == 3
    assert value(text, "baton:route_seconds_count") == 3


async def test_named_moments_and_the_second_token_are_measured():
    async def script(request):
        yield [output(request, [5])]
        moments = {"received": 0.0, "first_token": 30.0}
        yield [output(request, [6], finish_reason="length", timestamps_ms=moments)]

    async with running_worker(script) as worker, asgi_gateway(worker) as gateway:
        assert (await gateway.chat()).status_code == 200
        text = (await gateway.client.get("/metrics")).text
    model = {"model_name": "fake"}
    assert value(text, "baton:time_to_second_token_seconds_count", **model) == 1
    labels = {"moment": "first_token", **model}
    assert value(text, "baton:request_moment_seconds_sum", **labels) == 0.03


async def test_the_api_key_guards_v1_only():
    async with running_worker(say("x")) as worker:
        async with asgi_gateway(worker, api_key="secret") as gateway:
            client = gateway.client
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert (await client.get("/v1/models", headers=headers)).status_code == 401
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=KEY)
            assert answer.status_code == 200
            for path in ("/health", "/metrics", "/version"):
                assert (await client.get(path)).status_code == 200
            assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
            assert "secret" not in repr(gateway.state.config)


async def test_version_and_load():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        assert set((await gateway.client.get("/version")).json()) == {"version"}
        assert (await gateway.client.get("/load")).json() == {"server_load": 0}


async def test_the_description_covers_bodies_errors_and_streams():
    async with asgi_gateway() as gateway:
        described = (await gateway.client.get("/openapi.json")).json()
    schemas = described["components"]["schemas"]
    for path, name in (
        ("/v1/chat/completions", "ChatBody"),
        ("/v1/completions", "CompletionBody"),
        ("/tokenize", "TokenizeBody"),
        ("/detokenize", "DetokenizeBody"),
    ):
        operation = described["paths"][path]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        assert name in schemas
        for status in ("400", "404", "413", "415", "429", "503"):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Error"}
    content = described["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}
    text = str(described)
    for reference in re.findall(r"#/components/schemas/(\w+)", text):
        assert reference in schemas
    assert "temperature" in schemas["ChatBody"]["properties"]


async def test_a_mistake_of_ours_is_a_500_without_details(monkeypatch):
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:

        def broken(*_: object, **__: object) -> None:
            raise KeyError("/etc/private")

        monkeypatch.setattr(gateway.state.router, "route", broken)
        answer = await gateway.chat()
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "internal error"
        assert "private" not in answer.text
        assert gateway.state.num_inflight == 0


async def test_nothing_of_an_earlier_worker_stays_in_the_gauges():
    worker = FakeWorker(say("x"), "gone")
    await worker.start()
    async with asgi_gateway(worker) as gateway:
        await gateway.client.post("/v1/completions", json=COMPLETION)
        await worker.stop()
        await gateway.wait_for_workers(0)
        text = (await gateway.client.get("/metrics")).text
        assert value(text, "baton:workers_live", role="mixed") == 0
