"""Workers of any layouts and ranks, with a pool, a life and a transport's end for each rank, and KV to be carried."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.blocks import BlockLife, BlockState, Permit
from core.ids import BlockId, SessionId
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from kvtransfer.codec import convert_slabs
from kvtransfer.config import TransferConfig
from kvtransfer.events import MoverEvent, SessionComplete
from kvtransfer.plan import TransferPlan, build_plan
from kvtransfer.session import (
    Destination,
    IncomingPlan,
    OutgoingPlan,
    ReceiveSession,
    SendSession,
    SourceBlock,
)
from kvtransfer.transports.base import Receiver, Sender
from kvtransfer.transports.fake.ends import FakeReceiver, FakeSender
from kvtransfer.transports.fake.network import FakeNetwork
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.tcp.receiver import TcpReceiver
from kvtransfer.transports.tcp.sender import TcpSender
from tests.support.kv_shards import Bytes, LogicalKV, part_widths, scatter

POISON = 0xEE
TIMEOUT_S = 20.0


def make_layout(
    block_size: int = 4,
    num_heads: int = 4,
    dtype: str = "float32",
    num_layers: int = 3,
    head_dim: int = 4,
    **options: Any,
) -> KVLayout:
    """One group of full attention, and a smaller one with a window."""
    slot = SlotFormat.of(dtype, head_dim)
    full = KVGroup(GroupKind.FULL_ATTENTION, tuple(range(num_layers)), num_heads, slot)
    last = (num_layers, num_layers + 1)
    windowed = KVGroup(GroupKind.SLIDING_WINDOW, last, num_heads, slot, window=64)
    return KVLayout(block_size, (full, windowed), **options)


def numbers_as_kv(layout: KVLayout, numbers: list[np.ndarray]) -> LogicalKV:
    """Float32 `[token, layer, head, 2, D]` a group, as a layout's pools keep them."""
    return [
        _parts(values.tobytes(), SlotFormat.of("float32", group.slot.head_dim), group, values.shape)
        for group, values in zip(layout.groups, numbers, strict=True)
    ]


def converted(kv: LogicalKV, source: KVLayout, destination: KVLayout) -> LogicalKV:
    """What the destination keeps of a source's KV, by way of the wire."""
    result = []
    for index, (ours, theirs) in enumerate(zip(source.groups, destination.groups, strict=True)):
        data: Any = np.concatenate(kv[index], axis=-1).tobytes()  # slabs of one slot
        wire = destination.wire_slot(index)
        data = convert_slabs(data, 1, ours.slot, wire) if wire != ours.slot else data
        result.append(_parts(data, wire, theirs, kv[index][0].shape))
    return result


def _parts(data: Any, slot: SlotFormat, group: KVGroup, shape: Sequence[int]) -> list[Bytes]:
    if slot != group.slot:
        data = convert_slabs(data, 1, slot, group.slot)
    widths = part_widths(group)
    rows = np.frombuffer(data, np.uint8).reshape(*shape[:3], sum(widths))
    return list(np.split(rows, np.cumsum(widths)[:-1], axis=-1))


@dataclass
class Rank:
    """One rank of a worker."""

    pool: Bytes
    life: BlockLife
    end: Any
    heard: list[MoverEvent] = field(default_factory=list)


@dataclass
class PlannedPair:
    """P and D, and one sequence of which D lacks everything from `first_token` on."""

    source: KVLayout
    destination: KVLayout
    plan: TransferPlan
    num_tokens: int
    first_token: int
    kv: LogicalKV
    source_tables: list[list[int]]
    tables: list[list[int]]
    senders: list[Rank]
    receivers: list[Rank]
    network: FakeNetwork | None
    key: tuple[SessionId, int] = (SessionId(7), 1)
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    permits: list[Permit] = field(default_factory=list)

    # ---- D

    def lacking(self) -> tuple[tuple[Destination, ...], ...]:
        """The blocks that D lacks, of each group."""
        layout = self.destination
        first = self.first_token // layout.block_size
        return tuple(
            tuple(
                Destination(p, BlockId(table[p]), layout.valid_slots(p, self.num_tokens))
                for p in range(first, layout.num_blocks(self.num_tokens))
            )
            for table in self.tables
        )

    def expect(self) -> None:
        """Reserve at every rank of D."""
        lacking = self.lacking()
        blocks = [d.block for group in lacking for d in group]
        for number, rank in enumerate(self.receivers):
            for block in blocks:
                rank.life.allocate(block)
            permit = rank.life.grant(*self.key, blocks)
            self.permits.append(permit)
            incoming = IncomingPlan(self.plan, number, self.num_tokens)
            rank.end.expect(ReceiveSession(*self.key, self.secret, permit, lacking, incoming))

    def give_up(self) -> list[BlockState]:
        """What an engine does at an abort, at every rank; the states that blocks are in after."""
        states = []
        for rank, permit in zip(self.receivers, self.permits, strict=True):
            rank.end.forget(*self.key)
            rank.life.revoke(permit)
            states += [rank.life.abort(BlockId(block)) for block in permit.generations]
        self.permits.clear()
        return states

    # ---- P

    def open(self) -> None:
        """Let every rank of P reach those of D that want something of it."""
        first_tokens = (self.first_token,) * len(self.source.groups)
        for pair in self.plan.pairs:
            address = self.receivers[pair.destination_rank].end.addresses[0]
            plan = OutgoingPlan(self.plan, pair, first_tokens, self.num_tokens)
            session = SendSession(*self.key, self.secret, address, plan)
            self.senders[pair.source_rank].end.open(session)

    def push(self, rank: int, layers_per_range: int = 2) -> None:
        """All that a rank of P holds, a range of layers at a time."""
        layout, sender = self.source, self.senders[rank]
        first = self.first_token // layout.block_size
        for group, table in enumerate(self.source_tables):
            blocks = [
                SourceBlock(p, BlockId(table[p]), layout.valid_slots(p, self.num_tokens))
                for p in range(first, layout.num_blocks(self.num_tokens))
            ]
            num_layers = len(layout.rank_share(group, rank).layers)
            for start in range(0, num_layers, layers_per_range):
                count = min(layers_per_range, num_layers - start)
                sender.end.push(*self.key, group, blocks, start, count)

    def push_all(self) -> None:
        """All of it, from every rank that is reached."""
        for rank in {pair.source_rank for pair in self.plan.pairs}:
            self.push(rank)

    # ---- looking

    def until(self, predicate: Callable[[], bool]) -> None:
        """Let the transport work until something holds."""
        if self.network is not None:
            self.network.run()
        deadline = time.monotonic() + TIMEOUT_S
        while not predicate():
            assert time.monotonic() < deadline, [rank.heard for rank in self.receivers]
            time.sleep(0.002)

    @property
    def complete_ranks(self) -> list[int]:
        """D's ranks that have everything."""
        done = SessionComplete(*self.key)
        return [number for number, rank in enumerate(self.receivers) if done in rank.heard]

    @property
    def is_complete(self) -> bool:
        """Whether all of D's ranks have everything."""
        return len(self.complete_ranks) == len(self.receivers)

    def assert_arrived(self) -> None:
        """Every token that D lacked is in its place on every rank, and no byte of any other block has changed."""
        kv = converted(self.kv, self.source, self.destination)
        layout = self.destination
        marks = [[np.ones_like(part) for part in parts] for parts in kv]
        needed = range(self.first_token, self.num_tokens)
        for number, rank in enumerate(self.receivers):
            expected, is_needed = np.full_like(rank.pool, POISON), np.zeros_like(rank.pool)
            scatter(expected, layout, number, kv, self.tables, needed)
            scatter(is_needed, layout, number, marks, self.tables, needed)
            assert (rank.pool[is_needed == 1] == expected[is_needed == 1]).all()
            ours = {block for group in self.lacking() for _, block, _ in group}
            others = [block for block in range(len(rank.pool)) if block not in ours]
            assert (rank.pool[others] == POISON).all()

    def assert_idle(self) -> None:
        """No writer inside, nothing outstanding."""
        for rank in self.receivers:
            for block in range(len(rank.pool)):
                assert rank.life.num_writers(BlockId(block)) == 0
                assert rank.life.state(BlockId(block)) is not BlockState.QUARANTINED
        for rank in self.senders:
            assert rank.end.counters.blocks_outstanding == 0
            assert rank.end.counters.bytes_outstanding == 0


@contextmanager
def planned_pair(
    transport: str,
    source: KVLayout,
    destination: KVLayout,
    num_tokens: int,
    *,
    first_token: int = 0,
    seed: int = 0,
    slice_bytes: int = 100,
) -> Iterator[PlannedPair]:
    """Both workers with random KV in P's pools, closed at the end."""
    rng = np.random.default_rng(seed)
    plan = build_plan(source, destination)
    numbers = [
        rng.standard_normal(
            (num_tokens, len(group.layers), group.num_kv_heads, 2, group.slot.head_dim)
        ).astype(np.float32)
        for group in source.groups
    ]
    kv = numbers_as_kv(source, numbers)
    source_tables, tables = (
        _random_tables(layout, num_tokens, rng) for layout in (source, destination)
    )
    network = FakeNetwork(slice_bytes) if transport == "fake" else None
    config = TransferConfig(reconnect_delay_s=0.001, connect_timeout_s=2.0)
    senders, receivers = [], []
    for number in range(source.num_ranks):
        rank = _rank(source, number, source_tables)
        scatter(rank.pool, source, number, kv, source_tables, range(num_tokens))
        rank.end = _sender(network, rank, source, number, config)
        senders.append(rank)
    for number in range(destination.num_ranks):
        rank = _rank(destination, number, tables)
        rank.end = _receiver(network, rank, destination, number, config)
        receivers.append(rank)
    try:
        yield PlannedPair(
            source, destination, plan, num_tokens, first_token, kv, source_tables, tables, senders,
            receivers, network,
        )  # fmt: skip
    finally:
        for rank in [*senders, *receivers]:
            rank.end.close()


def _random_tables(layout: KVLayout, num_tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """For each group the blocks of the sequence; block 0 and a spare beside them."""
    num_blocks = layout.num_blocks(num_tokens)
    ids = 1 + rng.permutation(len(layout.groups) * num_blocks + 1)
    return [list(map(int, ids[i * num_blocks :][:num_blocks])) for i in range(len(layout.groups))]


def _rank(layout: KVLayout, number: int, tables: list[list[int]]) -> Rank:
    num_blocks = sum(map(len, tables)) + 2
    pool = np.full((num_blocks, layout.rank_block_bytes(number)), POISON, np.uint8)
    return Rank(pool, BlockLife(num_blocks), None)


def _sender(
    network: FakeNetwork | None, rank: Rank, layout: KVLayout, number: int, config: TransferConfig
) -> Sender:
    pool, post = memoryview(rank.pool.reshape(-1)), rank.heard.append
    if network is not None:
        return FakeSender(network, pool, layout, post, config, number)
    return TcpSender(pool, layout, post, config, number)


def _receiver(
    network: FakeNetwork | None, rank: Rank, layout: KVLayout, number: int, config: TransferConfig
) -> Receiver:
    pool, post = memoryview(rank.pool.reshape(-1)), rank.heard.append
    if network is not None:
        return FakeReceiver(network, rank.life, pool, layout, post, number)
    return TcpReceiver(Intake(rank.life, pool, layout, post, number), config)
