"""D's end of tcp: strangers, garbage, headers that lie, peers that are slow or stopped."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ChecksumMismatch, LayoutMismatch
from core.ids import SessionId
from kvtransfer.events import (
    ReceiveFailed,
    RunAdmitted,
)
from kvtransfer.transports.links import wire
from kvtransfer.transports.tcp import inbound, sockets
from kvtransfer.transports.tcp.inbound import TcpInbound
from tests.kvtransfer.harness import FAST, make_layout
from tests.kvtransfer.tcp_peers import (
    HELLO,
    finish,
    raw_peer,
    tcp_pair,
)

WAKE_BYTES = inbound._WAKE_BYTES


@pytest.fixture(autouse=True)
def takes_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it comes, however short: what is under test is what becomes of parts."""
    monkeypatch.setattr(inbound, "_WAKE_BYTES", 1)


# ---- strangers


@pytest.mark.parametrize(
    "bytes_said",
    [
        b"GET / HTTP/1.1\r\nHost: baton\r\n\r\n" * 8,
        bytes(200),
        secrets.token_bytes(500),
        HELLO + bytes(64),
        HELLO + b"\x02" + bytes(63),
        HELLO + b"\x07" + bytes(63),
        HELLO + wire.pack_open((SessionId(1), 0), bytes(32)),
    ],
    ids=["http", "zeros", "random", "zero frame", "run unasked", "unknown kind", "no session"],
)
def test_strangers_are_refused_and_counted(bytes_said: bytes) -> None:
    with tcp_pair() as p, raw_peer(p) as stranger:
        transfer = p.start(num_tokens=8)
        before = p.poison()
        stranger.say(bytes_said)
        while not stranger.is_closed():
            pass
        p.until(lambda: p.receiver.counters.refused_connections_total == 1)
        assert bytes(p.destination) == before
        p.push(transfer)
        finish(p, transfer)


def test_a_run_before_its_open_is_a_strangers() -> None:
    with tcp_pair() as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        before = p.poison()
        peer.greet()
        peer.say(peer.run(p, transfer))
        assert peer.is_closed()
        assert bytes(p.destination) == before
        assert p.receiver.counters.refused_connections_total == 1


def test_a_run_of_a_session_that_this_peer_has_not_opened_goes_to_scratch() -> None:
    with tcp_pair() as p, raw_peer(p) as peer:
        mine, other = p.start(num_tokens=8), p.start(num_tokens=8)
        before = p.poison()
        peer.open(mine)
        peer.say(peer.run(p, other))
        assert not peer.answer().is_accepted
        assert bytes(p.destination) == before
        peer.say(peer.run(p, mine))
        assert peer.answer().is_accepted


def test_a_wrong_secret_on_a_trusted_connection_costs_that_session_only() -> None:
    with tcp_pair() as p, raw_peer(p) as peer:
        mine, other = p.start(num_tokens=8), p.start(num_tokens=8)
        peer.open(mine)
        peer.say(wire.pack_open(other.key, bytes(32)))
        assert not peer.answer().is_accepted
        peer.say(peer.run(p, mine))
        assert peer.answer().is_accepted
        assert p.receiver.counters.refused_sessions_total == 1


def test_a_silent_stranger_is_dropped_in_time() -> None:
    config = replace(FAST, connect_timeout_s=0.1)
    with tcp_pair(config=config) as p, raw_peer(p) as silent, raw_peer(p) as greeter:
        greeter.greet()
        assert silent.is_closed()
        assert greeter.is_closed()
        p.until(lambda: p.receiver.counters.refused_connections_total == 2)


@pytest.mark.parametrize("version", [0, 2])
def test_a_version_one_apart_is_served(version: int) -> None:
    with tcp_pair() as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.say(wire.pack_hello(wire.Hello(version, "old")))
        peer.read(wire.FRAME_BYTES)
        peer.say(wire.pack_open(transfer.key, transfer.secret))
        assert peer.answer().is_accepted


def test_another_version_is_refused_and_told_ours() -> None:
    with tcp_pair() as p, raw_peer(p) as peer:
        peer.say(wire.pack_hello(wire.Hello(7, "future")))
        assert wire.parse_hello(peer.read(wire.FRAME_BYTES)).version == wire.PROTOCOL_VERSION
        assert peer.is_closed()
        assert p.receiver.counters.refused_connections_total == 1


@given(data=st.lists(st.binary(max_size=200), min_size=1, max_size=4), trusted=st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_bytes_reach_the_pool_or_stop_the_receiver(data: list[bytes], trusted: bool) -> None:
    with tcp_pair() as p:
        transfer = p.start(num_tokens=8)
        before = p.poison()
        with raw_peer(p) as peer:
            if trusted:
                peer.open(transfer)
            else:
                peer.greet()
            try:
                peer.say(*data)
            except OSError:
                pass
        with raw_peer(p) as next_peer:
            next_peer.greet()
        assert bytes(p.destination) == before


# ---- headers that lie


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bytes": 1 << 40},
        {"num_bytes": 1},
        {"num_bytes": 0},
        {"group": 2},
        {"rank": 1},
        {"num_layers": 0},
        {"num_layers": 4},
        {"first_layer": 1},
        {"first_layer": 65535},
        {"valid_slots": 0},
        {"valid_slots": 5},
    ],
    ids=str,
)
def test_no_length_or_place_of_the_wire_is_believed(changes: dict[str, int]) -> None:
    with tcp_pair() as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        before = p.poison()
        peer.open(transfer)
        peer.say(peer.run(p, transfer, **changes))
        assert peer.is_closed()
        assert bytes(p.destination) == before
        failed = p.events(ReceiveFailed)
        assert len(failed) == 1
        with raw_peer(p) as again:
            again.greet()
            again.say(wire.pack_open(transfer.key, transfer.secret))
            assert not again.answer().is_accepted


def test_a_length_that_fits_another_layout_names_both() -> None:
    with tcp_pair() as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.open(transfer)
        peer.say(peer.run(p, transfer, num_bytes=1234))
        p.until(lambda: len(p.events(ReceiveFailed)) == 1)
        failed = p.events(ReceiveFailed)[0]
        assert isinstance(failed, ReceiveFailed)
        assert isinstance(failed.error, LayoutMismatch)
        assert "1234" in failed.error.message
        assert "768" in failed.error.message


def test_a_position_that_nobody_asked_for_is_not_written() -> None:
    with tcp_pair() as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        before = p.poison()
        peer.open(transfer)
        peer.say(peer.run(p, transfer, position=2**32 - 1))
        assert peer.answer().is_accepted
        assert bytes(p.destination) == before
        assert not p.events(RunAdmitted)


def test_wrong_bytes_fail_the_session_and_the_connection_lives_on() -> None:
    with tcp_pair() as p, raw_peer(p) as peer:
        transfer, other = p.start(num_tokens=8), p.start(num_tokens=8)
        peer.open(transfer)
        peer.say(wire.pack_open(other.key, other.secret))
        assert peer.answer().is_accepted
        peer.say(peer.run(p, transfer, checksum=1))
        assert not peer.answer().is_accepted
        peer.say(peer.run(p, other))
        assert peer.answer().is_accepted
        failed = p.events(ReceiveFailed)
        assert len(failed) == 1
        assert isinstance(failed[0], ReceiveFailed)
        assert isinstance(failed[0].error, ChecksumMismatch)
        assert p.receiver.counters.checksum_errors_total == 1


def test_a_run_in_any_number_of_pieces_is_one_run() -> None:
    with tcp_pair() as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.open(transfer)
        said = peer.run(p, transfer, 0) + peer.run(p, transfer, 1)
        for start in range(0, len(said), 37):
            peer.say(said[start : start + 37])
            if start % 370 == 0:
                time.sleep(0.001)
        assert peer.answer().is_accepted
        assert peer.answer().is_accepted
        assert len(p.events(RunAdmitted)) == 2


def test_a_stopped_peer_holds_nothing() -> None:
    with tcp_pair() as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.open(transfer)
        said = peer.run(p, transfer, 0)
        peer.say(said[: len(said) // 2])
        p.until(lambda: p.receiver.counters.received_bytes_total > 0)
        time.sleep(0.02)  # it waits for the rest, outside the block
        assert {state.name for state in p.give_up(transfer).values()} == {"FREE"}
        before = p.poison()
        peer.say(said[len(said) // 2 :])
        assert not peer.answer().is_accepted
        assert bytes(p.destination) == before
        assert p.receiver.counters.late_runs_total == 1


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_peer_that_goes_before_enough_has_come_is_noticed(
    monkeypatch: pytest.MonkeyPatch, is_reset: bool
) -> None:
    monkeypatch.setattr(inbound, "_WAKE_BYTES", WAKE_BYTES)
    with tcp_pair() as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.open(transfer)
        peer.say(peer.run(p, transfer)[:-1])
        time.sleep(0.05)  # the run is under way, and its rest is awaited
        if is_reset:
            linger = struct.pack("ii", 1, 0)
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        peer.sock.close()
        p.until(lambda: p.receiver.counters.connections_lost_total == 1)
        assert not p.events(RunAdmitted)


def test_a_run_that_drips_in_is_taken_when_its_rest_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[int] = []
    read = TcpInbound.read

    def noted(link: TcpInbound) -> None:
        reads.append(1)
        read(link)

    monkeypatch.setattr(TcpInbound, "read", noted)
    monkeypatch.setattr(inbound, "_WAKE_BYTES", WAKE_BYTES)
    layout = make_layout(block_size=16, num_layers=(3, 2), num_kv_heads=8)
    with tcp_pair(layout=layout) as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=16)
        peer.open(transfer)
        data = peer.run(p, transfer)
        assert len(data) > 20 * 512
        reads.clear()
        for start in range(0, len(data), 512):
            peer.say(data[start : start + 512])
            time.sleep(0.001)
        assert peer.answer().is_accepted
        assert len(reads) <= 4
        peer.say(peer.run(p, transfer))
        assert peer.answer().is_accepted, "the next frame is noticed, short as it is"


def test_a_mark_beyond_what_the_socket_holds_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listen = sockets.listen

    def listen_narrowly(host: str) -> socket.socket:
        listener = listen(host)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)  # inherited
        return listener

    monkeypatch.setattr(sockets, "listen", listen_narrowly)
    monkeypatch.setattr(inbound, "_WAKE_BYTES", WAKE_BYTES)
    layout = make_layout(block_size=16, num_layers=(3,), num_kv_heads=1024)
    with tcp_pair(layout=layout) as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=16)
        peer.open(transfer)
        data = peer.run(p, transfer)
        assert len(data) > WAKE_BYTES
        peer.say(data)
        assert peer.answer().is_accepted
