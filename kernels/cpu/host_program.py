"""A recorded model step that runs in one native call.

Owns the memory between operations, sized for the largest step seen and grown when a larger one comes; and, while a
listener wants to hear of finished layers, a thread that waits for the running program's marks.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.arguments import arguments_of
from kernels.cpu.large_pages import large_pages
from kernels.cpu.lowering import LEAST_JOINED, Lowered, QuantBuffer, lower
from kernels.cpu.places import Place
from kernels.cpu.quant_memory import LEAST_ROWS, QuantMemory
from kernels.cpu.structs import ROWS_WANTED, Instruction, QuantRows, Rows, Step
from kernels.cpu.team import Team
from kernels.recording import Recording
from kernels.step import StepMetadata

_LEAST_WANTED = 8
OWN_ROWS = 128
"""Of one thread: a tile of joined operations and a last one's rest. Steps of no more rows are not joined."""


class HostProgram:
    """Runs steps of one recorded model on one team. One step at a time, from one thread."""

    def __init__(self, recording: Recording, team: Team) -> None:
        self._lowered = lower(recording, team.variant)
        self._team = team
        self._own = _OwnMemory(self._lowered, team.num_threads)
        self._memory = _Memory(self._lowered, self._own, LEAST_ROWS, _LEAST_WANTED)
        self._instructions, self._keep = _assemble(self._lowered, self._memory)

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: StepMetadata,
        wanted: Tensor,
        on_mark: Callable[[int], None] | None = None,
    ) -> Tensor:
        """The program's output, one row for each of `wanted`; valid until the next call.

        on_mark(layer) is called once a mark, in order, on another thread while the program runs; the last call has
        ended when run returns.
        """
        num_tokens, num_wanted = token_ids.shape[0], wanted.shape[0]
        self._reserve(num_tokens, num_wanted)
        starts = np.asarray(metadata.query_start, dtype=np.int64)
        lengths = np.asarray(metadata.seq_lens, dtype=np.int64)
        tables = metadata.block_tables
        step = Step(
            num_tokens,
            len(lengths),
            num_wanted,
            token_ids.data_ptr(),
            positions.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            starts.ctypes.data,
            lengths.ctypes.data,
            wanted.data_ptr(),
            joined_rows(num_tokens, self._team.num_threads, self._lowered.most_joined),
        )
        if on_mark is None:
            self._team.run(self._instructions, len(self._instructions), step)
        else:
            with _Listener(self._team, on_mark):
                self._team.run(self._instructions, len(self._instructions), step)
        return self._memory.view(self._lowered.output, num_wanted)

    def _reserve(self, num_tokens: int, num_wanted: int) -> None:
        memory = self._memory
        if num_tokens <= memory.num_rows and num_wanted <= memory.num_wanted:
            return
        rows = max(num_tokens, memory.num_rows)
        most_wanted = max(num_wanted, memory.num_wanted)
        self._memory = _Memory(self._lowered, self._own, rows, most_wanted)
        self._instructions, self._keep = _assemble(self._lowered, self._memory)


def joined_rows(num_tokens: int, num_threads: int, most_joined: int) -> int:
    """Rows of a tile of joined operations: those that let the threads end together; 0: not joined."""
    if not most_joined or num_tokens <= OWN_ROWS:
        return 0

    def longest(size: int) -> int:
        """Rows of the thread with most tiles; a rest of few rows joins the last tile."""
        tiles = (num_tokens + size - LEAST_ROWS) // size
        return -(-tiles // num_threads) * size

    sizes = range(LEAST_JOINED, most_joined + 1, LEAST_ROWS)
    return min(sizes, key=lambda size: (longest(size), -size))


class _OwnMemory:
    """What each thread has for itself: room for OWN_ROWS rows. Steps that are not joined use the first thread's."""

    def __init__(self, lowered: Lowered, num_threads: int) -> None:
        self.num_rows = num_threads * OWN_ROWS
        self.thread_floats = lowered.own_floats * OWN_ROWS
        self.rows = large_pages(4 * num_threads * self.thread_floats).view(torch.float32)


class _Memory:
    """Row memory: every buffer is `[rows, width]` at its offset times the number of rows."""

    def __init__(
        self, lowered: Lowered, own_memory: _OwnMemory, num_rows: int, num_wanted: int
    ) -> None:
        self.num_rows, self.num_wanted = num_rows, num_wanted
        wanted = {id(p.buffer): p.buffer for n in lowered.nodes for p in n.places.values()}
        own = [b for b in wanted.values() if b.row_count == ROWS_WANTED]
        self._own = own_memory
        self._rows = large_pages(4 * lowered.row_floats * num_rows).view(torch.float32)
        # Rows that are wanted are few and wide (logits): they have memory of their own.
        self._wanted = {id(b): torch.empty(num_wanted, b.width) for b in own}
        spare = max(num_rows, num_wanted, LEAST_ROWS)
        self._quants = [
            QuantMemory(own_memory.num_rows, slot.width, OWN_ROWS)
            if slot.is_own
            else QuantMemory(spare, slot.width)
            for slot in lowered.quants
        ]

    def rows(self, place: Place | None) -> Rows:
        """See Memory.rows."""
        if place is None:
            return Rows()
        buffer = place.buffer
        if buffer.row_count == ROWS_WANTED:
            return Rows(self._wanted[id(buffer)].data_ptr() + 4 * place.column, buffer.width, 0)
        memory, num_rows, thread_stride = self._rows, self.num_rows, 0
        if buffer.is_own:
            memory, num_rows = self._own.rows, OWN_ROWS
            thread_stride = self._own.thread_floats
        base = memory.data_ptr() + 4 * (buffer.offset * num_rows + place.column)
        return Rows(base, buffer.width, thread_stride)

    def quant_rows(self, buffer: QuantBuffer | None) -> QuantRows:
        """See Memory.quant_rows."""
        if buffer is None:
            return QuantRows()
        return self._quants[buffer.slot].rows(buffer.width)

    def view(self, place: Place, num_rows: int) -> Tensor:
        """The rows of a place that only wanted rows have."""
        whole = self._wanted[id(place.buffer)][:num_rows]
        return whole[:, place.column : place.column + place.width]


def _assemble(
    lowered: Lowered, memory: _Memory
) -> tuple[ctypes.Array[Instruction], list[ctypes.Structure]]:
    """Instructions, and the argument structs they point to."""
    arguments = [arguments_of(node, memory) for node in lowered.nodes]
    instructions = (Instruction * len(arguments))()
    for instruction, node, own in zip(instructions, lowered.nodes, arguments, strict=True):
        instruction.op, instruction.row_count = node.op, node.row_count
        instruction.arguments = ctypes.addressof(own)
    return instructions, arguments


class _Listener:
    """Hears marks on a thread of its own while the enclosed call runs; tells the rest when it ends."""

    def __init__(self, team: Team, on_mark: Callable[[int], None]) -> None:
        self._team, self._on_mark = team, on_mark
        self._told = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._listen, name="marks", daemon=True)

    def __enter__(self) -> None:
        self._team.reset_mark()  # the last program's marks are not this one's
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._team.end_marks()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _listen(self) -> None:
        try:
            is_ended = False
            while not is_ended:
                mark, is_ended = self._team.wait_mark(self._told)
                while self._told < mark:
                    self._told += 1
                    self._on_mark(self._told - 1)
        except BaseException as error:  # noqa: BLE001 - told to the caller of the step
            self._error = error
