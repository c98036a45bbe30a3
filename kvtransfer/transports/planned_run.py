"""A run on its way into a block that keeps its bytes apart, or in another format."""

from __future__ import annotations

from collections.abc import Iterable

from core.ids import BlockId
from core.kv_layout import Run
from kernels.host_memory import checksum
from kvtransfer.codec import convert_slabs
from kvtransfer.plan import Piece, SlotFormats
from kvtransfer.transports.base import MAX_SLICE_BYTES
from kvtransfer.transports.incoming_run import Fate, Gate, IncomingRun, LiveSession
from kvtransfer.transports.runs import UNCHECKED, RunHeader


class PlannedRun(IncomingRun):
    """Its bytes come whole into memory of their own, are checked, and only then put in their places.

    So nothing unverified gets into the pool, and a run that is broken off has written nothing.
    """

    __slots__ = ("_formats", "_layers", "_payload", "_piece")

    def __init__(
        self,
        intake: Gate,
        header: RunHeader,
        live: LiveSession,
        piece: Piece,
        formats: SlotFormats,
    ) -> None:
        super().__init__(intake, header, live, Fate.WRITING)
        self.cells = piece.cells
        self._piece = piece
        self._formats = formats
        self._payload = memoryview(bytearray(header.num_bytes))
        self._layers: list[tuple[int, int]] = []

    def aim(self, block: BlockId, parts: list[tuple[int, int]]) -> None:
        """See IncomingRun.aim."""
        self.block = block
        self._layers = parts

    def next_slice(self, max_bytes: int = MAX_SLICE_BYTES) -> memoryview:
        """See IncomingRun.next_slice; the slice is not in the pool."""
        if self.fate is Fate.WRITING:
            start = self.header.num_bytes - self.num_bytes_left
            self._slice = self._payload[start : start + max_bytes]
        else:
            self._slice = self._intake.scratch[: min(self.num_bytes_left, max_bytes)]
        return self._slice

    def wrote(self, num_bytes: int) -> None:
        """See IncomingRun.wrote; the last bytes bring all of them into the pool."""
        if num_bytes:
            if self.fate is Fate.WRITING and self.header.checksum != UNCHECKED:
                self.checksum = checksum(self._slice[:num_bytes], self.checksum)
            self.num_bytes_left -= num_bytes
            self._intake.count(received_bytes_total=num_bytes)
        if not self.num_bytes_left:
            if self.fate is Fate.WRITING and self.header.checksum in (self.checksum, UNCHECKED):
                self._put_in_place()
            self.answer = self._intake.finish(self)

    def _put_in_place(self) -> None:
        """All bytes of the layers that are lacking into the pool, a slice at a time; late when the right to is lost."""
        data = self._payload
        if self._formats.wire != self._formats.destination:
            _, wire, ours = self._formats
            data = convert_slabs(data, self._piece.num_slots, wire, ours)
        start = self._intake.block_bytes * self.block
        for slice_ in _slices(self._lacking_runs(len(data))):
            if not self._intake.enter(self):
                if self.fate is Fate.WRITING:
                    self.fate = Fate.LATE
                return
            for offset, place in slice_:
                target = start + place.offset_bytes
                taken = data[offset : offset + place.num_bytes]
                self._intake.pool[target : target + place.num_bytes] = taken
            self._intake.leave(self)

    def _lacking_runs(self, num_bytes: int) -> Iterable[tuple[int, Run]]:
        """Of each destination run whose layer is lacking: where it begins in the data, and its place in the block."""
        first_layer = self.cells.first_layer
        layer_bytes = num_bytes // self.cells.num_layers
        wanted = [
            range((first - first_layer) * layer_bytes, (first - first_layer + count) * layer_bytes)
            for first, count in self._layers
        ]
        offset = 0
        for place in self._piece.destination_runs:
            for part in wanted:
                begin, end = max(offset, part.start), min(offset + place.num_bytes, part.stop)
                if begin < end:
                    yield begin, Run(place.offset_bytes + begin - offset, end - begin)
            offset += place.num_bytes


def _slices(runs: Iterable[tuple[int, Run]]) -> Iterable[list[tuple[int, Run]]]:
    """The runs, in their order, in parts of at most MAX_SLICE_BYTES."""
    slice_: list[tuple[int, Run]] = []
    num_bytes = 0
    for offset, place in runs:
        for begin in range(0, place.num_bytes, MAX_SLICE_BYTES):
            size = min(MAX_SLICE_BYTES, place.num_bytes - begin)
            if slice_ and num_bytes + size > MAX_SLICE_BYTES:
                yield slice_
                slice_, num_bytes = [], 0
            slice_.append((offset + begin, Run(place.offset_bytes + begin, size)))
            num_bytes += size
    if slice_:
        yield slice_
