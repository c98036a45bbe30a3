"""What goes over a data connection. All integers little-endian.

Sender to receiver, frames of FRAME_BYTES each; a RUN frame is followed by its payload:

    HELLO  magic, protocol version, name          first, and only once
    POOL   where the sender's pool lies           second, only where the receiver reads it by an engine; what
                                                  the engine needs to know of its other end follows
    OPEN   session, attempt, secret               before the first run of a session
    RUN    the fields of RunHeader                its payload follows
    RUNS   the fields of Announcement             its entries follow, ENTRY_BYTES each, and over tcp
                                                  the payloads of all of them

Receiver to sender: a HELLO frame, then answers of ANSWER_BYTES each, to an OPEN or to a RUN.

A sender waits for HELLO before its first OPEN, and for the answer to its first OPEN before it sends
more; then nothing waits. A receiver believes no length: `runs.RunPlaces`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from core.errors import TransferError
from core.ids import SessionId
from kvtransfer.session import SECRET_BYTES, SessionKey
from kvtransfer.transports.runs import RunHeader

MAGIC = b"BATONKV\0"
PROTOCOL_VERSION = 1
"""Version of everything in this module; peers one apart serve together."""

FRAME_BYTES = 64
ANSWER_BYTES = 24

_HELLO = struct.Struct("<8sHH52s")
_OPEN = struct.Struct(f"<B7xQI12x{SECRET_BYTES}s")
_RUN = struct.Struct("<B7xQIHHIHHIQIQI4x")  # after the kind, the fields of RunHeader in order
_RUNS = struct.Struct("<B?2xIQHHHHI4xQQQ8x")  # after the kind, the fields of Announcement in order
_NUM_BLOCKS, _NUM_BLOCKS_AT = struct.Struct("<I"), 24
_POOL = struct.Struct("<B3xIQQQQ16s8x")  # after the kind, the fields of RemotePool in order
_DESCRIPTION_BYTES, _DESCRIPTION_BYTES_AT = struct.Struct("<I"), 4
MAX_DESCRIPTION_BYTES = 32 * 1024
"""Most bytes of what an engine says of itself."""

_ENTRY_FIELDS = "IIIIQ"
_NUM_FIELDS = len(_ENTRY_FIELDS)
ENTRY_BYTES = struct.calcsize("<" + _ENTRY_FIELDS)
MAX_ENTRIES = 256
"""Most blocks of one announcement."""

_ANSWER = struct.Struct("<BBxxIQQ")
assert {_HELLO.size, _OPEN.size, _RUN.size, _RUNS.size, _POOL.size} == {FRAME_BYTES}
assert _ANSWER.size == ANSWER_BYTES


class FrameKind(IntEnum):
    """First byte of a frame after HELLO, and of an answer."""

    OPEN = 1
    RUN = 2
    RUNS = 3
    POOL = 4


class Announcement(NamedTuple):
    """Layers of several blocks: what follows over tcp, or lies ready in memory that the receiver has mapped.

    is_checked: whether the entries bear checksums.
    offset_bytes, num_bytes: where in each of the blocks the run lies, and how long it is.
    number: the sender's name for all of them; one answer, which is yes when all are in the pool.
    """

    is_checked: bool
    attempt: int
    session: SessionId
    rank: int
    group: int
    first_layer: int
    num_layers: int
    num_blocks: int
    offset_bytes: int
    num_bytes: int
    number: int

    @property
    def key(self) -> SessionKey:
        """The session that the runs belong to."""
        return (self.session, self.attempt)


class Entry(NamedTuple):
    """One block of an announcement.

    block, generation: the sender's block, and which of its lives is meant.
    checksum: CRC-32C of the run's bytes, 0 where they are not checked.
    """

    position: int
    valid_slots: int
    block: int
    checksum: int
    generation: int


class Entries(NamedTuple):
    """All entries of an announcement, field by field."""

    positions: Sequence[int]
    valid_slots: Sequence[int]
    blocks: Sequence[int]
    checksums: Sequence[int]
    generations: Sequence[int]


class Hello(NamedTuple):
    """How a side introduces itself."""

    version: int
    name: str


class RemotePool(NamedTuple):
    """A sender's pool as an engine reads it: a header with generations, then the blocks (`pool_memory`).

    description_bytes: length of what follows: the engine's own words about its end.
    address: of the header, in the sender's process.
    epoch: of the pool, EPOCH_BYTES; what lies at the address is another one when it is not there any more.
    """

    description_bytes: int
    address: int
    header_bytes: int
    block_bytes: int
    num_blocks: int
    epoch: bytes


class Answer(NamedTuple):
    """What a receiver says to an OPEN (number 0) or to a RUN."""

    kind: FrameKind
    is_accepted: bool
    key: SessionKey
    number: int


def pack_hello(hello: Hello) -> bytes:
    """A HELLO frame; a long name is cut."""
    return _HELLO.pack(MAGIC, hello.version, 0, hello.name.encode()[:52])


def parse_hello(frame: bytes | bytearray) -> Hello:
    """The peer's introduction; TransferError when it speaks something else."""
    magic, version, _, name = _HELLO.unpack(frame)
    if magic != MAGIC:
        raise TransferError(f"peer does not speak this protocol: it begins with {magic!r}")
    return Hello(version, name.rstrip(b"\0").decode(errors="replace"))


def check_versions(ours: Hello, theirs: Hello) -> None:
    """Raise unless both sides are at most one version apart; names both."""
    if abs(ours.version - theirs.version) > 1:
        raise TransferError(
            f"data protocol: {theirs.name or 'peer'} speaks version {theirs.version}, "
            f"{ours.name or 'this side'} speaks {ours.version}; at most one apart is served"
        )


def pack_open(key: SessionKey, secret: bytes) -> bytes:
    """An OPEN frame."""
    return _OPEN.pack(FrameKind.OPEN, *key, secret)


def parse_open(frame: bytes | bytearray) -> tuple[SessionKey, bytes]:
    """Session and secret of an OPEN frame."""
    _, session, attempt, secret = _OPEN.unpack(frame)
    return (SessionId(session), attempt), secret


def pack_pool(pool: RemotePool, description: bytes) -> bytes:
    """A POOL frame and the description; TransferError where that has more than MAX_DESCRIPTION_BYTES."""
    if not pool.description_bytes == len(description) <= MAX_DESCRIPTION_BYTES:
        raise TransferError(
            f"an engine's description has {len(description)} bytes; at most {MAX_DESCRIPTION_BYTES} are sent"
        )
    return _POOL.pack(FrameKind.POOL, *pool) + description


def parse_pool(frame: bytes | bytearray | memoryview) -> RemotePool:
    """A pool without the description; nothing in it is checked."""
    return RemotePool._make(_POOL.unpack(frame)[1:])


def num_description_bytes(frame: bytes | bytearray | memoryview) -> int:
    """How many bytes follow a POOL frame; TransferError where they are more than MAX_DESCRIPTION_BYTES."""
    (count,) = _DESCRIPTION_BYTES.unpack_from(frame, _DESCRIPTION_BYTES_AT)
    if count > MAX_DESCRIPTION_BYTES:
        raise TransferError(
            f"peer describes itself in {count} bytes, more than {MAX_DESCRIPTION_BYTES}"
        )
    return int(count)


def pack_run(header: RunHeader) -> bytes:
    """A RUN frame."""
    return _RUN.pack(FrameKind.RUN, *header)


def parse_run(frame: bytes | bytearray) -> RunHeader:
    """Header of a RUN frame; nothing in it is checked yet."""
    return RunHeader._make(_RUN.unpack(frame)[1:])


def pack_runs(
    announcement: Announcement, entries: Iterable[tuple[int, int, int, int, int]]
) -> bytes:
    """A RUNS frame and its entries, each with the fields of Entry."""
    frame = _RUNS.pack(FrameKind.RUNS, *announcement)
    fields = [field for entry in entries for field in entry]
    return frame + _entries_of(len(fields) // _NUM_FIELDS).pack(*fields)


def parse_runs(frame: bytes | bytearray | memoryview) -> Announcement:
    """An announcement without its entries; nothing in it is checked."""
    return Announcement._make(_RUNS.unpack(frame)[1:])


def num_entries(frame: bytes | bytearray | memoryview) -> int:
    """How many entries follow a RUNS frame; TransferError unless 1 to MAX_ENTRIES."""
    (count,) = _NUM_BLOCKS.unpack_from(frame, _NUM_BLOCKS_AT)
    if not 1 <= count <= MAX_ENTRIES:
        raise TransferError(f"peer announces {count} blocks at once, not 1 to {MAX_ENTRIES}")
    return int(count)


def parse_entries(buffer: bytes | bytearray | memoryview) -> Entries:
    """The entries of an announcement, at least one; nothing in them is checked yet."""
    fields = _entries_of(len(buffer) // ENTRY_BYTES).unpack(buffer)
    return Entries(*[fields[at::_NUM_FIELDS] for at in range(_NUM_FIELDS)])


@cache
def _entries_of(count: int) -> struct.Struct:
    """So many entries in a row."""
    return struct.Struct("<" + _ENTRY_FIELDS * count)


def pack_answer(answer: Answer) -> bytes:
    """One answer."""
    return _ANSWER.pack(
        answer.kind, answer.is_accepted, answer.key[1], answer.key[0], answer.number
    )


def parse_answers(buffer: memoryview) -> list[Answer]:
    """All answers of a buffer whose length is a multiple of ANSWER_BYTES."""
    return [
        Answer(_answer_kind(kind), bool(accepted), (SessionId(session), attempt), number)
        for kind, accepted, attempt, session, number in _ANSWER.iter_unpack(buffer)
    ]


def _answer_kind(value: int) -> FrameKind:
    try:
        return FrameKind(value)
    except ValueError:
        raise TransferError(f"peer sent an answer of unknown kind {value}") from None
