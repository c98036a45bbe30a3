"""The back ends that the contract suite runs over, and a server for the tests that need more than a contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from services.cluster.valkey import ValkeyServer
from tests.support.index_backends import Backend, memory_backend, redis_backend
from tests.support.valkey import flush, running_valkey


@pytest.fixture(scope="session")
def session_valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def valkey(session_valkey: ValkeyServer) -> ValkeyServer:
    flush(session_valkey)
    return session_valkey


@pytest.fixture(params=["memory", "redis", "redis in 4 shards"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    if request.param == "memory":
        made = memory_backend()
    else:
        server = request.getfixturevalue("valkey")
        made = redis_backend(server, index_shards=1 if request.param == "redis" else 4)
    yield made
    await made.index.close()
