"""Where a recorded tensor lies: a row buffer of the program's memory, a column to start at, a row's length.

Buffers are named by the memory of the sample tensors. Each lives from its first to its last use; buffers that do not
live at the same time share memory. Offsets are in floats for one row; memory of many rows multiplies them.

A program's calls fall into phases, cut by attention, which looks at other rows. What lives in one phase alone each
thread can keep for itself, for a few rows at a time; what passes from one to another needs room for all rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from core.errors import ConfigError
from kernels.cpu.structs import ROWS_TOKENS, ROWS_WANTED
from kernels.recording import SAMPLE_TOKENS, SAMPLE_WANTED

_ALIGNMENT_FLOATS = 16


@dataclass(slots=True, eq=False)
class Buffer:
    """One result's memory.

    width: floats of a row.
    row_count: ROWS_TOKENS or ROWS_WANTED.
    first, last: positions of the calls that write it first and use it last.
    offset: floats from the start of the memory, for one row.
    is_own: whether it lies in the threads' own memory.
    """

    width: int
    row_count: int
    first: int
    last: int
    offset: int = -1
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor inside a buffer: `[rows, vectors, width]`, or `[rows, width]` with one vector."""

    buffer: Buffer
    column: int
    width: int
    num_vectors: int


class BufferTable:
    """Finds the place of a tensor that a recorded operation gave."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._by_address: dict[int, Buffer] = {}

    def define(self, tensor: Tensor, at: int) -> Place:
        """The place of a result; results of in-place operations keep their buffer."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._by_address:
            rows = tensor.shape[0]
            counts = {SAMPLE_TOKENS: ROWS_TOKENS, SAMPLE_WANTED: ROWS_WANTED}
            buffer = Buffer(tensor.numel() // rows, counts[rows], at, at)
            self._by_address[address] = buffer
            self.buffers.append(buffer)
        return self.use(tensor, at)

    def use(self, tensor: Tensor, at: int) -> Place:
        """The place of an operand. Raises ConfigError where no recorded operation gave it."""
        buffer = self._by_address.get(tensor.untyped_storage().data_ptr())
        if buffer is None:
            raise ConfigError("recording: an operand was not given by an operation of kernels.ops")
        buffer.last = max(buffer.last, at)
        vectors = tensor.shape[1] if tensor.dim() == 3 else 1
        width = tensor.shape[-1]
        is_plain = tensor.stride(-1) == 1 and tensor.stride(0) == buffer.width
        is_plain = is_plain and (vectors == 1 or tensor.stride(1) == width)
        if not is_plain:
            raise ConfigError(f"recording: rows of strides {tensor.stride()} are not served")
        return Place(buffer, int(tensor.storage_offset()), width, vectors)

    def assign(self, phases: Sequence[int]) -> tuple[int, int]:
        """Give every buffer of the step's tokens its offset; returns the floats a row of shared and of own memory.

        phases: of every call; empty where nothing is to be a thread's own.
        """
        buffers = [buffer for buffer in self.buffers if buffer.row_count == ROWS_TOKENS]
        for buffer in buffers:
            buffer.is_own = bool(phases) and phases[buffer.first] == phases[buffer.last]
        own = [buffer for buffer in buffers if buffer.is_own]
        shared = [buffer for buffer in buffers if not buffer.is_own]
        # Rows of one phase are at different calls at the same time: what is shared lives for whole phases.
        return _place(shared, phases), _place(own, ())


def _place(buffers: Sequence[Buffer], phases: Sequence[int]) -> int:
    """Offsets such that buffers that live in the same phase, or without phases at the same call, lie apart."""
    life = {
        id(b): (phases[b.first], phases[b.last]) if phases else (b.first, b.last) for b in buffers
    }
    total = 0
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: (-b.width, b.first)):
        size = _padded(buffer)
        first, last = life[id(buffer)]
        taken = sorted(
            (other.offset, other.offset + _padded(other))
            for other in placed
            if life[id(other)][0] <= last and first <= life[id(other)][1]
        )
        offset = 0
        for start, end in taken:
            if offset + size <= start:
                break
            offset = max(offset, end)
        buffer.offset = offset
        placed.append(buffer)
        total = max(total, offset + size)
    return total


def _padded(buffer: Buffer) -> int:
    return -(-buffer.width // _ALIGNMENT_FLOATS) * _ALIGNMENT_FLOATS
