"""Runs of several blocks that come one behind the other, each read straight into its block."""

from __future__ import annotations

from collections.abc import Sequence

from core.ids import BlockId
from kernels.host_memory import checksum_runs
from kvtransfer.session import SessionKey
from kvtransfer.transports.base import MAX_SLICE_BYTES
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.runs import RunAnswer, RunBatch


class IncomingBatch:
    """One batch on its way in. Its bytes go, in order, where `next_slices` says.

    Begun whole or not at all; one that loses its right to write after that goes to scratch to its end.
    """

    def __init__(
        self, intake: Intake, link: object, batch: RunBatch, checksums: Sequence[int], number: int
    ) -> None:
        self.num_bytes_left = batch.num_bytes * len(batch.positions)
        self.answer: RunAnswer | None = None
        self._intake, self._link = intake, link
        self._batch, self._number = batch, number
        self._announced = list(checksums)
        self._place = 0  # inside a block, known once the batch is known to fit
        self._blocks: list[BlockId] | None = None
        self._slices: list[memoryview] = []
        self._is_lost = False

    @property
    def key(self) -> SessionKey:
        """The session that it is of."""
        return self._batch.key

    def begin(self, *, is_opened: bool) -> bool:
        """Whether it may be written as a whole; if not, its runs are to be taken one by one.

        If so it is inside its blocks, and `next_slices` must follow before anything. Raises TransferError as
        `Intake.begin`.
        """
        if self.num_bytes_left > MAX_SLICE_BYTES:
            return False
        self._blocks = self._intake.enter_batch(self._batch, self._link, is_opened=is_opened)
        if self._blocks is None:
            return False
        group, _, first_layer, num_layers, _ = self._batch.ranges
        self._place = self._intake.offset_bytes(group, first_layer, num_layers)
        return True

    def next_slices(self) -> list[memoryview]:
        """Where the next bytes go; `wrote` must follow before anything."""
        if self._blocks is None and not self._is_lost:
            self._blocks = self._intake.enter_batch(
                self._batch, self._link, is_opened=True, is_begun=True
            )
            self._is_lost = self._blocks is None
        if self._blocks is None:
            size = min(self.num_bytes_left, MAX_SLICE_BYTES)
            self._slices = [self._intake.scratch[:size]]
        else:
            self._slices = self._rest(self._blocks)
        return self._slices

    def wrote(self, num_bytes: int) -> None:
        """The transport has put this many bytes into the slices; with the last ones `answer` stands."""
        self._intake.count(received_bytes_total=num_bytes)
        self.num_bytes_left -= num_bytes
        if not self.num_bytes_left:
            self._finish()
        elif self._blocks is not None:
            self._pause()

    def abandon(self) -> None:
        """The connection is lost."""
        self._intake.abandon_batch(self._batch, self._link)

    def _pause(self) -> None:
        assert self._blocks is not None
        self._intake.pause_batch(self._batch, self._blocks)
        self._blocks = None

    def _rest(self, blocks: Sequence[BlockId]) -> list[memoryview]:
        """What is still to be filled, in order."""
        size, pool = self._batch.num_bytes, self._intake.pool
        index, done = divmod(size * len(blocks) - self.num_bytes_left, size)
        starts = self._starts(blocks[index:])
        first = pool[starts[0] + done : starts[0] + size]
        return [first, *(pool[start : start + size] for start in starts[1:])]

    def _starts(self, blocks: Sequence[BlockId]) -> list[int]:
        return [block * self._intake.block_bytes + self._place for block in blocks]

    def _finish(self) -> None:
        if self._blocks is None:
            self.answer = self._intake.judge_batch(self._batch, self._number)
            return
        found = checksum_runs(
            self._intake.memory, self._starts(self._blocks), self._batch.num_bytes
        )
        intact = [True] * len(self._blocks)
        self._intake.check_batch(self._batch, found, self._announced, intact)
        is_all = self._intake.leave_batch(self._batch, self._blocks, intact)
        self.answer = RunAnswer(self._number, is_all)
