"""P's end of tcp: connections that break, memory that is let go of, fairness and rate."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from crc32c import crc32c

from core.errors import PeerLost
from core.ids import BlockId, SessionId
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from kvtransfer.config import TransferConfig
from kvtransfer.events import (
    BlocksAcknowledged,
    MoverEvent,
    RunAdmitted,
    SendFailed,
    SessionDrained,
)
from kvtransfer.session import SendSession, SourceBlock
from kvtransfer.transports.links import sender as link_sender
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.sender import LinkSender
from kvtransfer.transports.tcp.sender import TcpSender
from tests.kvtransfer.harness import FAST, Pair, Transfer
from tests.kvtransfer.tcp_peers import (
    CuttingProxy,
    StubbornReceiver,
    finish,
    open_through,
    raw_peer,
    tcp_pair,
)

# ---- connections that break


@pytest.mark.parametrize("budgets", [[10], [100], [1000, 5000], [64 + 64 + 300, 40_000, 70_000]])
def test_a_broken_connection_is_made_again_and_everything_arrives(budgets: list[int]) -> None:
    with tcp_pair() as p:
        with closing(CuttingProxy(p.receiver.addresses[0], [*budgets, None])) as proxy:
            transfer = p.transfer(num_tokens=100)
            p.expect(transfer)
            open_through(p, proxy, transfer)
            p.push(transfer, layers_per_range=1)
            finish(p, transfer)
            p.until(lambda: len(p.events(BlocksAcknowledged)) == len(transfer.blocks))
            assert bytes(p.destination) == p.expected(transfer)
            assert not p.events(SendFailed)
            assert len(p.events(RunAdmitted)) == len(set(p.events(RunAdmitted)))
            p.assert_idle()


def test_progress_between_breaks_ends_the_count_of_failures() -> None:
    config = replace(FAST, max_connect_failures=2)
    with tcp_pair(config=config) as p:
        budgets: list[int | None] = [3000] * 6
        with closing(CuttingProxy(p.receiver.addresses[0], [*budgets, None])) as proxy:
            transfer = p.transfer(num_tokens=100)
            p.expect(transfer)
            open_through(p, proxy, transfer)
            for source in transfer.sources[0]:  # a run each, so that some arrive before each break
                p.push_some(transfer, source.position, 0, 3)
            p.sender.push(*transfer.key, 1, transfer.sources[1], 0, 2)
            finish(p, transfer)
            assert p.sender.counters.connections_lost_total == 6


@pytest.mark.failure_edge("P dies mid-transfer")
def test_a_connection_that_breaks_again_and_again_fails_the_session() -> None:
    config = replace(FAST, max_connect_failures=3)
    with tcp_pair(config=config) as p:
        with closing(CuttingProxy(p.receiver.addresses[0], [70, 70, 70, None])) as proxy:
            transfer = p.transfer(num_tokens=8)
            p.expect(transfer)
            open_through(p, proxy, transfer)
            p.push(transfer)
            p.until(lambda: len(p.events(SendFailed)) == 1)
            failed = p.events(SendFailed)[0]
            assert isinstance(failed, SendFailed)
            assert isinstance(failed.error, PeerLost)
            later = p.transfer(num_tokens=8)
            p.expect(later)
            open_through(p, proxy, later)
            p.push(later)  # the peer is back: nothing of the failure sticks
            finish(p, later)


def test_a_receiver_that_lets_sessions_in_and_then_breaks_off_is_given_up() -> None:
    """It answers each time, but no run ever arrives."""
    config = replace(FAST, max_connect_failures=3)
    with tcp_pair(config=config) as p, closing(StubbornReceiver()) as receiver:
        p.sender.open(SendSession(SessionId(3), 0, bytes(32), receiver.address))
        p.sender.push(SessionId(3), 0, 0, [SourceBlock(0, BlockId(1), 4)], 0, 3)
        for _ in range(3):
            receiver.let_in()
            receiver.read_run()
            assert receiver.sock is not None
            receiver.sock.close()
        p.until(lambda: len(p.events(SendFailed)) == 1)
        failed = p.events(SendFailed)[0]
        assert isinstance(failed, SendFailed)
        assert isinstance(failed.error, PeerLost)
        receiver.listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            receiver.listener.accept()  # it is not tried again


def test_a_receiver_of_another_version_fails_the_session_at_once() -> None:
    with tcp_pair() as p, socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        p.sender.open(SendSession(SessionId(3), 0, bytes(32), address))
        p.sender.push(SessionId(3), 0, 0, [SourceBlock(0, BlockId(1), 4)], 0, 3)
        sock, _ = listener.accept()
        with closing(sock):
            sock.sendall(wire.pack_hello(wire.Hello(9, "decode-9")))
            p.until(lambda: len(p.events(SendFailed)) == 1)
        failed = p.events(SendFailed)[0]
        assert isinstance(failed, SendFailed)
        assert "decode-9 speaks version 9" in failed.error.message


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:", "host.invalid:80", ":80"])
def test_an_address_that_is_none_fails_the_session(address: str) -> None:
    with tcp_pair() as p:
        p.sender.open(SendSession(SessionId(3), 0, bytes(32), address))
        p.sender.push(SessionId(3), 0, 0, [SourceBlock(0, BlockId(1), 4)], 0, 3)
        p.until(lambda: len(p.events(SendFailed)) == 1)


# ---- the sender's memory, fairness and rate


def big_layout() -> KVLayout:
    """32 MiB a block: more than two sockets hold."""
    slot = SlotFormat("plain", "float32", 1024)
    return KVLayout(16, (KVGroup(GroupKind.FULL_ATTENTION, tuple(range(32)), 8, slot),))


def test_a_closed_session_is_read_no_more_although_a_run_is_half_sent() -> None:
    layout = big_layout()
    pool = bytearray(os.urandom(1 << 20)) * (3 * layout.block_bytes >> 20)
    original = bytes(pool)
    events: list[MoverEvent] = []
    sender = TcpSender(memoryview(pool), layout, events.append, TransferConfig())
    with closing(StubbornReceiver()) as receiver, closing(sender):
        for session in (1, 2):
            sender.open(SendSession(SessionId(session), 0, bytes(32), receiver.address))
        sender.push(SessionId(1), 0, 0, [SourceBlock(0, BlockId(1), 16)], 0, 32)
        sender.push(SessionId(1), 0, 0, [SourceBlock(1, BlockId(2), 16)], 0, 32)
        receiver.let_in()
        time.sleep(0.2)  # the sockets are full, the run is half on the wire
        assert sender.counters.sent_runs_total == 0
        sender.push(SessionId(2), 0, 0, [SourceBlock(0, BlockId(2), 16)], 0, 1)
        sender.close_session(SessionId(1), 0)
        deadline = time.monotonic() + 5
        while SessionDrained(SessionId(1), 0) not in events:
            assert time.monotonic() < deadline, "drained only when the receiver reads"
            time.sleep(0.001)
        pool[layout.block_bytes : 2 * layout.block_bytes] = bytes(layout.block_bytes)
        header, payload = receiver.read_run()
        assert header.session == 1
        assert payload == original[layout.block_bytes : 2 * layout.block_bytes]
        assert crc32c(payload) == header.checksum
        opened, _ = wire.parse_open(receiver.read(wire.FRAME_BYTES))
        assert opened == (2, 0)  # the queued run of session 1 was dropped
        header, payload = receiver.read_run()
        assert (header.session, crc32c(payload)) == (2, header.checksum)


def test_a_closed_session_is_finished_although_only_its_header_is_half_sent() -> None:
    config = replace(FAST, link_rate_bytes_s=2000.0)  # slices of ten bytes
    with tcp_pair(config=config) as p, closing(StubbornReceiver()) as receiver:
        original = bytes(p.source)
        p.sender.open(SendSession(SessionId(1), 0, bytes(32), receiver.address))
        p.sender.push(SessionId(1), 0, 0, [SourceBlock(0, BlockId(1), 4)], 0, 1)
        receiver.let_in()
        frame = receiver.read(15)
        p.sender.close_session(SessionId(1), 0)
        p.until(p.saw(SessionDrained(SessionId(1), 0)))
        p.source[:] = bytes(len(p.source))
        header = wire.parse_run(frame + receiver.read(wire.FRAME_BYTES - 15))
        payload = receiver.read(header.num_bytes)
        start = p.layout.block_bytes
        assert payload == original[start : start + header.num_bytes]


def test_nothing_follows_the_first_open_before_it_is_answered() -> None:
    with tcp_pair() as p, closing(StubbornReceiver()) as receiver:
        for session in (1, 2):
            p.sender.open(SendSession(SessionId(session), 0, bytes(32), receiver.address))
            p.sender.push(SessionId(session), 0, 0, [SourceBlock(0, BlockId(1), 4)], 0, 1)
        sock = receiver.greet()
        key, _ = wire.parse_open(receiver.read(wire.FRAME_BYTES))
        sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(20)
        receiver.accept(key)
        assert receiver.read(1)


def test_what_is_queued_later_does_not_keep_what_is_ready_from_leaving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tcp_pair(num_blocks=200) as p:
        transfer, seen, gate = queued(p, monkeypatch)
        gate.set()
        p.sender.push(*transfer.key, 1, transfer.sources[1], 0, 2)
        finish(p, transfer)
        assert seen.count("push") == 41
        assert seen.index("send") <= link_sender.MAX_COMMANDS_A_TURN


def test_who_comes_or_goes_does_not_wait_for_what_others_have_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tcp_pair(num_blocks=200) as p:
        transfer, seen, gate = queued(p, monkeypatch)
        p.sender.close_session(*transfer.key)
        gate.set()
        p.until(p.saw(SessionDrained(*transfer.key)))
        assert seen == ["push"] * 40 + ["close_session"], "none of them is sent for nothing"


def queued(p: Pair, monkeypatch: pytest.MonkeyPatch) -> tuple[Transfer, list[str], threading.Event]:
    """A transfer whose 40 pushes wait on a connection that is there; what the mover does with them once it is let."""
    first = p.start(num_tokens=8)
    p.push(first)
    finish(p, first)
    transfer = p.start(num_tokens=4 * 40)
    seen: list[str] = []
    gate = threading.Event()
    (link,) = p.sender._links.values()
    for owner, name in (
        (p.sender._outbox, "push"),
        (p.sender._outbox, "close_session"),
        (link, "send"),
    ):
        monkeypatch.setattr(owner, name, noting(seen, name, getattr(owner, name), gate))
    for source in transfer.sources[0]:
        p.push_some(transfer, source.position, 0, 3)
    return transfer, seen, gate


def noting(
    seen: list[str], name: str, call: Callable[..., Any], gate: threading.Event
) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        assert gate.wait(20)
        seen.append(name)
        return call(*arguments)

    return noted


def test_a_stopped_receiver_does_not_hold_up_another() -> None:
    with tcp_pair() as p, closing(StubbornReceiver()) as stopped:
        p.sender.open(SendSession(SessionId(1), 0, bytes(32), stopped.address))
        for _ in range(40):
            p.sender.push(
                SessionId(1), 0, 0, [SourceBlock(i, BlockId(1 + i), 4) for i in range(60)], 0, 3
            )
        transfer = p.start(num_tokens=60)
        p.push(transfer)
        finish(p, transfer)


# ---- nothing is left


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_threads_and_descriptors_are_given_back() -> None:
    with tcp_pair() as p:  # what the first use of anything keeps
        finish(p)
    files, threads = num_open_files(), threading.active_count()
    for _ in range(5):
        with tcp_pair() as p, raw_peer(p) as peer:
            transfer = p.start(num_tokens=30)
            peer.open(transfer)
            p.push(transfer)
    assert (num_open_files(), threading.active_count()) == (files, threads)


def test_a_departed_receiver_leaves_nothing_at_the_sender() -> None:
    with tcp_pair() as p:
        files = num_open_files()
        for _ in range(3):
            with tcp_pair() as q:
                transfer = q.transfer(num_tokens=8)
                q.expect(transfer)
                p.sender.open(SendSession(*transfer.key, transfer.secret, q.receiver.addresses[0]))
                for index, sources in enumerate(transfer.sources):
                    p.sender.push(
                        *transfer.key, index, sources, 0, len(p.layout.groups[index].layers)
                    )
                finish(q, transfer)
                p.sender.close_session(*transfer.key)
                p.until(p.saw(SessionDrained(*transfer.key)))
        sender = p.sender
        assert isinstance(sender, TcpSender)
        p.until(lambda: not sender._links)  # goes after the descriptor
        assert num_open_files() == files


class Turns:
    """A link that counts its turns; it can send so often, and a command comes in one of them."""

    def __init__(self, num_left: int, commands: deque[Any], command_at: int = 0) -> None:
        self.num_left, self.num_taken = num_left, 0
        self._commands, self._command_at = commands, command_at

    @property
    def can_send(self) -> bool:
        return self.num_left > 0

    def send(self, max_bytes: int, now_s: float) -> int:
        self.num_left -= 1
        self.num_taken += 1
        if self.num_taken == self._command_at:
            self._commands.append(None)
        return max_bytes


@pytest.mark.parametrize(("num_left", "command_at", "num_taken"), [(9, 0, 3), (2, 0, 2), (9, 1, 1)])
def test_a_link_that_is_alone_has_all_turns_but_the_last_unless_a_command_comes(
    num_left: int, command_at: int, num_taken: int
) -> None:
    mover: Any = LinkSender.__new__(LinkSender)
    mover._commands = deque()
    link = Turns(num_left, mover._commands, command_at)
    mover._send_ahead(link, 0.0)
    assert link_sender.MAX_TURNS_ALONE == 4
    assert link.num_taken == num_taken
