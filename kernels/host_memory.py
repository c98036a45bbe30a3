"""Bytes of host memory copied and checked, many runs by one call that leaves the interpreter to other threads.

Natively where the native library is built, else by slices. Checksums are CRC-32C.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy
from crc32c import crc32c

from core.errors import ConfigError
from kernels.cpu.binding import library


class HostMemory:
    """A stretch of this process's memory, by its address; what it is a view of must outlive it."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.address: int = numpy.frombuffer(view, numpy.uint8).ctypes.data if len(view) else 0

    def __len__(self) -> int:
        return len(self.view)

    def check(self, offsets: Sequence[int], num_bytes: int) -> None:
        """Raises ValueError unless there is such a run at each offset."""
        if num_bytes < 0 or min(offsets) < 0 or max(offsets) + num_bytes > len(self.view):
            raise ValueError(
                f"runs of {num_bytes} bytes from {min(offsets)} to {max(offsets)} do not lie in {len(self.view)} bytes"
            )


def copy_runs(
    to: HostMemory,
    to_offsets: Sequence[int],
    source: HostMemory,
    source_offsets: Sequence[int],
    num_bytes: int,
    *,
    is_checked: bool = False,
) -> list[int]:
    """From each source offset to its destination offset, `num_bytes` each; their checksums where they are wanted."""
    if len(to_offsets) != len(source_offsets):
        raise ValueError(f"{len(to_offsets)} places for {len(source_offsets)} runs")
    to.check(to_offsets, num_bytes)
    source.check(source_offsets, num_bytes)
    if (native := _native()) is None:
        for target, start in zip(to_offsets, source_offsets, strict=True):
            to.view[target : target + num_bytes] = source.view[start : start + num_bytes]
        return checksum_runs(to, to_offsets, num_bytes) if is_checked else []
    targets, starts = array("q", to_offsets), array("q", source_offsets)
    sums = array("I", bytes(4 * len(targets))) if is_checked else None
    native.baton_copy_runs(
        to.address, source.address, _place(targets), _place(starts), len(targets), num_bytes,
        None if sums is None else _place(sums), -1,
    )  # fmt: skip
    return [] if sums is None else sums.tolist()


def checksum_runs(memory: HostMemory, offsets: Sequence[int], num_bytes: int) -> list[int]:
    """The checksum of the run of `num_bytes` bytes at each offset."""
    memory.check(offsets, num_bytes)
    if (native := _native()) is None:
        return [crc32c(memory.view[start : start + num_bytes]) for start in offsets]
    starts, sums = array("q", offsets), array("I", bytes(4 * len(offsets)))
    native.baton_checksum_runs(
        memory.address, _place(starts), len(starts), num_bytes, _place(sums), -1
    )
    return sums.tolist()


def checksum(data: memoryview, before: int = 0) -> int:
    """The checksum of these bytes behind others, whose checksum is `before`."""
    if (native := _native()) is None:
        return crc32c(data, before)
    if not data:
        return before
    place = numpy.frombuffer(data, numpy.uint8).ctypes.data
    value: int = native.baton_checksum(place, len(data), before)
    return value


@cache
def _native() -> Any:
    """The native library, or None where it is not built."""
    try:
        return library()
    except ConfigError:
        return None


def _place(values: array[int]) -> int:
    return values.buffer_info()[0]
