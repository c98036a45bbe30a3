"""The servers that tiers are tried over end with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kvtransfer.tiers.harness import stop_servers
from tests.support.block_stores import stop_lmcache


@pytest.fixture(scope="session", autouse=True)
def servers() -> Iterator[None]:
    yield
    stop_servers()
    stop_lmcache()
