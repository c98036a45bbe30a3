"""What is special about shm: peers that lie about memory, blocks used anew, and the directory they meet in."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from core.errors import ConfigError, PeerLost
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from kvtransfer.events import ReceiveFailed, RunAdmitted, SendFailed, SessionComplete
from kvtransfer.session import SendSession
from kvtransfer.transports.base import COPY_SLICE_BYTES
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.wire import Announcement, Entry
from kvtransfer.transports.shm import sockets
from tests.kvtransfer.harness import FAST, Pair, Transfer, make_layout, pair
from tests.kvtransfer.tcp_peers import HELLO


class RawShmPeer:
    """A sender made of bytes and descriptors, so that it can say anything."""

    def __init__(self, p: Pair) -> None:
        self.pair = p
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(p.receiver.addresses[0])

    def greet(self, *descriptors: int) -> None:
        socket.send_fds(self.sock, [HELLO], descriptors)

    def open(self, transfer: Transfer) -> None:
        self.greet(self.pair.memory.descriptor)
        assert len(self.sock.recv(wire.FRAME_BYTES)) == wire.FRAME_BYTES
        self.sock.sendall(wire.pack_open(transfer.key, transfer.secret))
        assert self.answer().is_accepted

    def announce(self, transfer: Transfer, at: int = 0, **changes: Any) -> None:
        """All layers of one block of group 0; changes: what to falsify."""
        p = self.pair
        source = next(s for s in transfer.sources[0] if s.position == at)
        place = p.layout.layer_run(0, 0, 3)
        entry = Entry(at, source.valid_slots, source.block, 0, p.memory.generations[source.block])
        entry = entry._replace(**{k: v for k, v in changes.items() if k in Entry._fields})
        session, attempt = transfer.key
        head = Announcement(False, attempt, session, 0, 0, 0, 3, 1, *place, 7)
        head = head._replace(**{k: v for k, v in changes.items() if k in Announcement._fields})
        self.sock.sendall(wire.pack_runs(head, [entry]))

    def answer(self) -> wire.Answer:
        data = b""
        while len(data) < wire.ANSWER_BYTES:
            piece = self.sock.recv(wire.ANSWER_BYTES - len(data))
            assert piece, "closed instead of an answer"
            data += piece
        return wire.parse_answers(memoryview(data))[0]

    def is_closed(self) -> bool:
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True


@contextmanager
def raw_peer(p: Pair) -> Iterator[RawShmPeer]:
    peer = RawShmPeer(p)
    with closing(peer.sock):
        yield peer


def test_first_bytes_without_a_pool_are_refused() -> None:
    with pair("shm") as p, raw_peer(p) as peer, open("/dev/null", "rb") as no_pool:
        peer.greet()
        assert peer.is_closed()
        with raw_peer(p) as other:
            other.greet(no_pool.fileno())
            assert other.is_closed()
        p.until(lambda: p.receiver.counters.refused_connections_total == 2)


def test_a_peer_without_a_session_announces_in_vain() -> None:
    with pair("shm") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        before = p.poison()
        peer.greet(p.memory.descriptor)
        peer.announce(transfer)
        assert peer.is_closed()
        assert bytes(p.destination) == before
        assert p.receiver.counters.refused_connections_total == 1


@pytest.mark.parametrize(
    "lie",
    [
        {"block": 64},
        {"block": (1 << 32) - 1},
        {"offset_bytes": 1 << 40},
        {"num_bytes": 1 << 40},
        {"num_bytes": 8},
        {"num_blocks": 0},
        {"num_blocks": wire.MAX_ENTRIES + 1},
        {"group": 9},
        {"num_layers": 4},
        {"rank": 1},
        {"valid_slots": 5},
    ],
    ids=str,
)
def test_an_announcement_that_fits_no_pool_ends_the_connection(lie: dict[str, int]) -> None:
    with pair("shm") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        before = p.poison()
        peer.open(transfer)
        peer.announce(transfer, **lie)
        assert peer.is_closed()
        assert bytes(p.destination) == before
        assert not p.events(RunAdmitted)


def test_an_offset_beyond_the_last_block_reads_nothing_outside() -> None:
    """The last block of the pool, from its end on."""
    with pair("shm") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.open(transfer)
        offset = p.layout.block_bytes - p.layout.layer_run(0, 0, 3).num_bytes + 1
        peer.announce(transfer, block=p.num_blocks - 1, offset_bytes=offset)
        assert peer.is_closed()


@pytest.mark.parametrize("transfer_again", [False, True])
def test_a_block_that_is_used_anew_is_a_miss(transfer_again: bool) -> None:
    with pair("shm") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.open(transfer)
        block = transfer.sources[0][0].block
        announced = p.memory.generations[block]
        p.memory.generations[block] += 1
        peer.announce(transfer, generation=announced)
        assert not peer.answer().is_accepted
        assert not p.events(RunAdmitted)
        assert p.receiver.counters.late_runs_total == 1
        if transfer_again:
            peer.announce(transfer)
            assert peer.answer().is_accepted
            assert len(p.events(RunAdmitted)) == 1
        p.give_up(transfer)
        p.assert_idle()


def test_a_pool_that_its_owner_has_closed_is_a_miss() -> None:
    with pair("shm") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.open(transfer)
        p.memory.close()
        peer.announce(transfer)
        assert not peer.answer().is_accepted
        assert not p.events(RunAdmitted)


def test_checksums_by_choice_catch_what_was_changed_after_it_was_announced() -> None:
    with pair("shm") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.open(transfer)
        peer.announce(transfer, is_checked=True, checksum=1)
        assert not peer.answer().is_accepted
        p.until(lambda: p.receiver.counters.checksum_errors_total == 1)


def test_with_checksums_everything_arrives() -> None:
    with pair("shm", config=replace(FAST, shm_checksums=True)) as p:
        transfer = p.start(num_tokens=22)
        p.push(transfer)
        p.until(p.saw(SessionComplete(*transfer.key)))
        assert bytes(p.destination) == p.expected(transfer)


def test_more_blocks_than_one_announcement_names() -> None:
    with pair("shm", num_blocks=700) as p:
        transfer = p.start(num_tokens=4 * 300)
        p.sender.push(*transfer.key, 0, transfer.sources[0], 0, 3)
        p.until(lambda: len(p.events(RunAdmitted)) == 300)
        p.sender.push(*transfer.key, 1, transfer.sources[1], 0, 2)
        p.until(p.saw(SessionComplete(*transfer.key)))
        assert p.sender.counters.sent_runs_total == 600
        assert bytes(p.destination) == p.expected(transfer)


def test_where_nobody_listens_a_session_fails_at_once() -> None:
    with pair("shm") as p:
        transfer = p.transfer(num_tokens=8)
        p.sender.open(SendSession(*transfer.key, transfer.secret, "/nowhere/kv-0"))
        p.push(transfer)
        p.until(lambda: bool(p.events(SendFailed)))
        (failed,) = p.events(SendFailed)
        assert isinstance(failed, SendFailed)
        assert "/nowhere/kv-0" in failed.error.message


def test_the_directory_is_this_users_and_what_the_killed_left_is_swept(tmp_path: Path) -> None:
    folder = tmp_path / "ipc"
    first, path = sockets.listen(str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    first.close()  # as by SIGKILL: the path stays
    second, other = sockets.listen(str(folder))
    third, _ = sockets.listen(str(folder))
    assert not Path(path).exists()
    assert Path(other).exists()
    sockets.connect(other).close()
    second.close()
    third.close()


def test_what_belongs_to_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, path = sockets.listen(str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PeerLost, match="another user listens there"):
        sockets.connect(path)
    with pytest.raises(ConfigError, match="belongs to another user"):
        sockets.listen(str(tmp_path))
    listener.close()


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/" + "x" * 200])
def test_a_directory_that_will_not_do_is_refused_by_name(folder: str) -> None:
    with pytest.raises(ConfigError, match=f"--ipc-dir: {folder}"):
        sockets.listen(folder)


def test_the_path_goes_when_the_receiver_does() -> None:
    with pair("shm") as p:
        path = Path(p.receiver.addresses[0])
        assert path.is_socket()
    assert not path.exists()


def test_an_announcement_that_names_a_block_twice_harms_nothing() -> None:
    with pair("shm") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=8)
        peer.open(transfer)
        source = transfer.sources[0][0]
        entry = Entry(0, source.valid_slots, source.block, 0, 0)
        session, attempt = transfer.key
        place = p.layout.layer_run(0, 0, 3)
        head = Announcement(False, attempt, session, 0, 0, 0, 3, 2, *place, 7)
        peer.sock.sendall(wire.pack_runs(head, [entry, entry]))
        assert peer.answer().is_accepted
        assert len(p.events(RunAdmitted)) == 1
        assert p.receiver.counters.duplicate_runs_total == 1
        p.give_up(transfer)
        p.assert_idle()


def announce_all(peer: RawShmPeer, transfer: Transfer, **lies: dict[str, int]) -> None:
    """All layers of all blocks of group 0, checked; lies: fields of the entry of a position, by `at_N`."""
    p = peer.pair
    place = p.layout.layer_run(0, 0, 3)
    entries = []
    for source in transfer.sources[0]:
        start = source.block * p.layout.block_bytes + place.offset_bytes
        checksum = crc32c(p.memory.buffer[start : start + place.num_bytes])
        entry = Entry(source.position, source.valid_slots, source.block, checksum, 0)
        entries.append(entry._replace(**lies.get(f"at_{source.position}", {})))
    session, attempt = transfer.key
    head = Announcement(True, attempt, session, 0, 0, 0, 3, len(entries), *place, 7)
    peer.sock.sendall(wire.pack_runs(head, entries))


def test_a_changed_block_does_not_hide_the_wrong_checksum_of_another() -> None:
    with pair("shm") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=12)
        peer.open(transfer)
        announce_all(peer, transfer, at_0={"checksum": 1}, at_2={"generation": 9})
        assert not peer.answer().is_accepted
        assert not p.events(RunAdmitted)
        assert len(p.events(ReceiveFailed)) == 1


def test_a_changed_block_costs_its_own_run_only() -> None:
    with pair("shm") as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=12)
        peer.open(transfer)
        announce_all(peer, transfer, at_1={"generation": 9})
        assert not peer.answer().is_accepted
        admitted = [e.position for e in p.events(RunAdmitted) if isinstance(e, RunAdmitted)]
        assert admitted == [0, 2]
        assert not p.events(ReceiveFailed)


def test_a_checked_run_that_is_there_in_part_brings_the_rest() -> None:
    with pair("shm", layout=make_layout(num_layers=(3,))) as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=12)
        before = p.poison()
        peer.open(transfer)
        source = transfer.sources[0][1]
        place = p.layout.layer_run(0, 1, 1)
        head = Announcement(False, transfer.attempt, transfer.session, 0, 0, 1, 1, 1, *place, 6)
        peer.sock.sendall(wire.pack_runs(head, [Entry(1, source.valid_slots, source.block, 0, 0)]))
        assert peer.answer().is_accepted
        announce_all(peer, transfer)
        assert peer.answer().is_accepted
        assert not p.events(ReceiveFailed)
        p.until(p.saw(SessionComplete(*transfer.key)))
        assert bytes(p.destination) == p.expected(transfer, before=before)


def test_more_than_a_slice_at_once_is_taken_run_by_run() -> None:
    """D holds to its own limit, whatever a peer announces."""
    layout = KVLayout(
        16, (KVGroup(GroupKind.FULL_ATTENTION, (0,), 8, SlotFormat.of("float32", 256)),)
    )
    assert 20 * layout.block_bytes > COPY_SLICE_BYTES
    with pair("shm", layout=layout) as p, raw_peer(p) as peer:
        transfer = p.start(num_tokens=16 * 20)
        peer.open(transfer)
        place = layout.layer_run(0, 0, 1)
        head = Announcement(False, transfer.attempt, transfer.session, 0, 0, 0, 1, 20, *place, 7)
        entries = [Entry(s.position, 16, s.block, 0, 0) for s in transfer.sources[0]]
        peer.sock.sendall(wire.pack_runs(head, entries))
        assert peer.answer().is_accepted
        assert bytes(p.destination) == p.expected(transfer)
