"""Runs copied and checked, with the native library and without."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest
from crc32c import crc32c

from core.errors import ConfigError
from kernels import host_memory
from kernels.cpu.binding import library
from kernels.host_memory import HostMemory, checksum, checksum_runs, copy_runs

LENGTHS = [
    0,
    1,
    7,
    8,
    63,
    64,
    255,
    256,
    257,
    319,
    320,
    511,
    512,
    1000,
    4096,
    16_383,
    16_512,
    16_831,
    24_576,
    131_072,
    131_073,
    400_001,
]


@pytest.fixture(params=["native", "slices"], autouse=True)
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def missing() -> None:
        raise ConfigError("not built")

    if request.param == "slices":
        monkeypatch.setattr(host_memory, "library", missing)
    host_memory._native.cache_clear()
    yield
    host_memory._native.cache_clear()


def random_bytes(length: int) -> bytes:
    return random.Random(length).randbytes(length)


@pytest.mark.parametrize("length", LENGTHS)
def test_runs_of_any_length_are_copied_and_checked(length: int) -> None:
    source, destination = random_bytes(2 * length + 5), bytearray(3 * length + 9)
    starts, targets = [3, length + 5], [2 * length + 9, 1]
    views = HostMemory(memoryview(destination)), HostMemory(memoryview(source))
    sums = copy_runs(views[0], targets, views[1], starts, length, is_checked=True)
    expected = bytearray(3 * length + 9)
    for start, target in zip(starts, targets, strict=True):
        expected[target : target + length] = source[start : start + length]
    assert destination == expected
    runs = [source[start : start + length] for start in starts]
    assert sums == checksum_runs(views[1], starts, length) == [crc32c(run) for run in runs]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_checksum_goes_on_from_any_byte_to_any_other(length: int) -> None:
    data = memoryview(random_bytes(length + 9))
    for start in (0, 1, 9):
        whole = data[start : start + length]
        for cut in {0, min(1, length), length // 3, length}:
            before = checksum(whole[:cut])
            assert checksum(whole[cut:], before) == crc32c(whole), (start, cut)


def test_nothing_is_checked_unless_asked() -> None:
    destination = bytearray(4)
    views = HostMemory(memoryview(destination)), HostMemory(memoryview(b"abcd"))
    assert copy_runs(views[0], [0], views[1], [0], 4) == []
    assert destination == b"abcd"


def test_the_checksum_is_the_standards() -> None:
    """RFC 3720, appendix B.4, and the check value of CRC-32C."""
    for data, expected in (
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
    ):
        assert checksum_runs(HostMemory(memoryview(data)), [0], len(data)) == [expected]


@pytest.mark.parametrize(("to", "start"), [(191, 0), (0, 191), (-1, 0), (0, -1)])
def test_a_run_outside_is_refused(to: int, start: int) -> None:
    views = HostMemory(memoryview(bytearray(200))), HostMemory(memoryview(bytes(200)))
    with pytest.raises(ValueError, match="do not lie in 200 bytes"):
        copy_runs(views[0], [to], views[1], [start], 10)
    with pytest.raises(ValueError, match="do not lie in 200 bytes"):
        checksum_runs(views[1], [start + to], 201)
    with pytest.raises(ValueError, match="2 places for 1 runs"):
        copy_runs(views[0], [0, 20], views[1], [0], 10)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_way_of_this_build_that_the_machine_has_agrees(length: int) -> None:
    native = library()
    data = random_bytes(length)
    address = HostMemory(memoryview(data)).address
    starts, sums = array("q", [0]), array("I", [0])
    for way in range(native.baton_first_checksum_way(), native.baton_num_checksum_ways()):
        places = starts.buffer_info()[0], sums.buffer_info()[0]
        native.baton_checksum_runs(address, places[0], 1, length, places[1], way)
        assert sums[0] == crc32c(data), way


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("to", "start"), [(0, 0), (64, 1), (1, 64), (37, 90), (63, 3)])
def test_every_way_copies_the_bytes_and_no_other(length: int, to: int, start: int) -> None:
    native = library()
    source = random_bytes(length + 100)
    meant = source[start : start + length]
    for way in range(native.baton_first_checksum_way(), native.baton_num_checksum_ways()):
        for sums in (array("I", [0]), None):
            destination = bytearray(b"\xa5" * (length + 200))
            offset = -HostMemory(memoryview(destination)).address % 64 + to
            addresses = [HostMemory(memoryview(x)).address for x in (destination, source)]
            places = array("q", [offset]), array("q", [start])
            native.baton_copy_runs(
                *addresses, places[0].buffer_info()[0], places[1].buffer_info()[0], 1, length,
                None if sums is None else sums.buffer_info()[0], way,
            )  # fmt: skip
            rest = b"\xa5" * (length + 200)
            assert destination == rest[:offset] + meant + rest[offset + length :], way
            assert sums is None or sums[0] == crc32c(meant), way
