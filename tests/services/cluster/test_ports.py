"""A held port: nobody else is given it, connections are refused, and servers listen there again and again."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from services.cluster.ports import KEEPS_PORTS, HeldPort

pytestmark = pytest.mark.skipif(not KEEPS_PORTS, reason="this system keeps no ports")


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


IPV6 = pytest.param("::1", marks=pytest.mark.skipif(not _has_ipv6(), reason="needs IPv6"))


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", IPV6])
def host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def held(host: str) -> Iterator[HeldPort]:
    with contextlib.closing(HeldPort(host)) as port:
        yield port


def bind_as_client(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        other.bind((host, port))


async def test_servers_come_and_go_and_between_them_nobody_is_let_in(
    host: str, held: HeldPort
) -> None:
    with pytest.raises(OSError, match="in use"):
        bind_as_client(host, held.port)
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, held.port), 5)
        server = await asyncio.start_server(lambda _, writer: writer.close(), host, held.port)
        reader, writer = await asyncio.open_connection(host, held.port)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()


def test_no_two_are_the_same() -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(contextlib.closing(HeldPort())).port for _ in range(200)]
        others = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(200)]
        ports = held + [other.getsockname()[1] for other in others]
        assert len(set(ports)) == 400


def test_a_server_stays_when_the_port_is_let_go(host: str, held: HeldPort) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, held.port), family=family) as server:
        held.close()
        with socket.create_connection((host, held.port), 5):
            server.accept()[0].close()


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        HeldPort("192.0.2.1")
