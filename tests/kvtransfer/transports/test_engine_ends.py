"""What becomes of D when a process that it reads from by a real engine is stopped or killed, and what waiting costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from core.blocks import BlockState
from kvtransfer.events import RunAdmitted, SessionComplete, WriterLeft
from tests.kvtransfer.harness import Pair, Transfer, pair
from tests.kvtransfer.pull_child import LAYOUT, bytes_of

NUM_TOKENS = 16 * 200
"""100 MiB."""

WAYS = [("nixl", ""), ("nixl", "tcp"), ("mooncake", "")]
"""Engine, and what UCX is held to."""


@pytest.fixture(params=WAYS, ids=" ".join)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine; this process and its children find each other in one way of it."""
    kind, way = request.param
    if way:
        monkeypatch.setenv("UCX_TLS", way)
    return str(kind)


@contextmanager
def decode(transport: str) -> Iterator[Pair]:
    with pair(transport, layout=LAYOUT, num_blocks=256) as p:
        yield p


@contextmanager
def prefill(
    p: Pair, transfer: Transfer, num_tokens: int = NUM_TOKENS
) -> Iterator[subprocess.Popen[str]]:
    address = p.receiver.addresses[0]
    arguments = [
        p.receiver.kind,
        address,
        str(transfer.session),
        transfer.secret.hex(),
        str(num_tokens),
    ]
    command = [sys.executable, "-m", "tests.kvtransfer.pull_child", *arguments]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


def begun(p: Pair) -> bool:
    return len(p.events(RunAdmitted)) > 0


def take_whole(p: Pair, num_tokens: int) -> None:
    """One transfer from a process of its own, and what comes of it."""
    transfer = p.transfer(num_tokens)
    p.expect(transfer)
    with prefill(p, transfer, num_tokens):
        p.until(p.saw(SessionComplete(*transfer.key)))
        for destination in transfer.destinations[0]:
            start = destination.block * LAYOUT.block_bytes
            held = p.destination[start : start + LAYOUT.block_bytes]
            assert held == bytes_of(destination.position)
    settle(p, transfer)


def settle(p: Pair, transfer: Transfer) -> None:
    """D gives up a session, and gets all its blocks back."""
    states = p.give_up(transfer)
    held = {block for block, state in states.items() if state is BlockState.QUARANTINED}

    def is_left() -> bool:
        left = {event.block for event in p.events(WriterLeft) if isinstance(event, WriterLeft)}
        return held <= left

    p.until(is_left)
    for block in held:
        p.settle(block)
    p.assert_idle()


def test_a_process_of_its_own_is_read(transport: str) -> None:
    with decode(transport) as p:
        take_whole(p, 16 * 40)


@pytest.mark.failure_edge("P dies mid-transfer")
def test_a_peer_that_is_killed_leaves_no_writer_and_another_is_read(transport: str) -> None:
    with decode(transport) as p:
        transfer = p.transfer(NUM_TOKENS)
        p.expect(transfer)
        with prefill(p, transfer) as child:
            p.until(lambda: begun(p))
            child.send_signal(signal.SIGKILL)
            child.wait()
            settle(p, transfer)
        assert SessionComplete(*transfer.key) not in p.received
        take_whole(p, 16 * 20)


def test_a_peer_that_is_stopped_holds_its_blocks_at_most_until_it_dies(transport: str) -> None:
    with decode(transport) as p:
        transfer = p.transfer(NUM_TOKENS)
        p.expect(transfer)
        with prefill(p, transfer) as child:
            p.until(lambda: begun(p))
            child.send_signal(signal.SIGSTOP)
            p.receiver.forget(*transfer.key)
            num_admitted = len(p.events(RunAdmitted))
            time.sleep(0.1)
            assert len(p.events(RunAdmitted)) == num_admitted < len(transfer.blocks)
            child.send_signal(signal.SIGKILL)
            child.wait()
            settle(p, transfer)
        take_whole(p, 16 * 20)


def test_a_receiver_stops_while_it_reads_from_a_stopped_peer(transport: str) -> None:
    with decode(transport) as p:
        transfer = p.transfer(NUM_TOKENS)
        p.expect(transfer)
        with prefill(p, transfer) as child:
            p.until(lambda: begun(p))
            child.send_signal(signal.SIGSTOP)
            started_s = time.monotonic()
            p.receiver.close()
            assert time.monotonic() - started_s < 10
            after = bytes(p.destination)
            child.send_signal(signal.SIGCONT)
            time.sleep(0.2)
            assert bytes(p.destination) == after
        settle(p, transfer)


def test_waiting_costs_no_core(transport: str) -> None:
    with decode(transport) as p:
        take_whole(p, 16 * 20)
        before_s, started_s = time.process_time(), time.monotonic()
        time.sleep(1.0)
        busy = (time.process_time() - before_s) / (time.monotonic() - started_s)
        assert busy < 0.2, f"two idle ends keep {busy:.0%} of a core busy, in process {os.getpid()}"
