"""What `--link-rate` and several sessions at once mean, over each transport that has connections."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvtransfer.events import SessionComplete
from kvtransfer.session import SendSession
from tests.kvtransfer.harness import FAST, pair
from tests.kvtransfer.tcp_peers import finish

pytestmark = pytest.mark.parametrize("transport", ["tcp", "shm"])


def test_destinations_share_a_limited_link(transport: str) -> None:
    config = replace(FAST, link_rate_bytes_s=300_000.0)
    with pair(transport, config=config) as p, pair(transport) as q:
        first = p.start(num_tokens=60)
        p.push(first)
        second = q.transfer(num_tokens=60)
        q.expect(second)
        p.sender.open(SendSession(*second.key, second.secret, q.receiver.addresses[0]))
        p.sender.push(*second.key, 0, second.sources[0], 0, 3)
        finish(p, first)
        assert q.receiver.counters.received_bytes_total >= 0.25 * (
            p.receiver.counters.received_bytes_total
        )


def test_sessions_take_turns(transport: str) -> None:
    config = replace(FAST, link_rate_bytes_s=300_000.0)
    with pair(transport, config=config) as p:
        long = p.start(num_tokens=80)
        p.push(long)
        short = p.start(num_tokens=4)
        p.push(short)
        finish(p, short, long)
        assert p.received.index(SessionComplete(*short.key)) < len(p.received) // 2


@pytest.mark.parametrize("rate", [200_000.0, 2_000_000.0])
def test_a_link_holds_its_rate(transport: str, rate: float) -> None:
    config = replace(FAST, link_rate_bytes_s=rate)
    with pair(transport, config=config) as p:
        transfer = p.transfer(num_tokens=100)
        p.expect(transfer)
        p.open(transfer)
        started_s = time.monotonic()
        p.push(transfer)
        finish(p, transfer)
        elapsed_s = time.monotonic() - started_s
        num_bytes = p.sender.counters.sent_bytes_total
        assert elapsed_s >= 0.9 * (num_bytes - 64 * 1024) / rate
        p.until(lambda: p.sender.counters.blocks_outstanding == 0)


def test_progress_under_a_rate_is_gradual(transport: str) -> None:
    config = replace(FAST, link_rate_bytes_s=100_000.0)
    with pair(transport, config=config) as p:
        transfer = p.start(num_tokens=40)
        p.push(transfer)
        p.until(lambda: p.sender.counters.blocks_acknowledged_total >= 1)
        assert p.sender.counters.blocks_outstanding >= 1
        assert not p.events(SessionComplete)
