"""Many runs copied by one call, which leaves the interpreter to other threads meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy

from core.errors import ConfigError
from kernels.cpu.binding import library


class RunCopier:
    """Copies between two memories that outlive it: natively, or by slices where nothing native was built."""

    def __init__(self, destination: memoryview, source: memoryview) -> None:
        self._destination, self._source = destination, source
        self._addresses = _address(destination), _address(source)
        self._copy: Any = None
        try:
            self._copy = library().baton_copy_runs
        except ConfigError:
            pass  # slices will do

    def copy(self, destinations: Sequence[int], sources: Sequence[int], num_bytes: int) -> None:
        """From each source offset to its destination offset; all lie inside, with `num_bytes` behind them."""
        assert min(destinations) >= 0 <= min(sources)
        assert max(destinations) + num_bytes <= len(self._destination)
        assert max(sources) + num_bytes <= len(self._source)
        if self._copy is None:
            for to, start in zip(destinations, sources, strict=True):
                self._destination[to : to + num_bytes] = self._source[start : start + num_bytes]
            return
        to_offsets, from_offsets = array("q", destinations), array("q", sources)
        places = to_offsets.buffer_info()[0], from_offsets.buffer_info()[0]
        self._copy(*self._addresses, *places, len(to_offsets), num_bytes)


def _address(view: memoryview) -> int:
    address: int = numpy.frombuffer(view, numpy.uint8).ctypes.data
    return address
