"""D's end of one connection whose announcements are read out of P's pool by an engine, one after the other.

    announced -> waiting, while one before it is read, or another connection is inside the session's blocks
    waiting --every byte lacking, nobody else writes--> inside its blocks: read into their place
    waiting --anything else--> run by run: read beside the pool, then copied to what of its place is lacking
    read --generations and epoch read after it are those announced--> admitted, and answered
    read --they are others: P has ended the session--> answered as refused
    read --the engine says that it failed--> answered as refused, and the engine meets the peer anew for the next one
    connection lost --the engine is not done--> inside to the read's end; it may still be admitted, for nobody to hear

So a block is left only when the engine says that nothing writes into it any more: the one transport on which the end
of a write is the peer's to say. An aborted block is QUARANTINED until then. What a stranger says of its pool is kept
unread until it has shown a session's secret.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Generator, Sequence

from core.errors import TransferError
from core.ids import BlockId
from kernels.host_memory import checksum_runs
from kvtransfer.pool_memory import GENERATION_BYTES, GENERATIONS_AT
from kvtransfer.transports.base import COPY_SLICE_BYTES
from kvtransfer.transports.incoming_run import Fate, IncomingRun
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.announced import AnnouncedInbound, batch_of
from kvtransfer.transports.links.wire import Announcement, Entries, FrameKind, Hello, RemotePool
from kvtransfer.transports.pull.engine import Engine, Peer, Read
from kvtransfer.transports.pull.landing import Landing
from kvtransfer.transports.runs import UNCHECKED, RunAnswer, RunBatch

logger = logging.getLogger(__name__)

_BUFFER_BYTES = wire.FRAME_BYTES + wire.MAX_DESCRIPTION_BYTES

Task = Generator[Read | None, None, None]
"""Taking one announcement: yields what has to be over before it goes on, None for another connection's turn."""


class _Source:
    """P's pool, once its announcements are to be read."""

    def __init__(self, pool: RemotePool, peer: Peer, landing: Landing) -> None:
        self.pool, self.peer, self.landing = pool, peer, landing

    def close(self) -> None:
        """Nothing of it is being read any more."""
        self.landing.close()
        self.peer.close()


class PullInbound(AnnouncedInbound):
    """See InboundLink."""

    def __init__(
        self,
        engine: Engine,
        pool_address: int,
        sock: socket.socket,
        intake: Intake,
        hello: Hello,
        deadline_s: float,
    ) -> None:
        """pool_address: of our pool, which is registered with the engine."""
        super().__init__(sock, intake, hello, deadline_s, buffer_bytes=_BUFFER_BYTES)
        self._engine, self._pool_address = engine, pool_address
        self._shown: tuple[RemotePool, bytes] | None = None
        self._source: _Source | None = None
        self._waiting: deque[tuple[Announcement, Entries]] = deque()
        self._task: Task | None = None
        self._read: Read | None = None
        self._is_closed = False

    # ---- what the receiver asks

    @property
    def may_read(self) -> bool:
        """See InboundLink.may_read: not more than is being dealt with."""
        return super().may_read and not self._waiting

    @property
    def is_busy(self) -> bool:
        """See InboundLink.is_busy."""
        return self._task is not None

    def advance(self) -> bool:
        """See InboundLink.advance."""
        has_advanced = False
        while self._step():
            has_advanced = True
        return has_advanced

    def close(self) -> None:
        """See InboundLink.close: a read that is under way goes on."""
        self._is_closed = True
        self._waiting.clear()
        if self._task is not None and self._read is None:
            self._task.close()
            self._task = None
        self._leave_when_idle()
        super().close()

    def abort(self) -> None:
        """See InboundLink.abort."""
        self._read = None
        super().abort()

    # ---- frames

    @property
    def _blocks_of_peer(self) -> RemotePool | None:
        return self._shown[0] if self._shown else None

    def _num_following(self, frame: memoryview) -> int:
        if frame[0] == FrameKind.POOL:
            return wire.num_description_bytes(frame)
        return super()._num_following(frame)

    def _take_long_frame(self, frame: memoryview, rest: memoryview) -> None:
        if frame[0] != FrameKind.POOL:
            super()._take_long_frame(frame, rest)
            return
        if self._shown is not None:
            raise TransferError("peer shows two pools")
        pool = wire.parse_pool(frame)
        end = pool.address + pool.header_bytes + pool.num_blocks * pool.block_bytes
        least_bytes = GENERATIONS_AT + pool.num_blocks * GENERATION_BYTES
        if end >= 1 << 64 or pool.header_bytes < least_bytes or not any(pool.epoch):
            raise TransferError("peer shows a pool that cannot be")
        self._shown = pool, bytes(rest)

    def _take_announcement(self, head: Announcement, columns: Entries) -> None:
        self._waiting.append((head, columns))

    # ---- one announcement after the other

    def _step(self) -> bool:
        """Go on as far as nothing has to be waited for; whether that was at all."""
        if self._task is None:
            if not self._waiting:
                return False
            self._task = self._take(*self._waiting.popleft())
        try:
            if self._read is None:
                self._read = next(self._task)
            else:
                try:
                    if not self._read.is_over():
                        return False
                except ConnectionError as error:
                    self._read = self._task.throw(error)
                else:
                    self._read = next(self._task)
        except StopIteration:
            self._end_task()
            return True
        except BaseException:
            self._end_task()
            raise
        return self._read is not None

    def _end_task(self) -> None:
        self._task = self._read = None
        self._leave_when_idle()

    def _leave_when_idle(self) -> None:
        if self._is_closed and self._task is None:
            self._leave()

    def _leave(self) -> None:
        """Nothing is being read from the peer."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _take(self, head: Announcement, columns: Entries) -> Task:
        """Take one announcement; one that the engine cannot read ends the session's way over this transport."""
        while self._intake.is_batch_inside(head.key):
            yield None
        try:
            yield from self._take_now(head, columns)
        except ConnectionError as error:
            logger.warning("kv receiver cannot read from %s: %s", self.peer_name, error)
            self._leave()
            self._opened.discard(head.key)  # what is announced behind it is refused as well
            self._answer_run(head.key, RunAnswer(head.number, False))

    def _take_now(self, head: Announcement, columns: Entries) -> Task:
        source = self._find_source()
        batch, blocks = batch_of(head, columns), None
        if head.num_blocks == 1 or head.num_bytes * head.num_blocks <= COPY_SLICE_BYTES:
            blocks = self._intake.enter_batch(batch, self, is_opened=head.key in self._opened)
        if blocks is None:
            yield from self._take_each(source, head, batch, columns)
        else:
            yield from self._take_together(source, head, batch, blocks, columns)

    def _find_source(self) -> _Source:
        """The peer's pool. Raises ConnectionError where the engine cannot read from it."""
        if self._source is None:
            assert self._shown is not None
            pool, description = self._shown
            try:
                peer = self._engine.meet(description, pool.epoch)
                try:
                    landing = Landing(self._engine, self._intake.block_bytes)
                except TransferError:
                    peer.close()
                    raise
            except TransferError as error:
                raise ConnectionError(error.message) from error
            self._source = _Source(pool, peer, landing)
        return self._source

    def _take_together(
        self,
        source: _Source,
        head: Announcement,
        batch: RunBatch,
        blocks: Sequence[BlockId],
        columns: Entries,
    ) -> Task:
        """All runs at once, into blocks that have been entered."""
        try:
            places = self._places(head, blocks)
            own = [self._pool_address + place for place in places]
            yield self._begin(source, head, own, columns.blocks)
            self._intake.count(received_bytes_total=head.num_bytes * len(blocks))
            yield source.landing.begin_lives(source.peer, source.pool, columns.blocks)
        except BaseException:
            self._intake.pause_batch(batch, blocks)
            self._intake.abandon_batch(batch, self)
            raise
        intact = source.landing.intact(source.pool, columns.blocks, columns.generations)
        if head.is_checked:
            found = checksum_runs(self._intake.memory, places, head.num_bytes)
            self._intake.check_batch(batch, found, columns.checksums, intact)
        is_all = self._intake.leave_batch(batch, blocks, intact)
        self._answer_run(head.key, RunAnswer(head.number, is_all))

    def _take_each(
        self, source: _Source, head: Announcement, batch: RunBatch, columns: Entries
    ) -> Task:
        """Run by run; one answer for all of them, none when another connection answers for one."""
        answers: list[bool] = []
        for index, checksum in enumerate(columns.checksums):
            header = batch.header(index, checksum if head.is_checked else UNCHECKED, head.number)
            run = self._intake.begin(header, is_opened=head.key in self._opened)
            if run.fate is Fate.WRITING:
                block, generation = columns.blocks[index], columns.generations[index]
                yield from self._take_run(source, head, run, block, generation)
            else:  # nobody needs its bytes
                run.answer = self._intake.finish(run)
            if run.answer is not None:
                answers.append(run.answer.is_admitted)
        if len(answers) == head.num_blocks:
            self._answer_run(head.key, RunAnswer(head.number, all(answers)))

    def _take_run(
        self, source: _Source, head: Announcement, run: IncomingRun, block: int, generation: int
    ) -> Task:
        """Read a run that has begun, and then write what is lacking of it; `run.answer` stands after that."""
        landing = source.landing
        try:
            yield self._begin(source, head, [landing.run_address], [block])
            yield landing.begin_lives(source.peer, source.pool, [block])
        except BaseException:
            self._intake.abandon(run)
            raise
        if not all(landing.intact(source.pool, [block], [generation])):
            self._intake.abandon(run)
            self._intake.count(late_runs_total=1)
            run.answer = RunAnswer(head.number, False)
            return
        while run.num_bytes_left:
            place = run.next_slice(COPY_SLICE_BYTES)
            place[:] = landing.run(head.num_bytes - run.num_bytes_left, len(place))
            run.wrote(len(place))

    def _places(self, head: Announcement, blocks: Sequence[BlockId]) -> list[int]:
        """Where in our pool the runs go."""
        place = self._intake.offset_bytes(head.group, head.first_layer, head.num_layers)
        return [block * self._intake.block_bytes + place for block in blocks]

    def _begin(
        self, source: _Source, head: Announcement, own: Sequence[int], blocks: Sequence[int]
    ) -> Read:
        """Begin to read runs of P's blocks to addresses of ours."""
        pool = source.pool
        start = pool.address + pool.header_bytes + head.offset_bytes
        theirs = [start + block * pool.block_bytes for block in blocks]
        return source.peer.read(own, theirs, [head.num_bytes] * len(own))
