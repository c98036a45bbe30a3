"""The two files of a disk tier, and what may be believed of them.

    index    | header 64 | record of slot 0 | record of slot 1 | ...
    blocks   | block of slot 0 | block of slot 1 | ...

    header = | magic 8 | version u32 | record_bytes u32 | block_bytes u64 | checksum u64 | to 64: 0 |
    record = | hash 16 | group u32 | slot u32 | sequence u64 | digest 16 | fingerprint 16 | checksum u64 |

All little-endian; checksums are XXH3-64 of what stands before them. A record of zeros is a free slot. A slot is
written in three steps: its record becomes zeros, then the block is written, then the record. So a process that dies at
any moment leaves no record of a block that was not wholly written, and a record torn in two has a wrong checksum. A
machine that loses power may lose steps in any order: then the block's digest tells, when it is read.

One process at a time: the index is locked.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from core.block_hash import BlockHash
from core.errors import ConfigError
from kvtransfer.tiers.base import BlockKey

MAGIC = b"BATONKVT"
VERSION = 1
HEADER_BYTES = 64
_HEADER = struct.Struct("<8sIIQ")
_RECORD = struct.Struct("<16sIIQ16s16s")
_CHECKSUM = struct.Struct("<Q")
RECORD_BYTES = _RECORD.size + _CHECKSUM.size
_FREE = bytes(RECORD_BYTES)


class FolderInUseError(ConfigError):
    """Another process has its blocks in this folder."""


class Record(NamedTuple):
    """What is known of the block in a slot.

    sequence: order in which blocks came; of two records of one key the higher is the newer.
    digest: XXH3-128 of the block's bytes.
    """

    key: BlockKey
    slot: int
    sequence: int
    digest: bytes


class Scan(NamedTuple):
    """What was found at the start: records to be believed, in slot order, and how many were not."""

    records: list[Record]
    num_damaged: int
    num_foreign: int


class DiskFiles:
    """Index and blocks in one folder, for blocks of `block_bytes` and up to `num_slots` of them.

    fingerprint: 16 bytes; records that bear another one are foreign.
    Raises ConfigError where the folder cannot be used, FolderInUseError where another process uses it.
    """

    def __init__(self, folder: Path, block_bytes: int, num_slots: int, fingerprint: bytes) -> None:
        self._block_bytes = block_bytes
        self._num_slots = num_slots
        self._fingerprint = fingerprint
        self._open: list[int] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._index = self._open_file(folder / "index")
            fcntl.flock(self._index, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._blocks = self._open_file(folder / "blocks")
            self.found = self._scan()
        except BaseException as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise FolderInUseError(
                    f"disk tier: {folder} is in use by another process"
                ) from error
            if isinstance(error, OSError):
                raise ConfigError(f"disk tier: {folder} cannot be used: {error}") from error
            raise

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        while self._open:
            os.close(self._open.pop())

    # ---- slots; each slot has one writer or any number of readers at a time

    def write(self, record: Record, block: memoryview) -> None:
        """Write a block and then its record. Raises OSError where that is not possible; the slot is free then."""
        self.erase(record.slot)
        _write_all(self._blocks, block, record.slot * self._block_bytes)
        self._write_record(record.slot, self._pack(record))

    def read(self, slot: int, block: memoryview) -> bool:
        """Fill `block` from a slot; False where there are not so many bytes, or the disk gives none."""
        position, offset = 0, slot * self._block_bytes
        try:
            while position < len(block):
                num_read = os.preadv(self._blocks, [block[position:]], offset + position)
                if not num_read:
                    return False
                position += num_read
        except OSError:
            return False
        return True

    def read_ahead(self, slots: Sequence[int]) -> None:
        """Have the kernel bring these into the page cache, without waiting."""
        for first, count in _runs(slots):
            offset, num_bytes = first * self._block_bytes, count * self._block_bytes
            try:
                os.posix_fadvise(self._blocks, offset, num_bytes, os.POSIX_FADV_WILLNEED)
            except OSError:
                return  # a file system that cannot: `read` waits for each block then

    def erase(self, slot: int) -> None:
        """No block is in this slot from now on. Raises OSError."""
        self._write_record(slot, _FREE)

    def erase_all(self) -> None:
        """No block is in any slot from now on. Raises OSError."""
        os.ftruncate(self._index, HEADER_BYTES)

    # ---- the start

    def _scan(self) -> Scan:
        """What an earlier process left. Files are cut to what may be used, and what is not believed is erased."""
        found = os.pread(self._index, HEADER_BYTES, 0)
        if found != _header(self._block_bytes):
            return self._start_anew(found)
        _cut(self._index, HEADER_BYTES + self._num_slots * RECORD_BYTES)
        _cut(self._blocks, self._num_slots * self._block_bytes)
        num_whole = os.fstat(self._blocks).st_size // self._block_bytes
        newest: dict[BlockKey, Record] = {}
        num_damaged = num_foreign = 0
        for slot, data in self._stored_records():
            record, fingerprint = _unpack(data)
            if record is None or record.slot != slot or slot >= num_whole:
                num_damaged += 1
            elif fingerprint != self._fingerprint:
                num_foreign += 1
            elif record.key not in newest or newest[record.key].sequence < record.sequence:
                newest[record.key] = record
        believed = {record.slot: record for record in newest.values()}
        for slot, _ in self._stored_records():
            if slot not in believed:
                self.erase(slot)
        return Scan([believed[slot] for slot in sorted(believed)], num_damaged, num_foreign)

    def _start_anew(self, header: bytes) -> Scan:
        """Empty files, whatever was in them: blocks of another size are foreign, a header that is none is damage."""
        if is_other := _is_header(header):
            num_foreign = sum(1 for _ in self._stored_records())
        os.ftruncate(self._index, 0)
        os.ftruncate(self._blocks, 0)
        _write_all(self._index, memoryview(_header(self._block_bytes)), 0)
        return Scan([], 0, num_foreign) if is_other else Scan([], int(bool(header)), 0)

    def _stored_records(self) -> Iterator[tuple[int, bytes]]:
        """Slot and bytes of every record that is not free."""
        slot, at_once = 0, 4096
        while True:
            data = os.pread(self._index, at_once * RECORD_BYTES, HEADER_BYTES + slot * RECORD_BYTES)
            for start in range(0, len(data), RECORD_BYTES):
                one = data[start : start + RECORD_BYTES]
                if one != _FREE[: len(one)]:
                    yield slot + start // RECORD_BYTES, one
            if len(data) < at_once * RECORD_BYTES:
                return
            slot += at_once

    # ---- inside

    def _open_file(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._open.append(descriptor)
        return descriptor

    def _write_record(self, slot: int, data: bytes) -> None:
        _write_all(self._index, memoryview(data), HEADER_BYTES + slot * RECORD_BYTES)

    def _pack(self, record: Record) -> bytes:
        (block_hash, group), slot, sequence, digest = record
        body = _RECORD.pack(block_hash, group, slot, sequence, digest, self._fingerprint)
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def leave_memory(path: Path) -> None:
    """Have the kernel write a file out and forget its pages, so that whoever reads it next reads the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of neighbours that follow each other."""
    first, count = -1, 0
    for slot in slots:
        if slot == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = slot, 1
    if count:
        yield first, count


def _unpack(data: bytes) -> tuple[Record | None, bytes]:
    """A record and its fingerprint; None where it is not one."""
    body = data[: _RECORD.size]
    if len(data) < RECORD_BYTES or data[_RECORD.size :] != _CHECKSUM.pack(
        xxhash.xxh3_64_intdigest(body)
    ):
        return None, b""
    block_hash, group, slot, sequence, digest, fingerprint = _RECORD.unpack(body)
    return Record(BlockKey(BlockHash(block_hash), group), slot, sequence, digest), fingerprint


def _header(block_bytes: int) -> bytes:
    fields = _HEADER.pack(MAGIC, VERSION, RECORD_BYTES, block_bytes)
    body = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    return body.ljust(HEADER_BYTES, b"\0")


def _is_header(data: bytes) -> bool:
    """Whether these bytes are a header that differs from ours in the block size only."""
    return len(data) == HEADER_BYTES and data == _header(_HEADER.unpack_from(data)[3])


def _cut(descriptor: int, max_bytes: int) -> None:
    if os.fstat(descriptor).st_size > max_bytes:
        os.ftruncate(descriptor, max_bytes)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    position = 0
    while position < len(data):
        position += os.pwrite(descriptor, data[position:], offset + position)
