"""A gateway process: starts without torch, says where it listens, ends in order."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest

from core.errors import ConfigError
from services.gateway.config import GatewayConfig, RoutingConfig, check_address
from services.gateway.main import run_gateway, serve_gateway
from tests.support.fake_worker import running_worker, say
from tests.support.gateways import COMPLETION, chunks_of, eventually, http_gateway

ENDLESS = say("one two ", ends=False, delay_s=0.01)


def test_the_gateway_imports_no_torch_no_transformers_and_no_engine():
    code = (
        "import sys, services.gateway.main; "
        "bad = {'torch', 'numpy', 'transformers', 'engine', 'kernels', 'kvtransfer', 'gguf'}; "
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_sigterm_ends_it():
    ports: list[int] = []
    running = asyncio.create_task(
        run_gateway(GatewayConfig(port=0, seeds=("127.0.0.1:9",)), ports.append)
    )
    await eventually(lambda: ports, "listening")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 5)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", ports[0])


async def test_running_requests_end_and_new_ones_are_refused_while_it_stops():
    script = say("the capital of France", delay_s=0.05)
    async with running_worker(script) as worker, http_gateway(worker, drain_timeout_s=5) as gateway:
        running = asyncio.create_task(gateway.complete(max_tokens=50))
        await eventually(lambda: worker.submits, "submitted")
        draining = asyncio.create_task(gateway.state.drain(5))
        await asyncio.sleep(0)
        assert (await gateway.chat()).status_code == 503
        health = await gateway.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "shutting down")
        assert (await running).json()["choices"][0]["text"] == "the capital of France"
        await asyncio.wait_for(draining, 1)


async def test_what_does_not_end_in_time_is_cancelled_with_an_error():
    async with running_worker(ENDLESS) as worker:
        async with http_gateway(worker) as gateway:
            body = COMPLETION | {"stream": True, "max_tokens": 2000}
            running = asyncio.create_task(gateway.client.post("/v1/completions", json=body))
            await eventually(lambda: worker.num_running, "running")
            await asyncio.sleep(0.1)
            await gateway.state.drain(0.1)
            *_, error = chunks_of((await running).text)
            assert "shutting down" in error["error"]["message"]
            await eventually(lambda: worker.num_running == 0, "freed")


async def test_it_serves_on_a_socket_that_somebody_else_listens_on():
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    async with serve_gateway(GatewayConfig(), None, listener=listener) as (given, _):
        assert given == port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in await reader.read()
        writer.close()


async def test_a_taken_port_is_a_clear_refusal():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: cannot listen on 127.0.0.1:{port}"):
            async with serve_gateway(GatewayConfig(port=port), None):
                pass


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"port": 70_000}, "--port: 70000"),
        ({"seeds": ("nowhere",)}, "--seed: 'nowhere'"),
        ({"seeds": ("host:0",)}, "--seed: 'host:0'"),
        ({"max_inflight_requests": 0}, "--max-inflight-requests: 0"),
        ({"request_timeout_s": -1}, "--request-timeout: -1"),
        ({"request_timeout_s": float("nan")}, "--request-timeout: nan"),
        ({"max_body_bytes": 1}, "--max-body-bytes: 1"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(fields, named):
    with pytest.raises(ConfigError, match=named):
        GatewayConfig(**fields)


def test_addresses_may_be_names_and_both_kinds_of_ip():
    for address in ("host:1", "10.0.0.1:65535", "[::1]:8000", "a.b.svc.cluster.local:80"):
        assert check_address("seed", address)[1] > 0
    with pytest.raises(ConfigError):
        RoutingConfig(split_min_tokens=0)
