"""POST /reset_prefix_cache: whose key opens it, what becomes of each worker, and a real worker's cache after it."""

from typing import Any

import httpx
import pytest

from core.errors import ConfigError
from core.worker_info import Role
from kvindex.config import IndexConfig
from kvindex.connect import connect_index
from services.cluster.valkey import ValkeyServer
from services.gateway import admin
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from services.gateway.state import GatewayState
from services.rpc.v1 import baton_pb2_grpc as pb_grpc
from tests.support.fake_worker import FakeWorker, running_worker, say
from tests.support.gateways import Gateway, asgi_gateway
from tests.support.valkey import running_valkey
from tests.support.worker_calls import make_front

PATH = "/reset_prefix_cache"
ADMIN = {"Authorization": "Bearer root"}


class EarlierWorker(FakeWorker):
    """A worker from before the call existed."""

    ResetPrefixCache = pb_grpc.WorkerServicer.ResetPrefixCache


async def reset(gateway: Gateway, headers: dict[str, str] = ADMIN) -> httpx.Response:
    return await gateway.client.post(PATH, headers=headers)


async def test_without_an_admin_key_nobody_may_and_the_flag_is_named():
    async with (
        running_worker(say("x")) as worker,
        asgi_gateway(worker, api_key="user") as gateway,
    ):
        for headers in ({}, ADMIN, {"Authorization": "Bearer user"}, {"Authorization": "Bearer "}):
            answer = await reset(gateway, headers)
            assert answer.status_code == 403
            error = answer.json()["error"]
            assert "--admin-api-key" in error["message"]
            assert (error["type"], error["code"]) == ("PermissionDeniedError", "admin_key_not_set")
        assert worker.num_resets == 0


async def test_only_the_admin_key_opens_it_and_opens_nothing_else():
    keys = {"api_key": "user", "admin_api_key": "root"}
    async with running_worker(say("x")) as worker, asgi_gateway(worker, **keys) as gateway:
        for value in (None, "Bearer user", "root", "Bearer roo", "Bearer root ", "bearer root"):
            answer = await reset(gateway, {} if value is None else {"Authorization": value})
            assert answer.status_code == 401, value
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert worker.num_resets == 0
        assert (await reset(gateway)).status_code == 200
        assert worker.num_resets == 1
        assert (await gateway.client.get(PATH, headers=ADMIN)).status_code == 405
        assert (await gateway.client.get("/v1/models", headers=ADMIN)).status_code == 401
        assert "root" not in repr(gateway.state.config)


def test_the_two_keys_must_differ():
    with pytest.raises(ConfigError, match="--admin-api-key: must differ from --api-key"):
        GatewayConfig(api_key="same", admin_api_key="same")


async def test_every_live_worker_is_told_and_named():
    async with (
        running_worker(say("x"), "p", role=Role.PREFILL) as prefill,
        running_worker(say("x"), "d", role=Role.DECODE) as decode,
        asgi_gateway(prefill, decode, admin_api_key="root") as gateway,
    ):
        decode.num_running = 3
        answer = await reset(gateway)
        assert answer.status_code == 200
        assert answer.json() == {
            "workers": [
                {"id": "d", "status": "ok", "num_kept_blocks": 3},
                {"id": "p", "status": "ok", "num_kept_blocks": 0},
            ]
        }
        assert (prefill.num_resets, decode.num_resets) == (1, 1)


async def test_what_a_worker_cannot_or_does_not_do_is_told_and_is_no_success(monkeypatch):
    monkeypatch.setattr(admin, "RESET_TIMEOUT_S", 0.2)
    earlier = EarlierWorker(say("x"), "earlier")
    await earlier.start()
    try:
        async with (
            running_worker(say("x"), "stuck") as stuck,
            running_worker(say("x"), "well") as well,
            asgi_gateway(earlier, stuck, well, admin_api_key="root") as gateway,
        ):
            stuck.reset_delay_s = 60.0
            answer = await reset(gateway)
            assert answer.status_code == 502
            body = answer.json()
            found = {worker["id"]: worker for worker in body["workers"]}
            assert found["well"] == {"id": "well", "status": "ok", "num_kept_blocks": 0}
            assert found["stuck"]["status"] == "unreachable"
            assert found["stuck"]["message"] == "no answer within 0.2 s"
            assert found["earlier"]["status"] == "not_supported"
            assert "earlier version" in found["earlier"]["message"]
            assert body["error"] == {
                "message": "2 of 3 workers have not reset their prefix cache: "
                "earlier (not_supported), stuck (unreachable)",
                "type": "BadGatewayError",
                "param": None,
                "code": "reset_incomplete",
            }
            assert (well.num_resets, stuck.num_resets) == (1, 0)
    finally:
        await earlier.stop()


async def test_a_worker_that_is_gone_is_unreachable(monkeypatch):
    worker = FakeWorker(say("x"), "gone")
    await worker.start()
    async with asgi_gateway(worker, admin_api_key="root") as gateway:
        live = gateway.state.directory.live_workers()
        await worker.stop()
        monkeypatch.setattr(gateway.state.directory, "live_workers", lambda: live)
        answer = await reset(gateway)
    assert answer.status_code == 502
    [told] = answer.json()["workers"]
    assert (told["id"], told["status"]) == ("gone", "unreachable")


async def test_without_a_worker_nothing_was_reset():
    async with asgi_gateway(admin_api_key="root") as gateway:
        answer = await reset(gateway)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "service_unavailable"


async def test_the_description_lists_it():
    async with asgi_gateway() as gateway:
        described = (await gateway.client.get("/openapi.json")).json()
    responses = described["paths"][PATH]["post"]["responses"]
    assert set(responses) == {"200", "401", "403", "502", "503"}


# ---------------------------------------------------------------- with workers' fronts


@pytest.fixture(scope="module")
def server() -> Any:
    with running_valkey() as started:
        yield started


async def test_a_warm_prompt_is_cold_after_a_reset(server: ValkeyServer):
    config = IndexConfig(redis_url=server.url, publish_interval_ms=1)
    prompt = list(range(3, 3 + 129))
    gateway_config = GatewayConfig(index=config, admin_api_key="root", poll_interval_ms=20)
    async with make_front("--tiers", index=config, worker_id="w"):
        state = GatewayState(gateway_config, connect_index(config))
        state.start()
        transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            gateway = Gateway(state, client)
            await gateway.wait_for_workers(1)
            assert [await cached(gateway, prompt) for _ in range(2)] == [0, 128]
            answer = await reset(gateway)
            assert answer.json() == {"workers": [{"id": "w", "status": "ok", "num_kept_blocks": 0}]}
            assert [await cached(gateway, prompt) for _ in range(2)] == [0, 128]
        await state.close()


async def cached(gateway: Gateway, prompt: list[int]) -> int:
    answer = await gateway.complete(prompt=prompt, max_tokens=2)
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens
