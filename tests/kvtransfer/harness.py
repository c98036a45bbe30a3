"""Two pools, a receiver, a sender, and the little of an engine that a transfer needs."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle

import pytest

from core.blocks import BlockLife, BlockState, Permit
from core.errors import ConfigError
from core.ids import BlockId, SessionId
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from kvtransfer.config import TransferConfig
from kvtransfer.events import (
    BlocksAcknowledged,
    MoverEvent,
    RunAdmitted,
    RunsAdmitted,
    WriterLeft,
)
from kvtransfer.pool_memory import PoolMemory
from kvtransfer.session import Destination, ReceiveSession, SendSession, SourceBlock
from kvtransfer.transports.base import Receiver, Sender
from kvtransfer.transports.fake.ends import FakeReceiver, FakeSender
from kvtransfer.transports.fake.network import FakeNetwork
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.mooncake.engine import MooncakeEngine
from kvtransfer.transports.nixl.engine import NixlEngine
from kvtransfer.transports.pull.engine import Engine
from kvtransfer.transports.pull.receiver import PullReceiver
from kvtransfer.transports.pull.sender import PullSender
from kvtransfer.transports.shm.receiver import ShmReceiver
from kvtransfer.transports.shm.sender import ShmSender
from kvtransfer.transports.tcp.receiver import TcpReceiver
from kvtransfer.transports.tcp.sender import TcpSender
from tests.kvtransfer.memory_engine import MemoryEngine, Network

ENGINES = ("nixl", "mooncake")
"""Transports that need a package, and are skipped where it is not installed."""

TRANSPORTS = ("tcp", "shm", "fake", "pull", *ENGINES)
"""`pull` is what the engines have in common, over one that moves bytes inside the process."""

TIMEOUT_S = 20.0
FAST = TransferConfig(reconnect_delay_s=0.001, connect_timeout_s=2.0)


def make_layout(
    block_size: int = 4, num_layers: Sequence[int] = (3, 2), num_kv_heads: int = 2
) -> KVLayout:
    """A small layout of full-attention groups, the second one padded, of two slot formats in turn."""
    slots = cycle([SlotFormat.of("float32", 4), SlotFormat.of("int8_per_token_head", 4)])
    groups = tuple(
        KVGroup(GroupKind.FULL_ATTENTION, tuple(range(count)), num_kv_heads, slot)
        for count, slot in zip(num_layers, slots, strict=False)
    )
    return KVLayout(block_size, groups)


@dataclass
class Transfer:
    """One session attempt, both sides of it."""

    session: SessionId
    attempt: int
    secret: bytes
    permit: Permit
    sources: list[list[SourceBlock]]
    destinations: list[list[Destination]]

    @property
    def key(self) -> tuple[SessionId, int]:
        return (self.session, self.attempt)

    @property
    def blocks(self) -> list[BlockId]:
        return [d.block for group in self.destinations for d in group]


@dataclass
class Pair:
    """A D and a P with their pools; `until` lets the transport work."""

    layout: KVLayout
    num_blocks: int
    source: memoryview
    destination: bytearray
    memory: PoolMemory
    life: BlockLife
    receiver: Receiver
    sender: Sender
    received: list[MoverEvent]
    sent: list[MoverEvent]
    network: FakeNetwork | None
    reads: Network
    taken: set[BlockId] = field(default_factory=set)
    num_sessions: int = 0

    # ---- an engine's part

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Blocks of D, as its pool would give them."""
        free = [BlockId(b) for b in range(1, self.num_blocks) if BlockId(b) not in self.taken]
        blocks = free[:num_blocks]
        assert len(blocks) == num_blocks, "harness: pool too small"
        for block in blocks:
            self.life.allocate(block)
        self.taken.update(blocks)
        return blocks

    def transfer(
        self,
        num_tokens: int,
        *,
        first_missing: int = 0,
        session: SessionId | None = None,
        attempt: int = 0,
        positions: Sequence[int] | None = None,
        picks: Sequence[BlockId] | None = None,
    ) -> Transfer:
        """Reserve D's blocks for a prompt, pick P's; nothing is expected or opened yet."""
        self.num_sessions += 1
        if positions is None:
            positions = range(first_missing, self.layout.num_blocks(num_tokens))
        sources: list[list[SourceBlock]] = []
        destinations: list[list[Destination]] = []
        for group in range(len(self.layout.groups)):
            blocks = self.allocate(len(positions))
            slots = [self.layout.valid_slots(position, num_tokens) for position in positions]
            size = len(positions)
            held = picks[group * size :][:size] if picks else self._some_sources(group, size)
            sources.append([*map(SourceBlock, positions, held, slots)])
            destinations.append([*map(Destination, positions, blocks, slots)])
        name = SessionId(secrets.randbits(63)) if session is None else session
        all_blocks = [d.block for group in destinations for d in group]
        permit = self.life.grant(name, attempt, all_blocks)
        secret = secrets.token_bytes(32)
        return Transfer(name, attempt, secret, permit, sources, destinations)

    def _some_sources(self, group: int, count: int) -> list[BlockId]:
        offset = group + self.num_sessions
        return [BlockId(1 + (offset + 3 * p) % (self.num_blocks - 1)) for p in range(count)]

    def expect(self, transfer: Transfer) -> None:
        destinations = tuple(tuple(group) for group in transfer.destinations)
        self.receiver.expect(
            ReceiveSession(*transfer.key, transfer.secret, transfer.permit, destinations)
        )

    def open(self, transfer: Transfer, secret: bytes | None = None) -> None:
        address = self.receiver.addresses[0]
        self.sender.open(SendSession(*transfer.key, secret or transfer.secret, address))

    def start(self, num_tokens: int, **options: object) -> Transfer:
        """Reserve, expect and open."""
        transfer = self.transfer(num_tokens, **options)  # type: ignore[arg-type]
        self.expect(transfer)
        self.open(transfer)
        return transfer

    def push(self, transfer: Transfer, *, layers_per_range: int = 2) -> None:
        """All layers of all blocks, a range of layers at a time."""
        for index, group in enumerate(self.layout.groups):
            num_layers = len(group.layers)
            for first in range(0, num_layers, layers_per_range):
                count = min(layers_per_range, num_layers - first)
                self.sender.push(*transfer.key, index, transfer.sources[index], first, count)

    def push_some(
        self, transfer: Transfer, position: int, first: int, count: int, *, group: int = 0
    ) -> None:
        sources = [s for s in transfer.sources[group] if s.position == position]
        self.sender.push(*transfer.key, group, sources, first, count)

    def give_up(self, transfer: Transfer) -> dict[BlockId, BlockState]:
        """What an engine does at an abort: forget, revoke, abort; the state of each block after."""
        self.receiver.forget(*transfer.key)
        self.life.revoke(transfer.permit)
        states = {block: self.life.abort(block) for block in transfer.blocks}
        self.taken -= {block for block, state in states.items() if state is BlockState.FREE}
        return states

    def settle(self, block: BlockId) -> None:
        """What an engine does at WriterLeft."""
        if self.life.settle(block):
            self.taken.discard(block)

    # ---- looking

    def until(self, predicate: Callable[[], bool]) -> None:
        """Let the transport work until something holds."""
        if self.network is not None:
            self.network.run()
        deadline = time.monotonic() + TIMEOUT_S
        while not predicate():
            assert time.monotonic() < deadline, f"never: {self.received} {self.sent}"
            time.sleep(0.002)

    def saw(self, event: MoverEvent) -> Callable[[], bool]:
        return lambda: event in self.received or event in self.sent

    def events(self, kind: type[MoverEvent]) -> list[MoverEvent]:
        return [event for event in [*self.received, *self.sent] if isinstance(event, kind)]

    def poison(self) -> bytes:
        """Fill D's pool with a pattern that no source holds; what it is now."""
        self.destination[:] = b"\xa5" * len(self.destination)
        return bytes(self.destination)

    def expected(self, *transfers: Transfer, before: bytes | None = None) -> bytes:
        """D's pool after these transfers: a plain copy, layer by layer."""
        pool = bytearray(before or bytes(len(self.destination)))
        size = self.layout.block_bytes
        for transfer in transfers:
            for index, group in enumerate(self.layout.groups):
                used = group.used_bytes(self.layout.block_size)
                for source, destination in zip(
                    transfer.sources[index], transfer.destinations[index], strict=True
                ):
                    start, target = source.block * size, destination.block * size
                    pool[target : target + used] = self.source[start : start + used]
        return bytes(pool)

    def assert_idle(self) -> None:
        """No writer inside, nothing outstanding, no block left in quarantine."""
        for event in self.events(WriterLeft):
            assert isinstance(event, WriterLeft)
            self.life.settle(event.block)
        for block in range(self.num_blocks):
            assert self.life.num_writers(BlockId(block)) == 0
            assert self.life.state(BlockId(block)) is not BlockState.QUARANTINED
        assert self.sender.counters.blocks_outstanding == 0
        assert self.sender.counters.bytes_outstanding == 0


def each_of(event: MoverEvent) -> list[MoverEvent]:
    """What an event says, block by block."""
    match event:
        case RunsAdmitted(session, attempt, group, positions, first, count, are_whole):
            pairs = zip(positions, are_whole, strict=True)
            return [RunAdmitted(session, attempt, group, p, first, count, w) for p, w in pairs]
        case BlocksAcknowledged(session, attempt, group, positions):
            return [BlocksAcknowledged(session, attempt, group, (p,)) for p in positions]
    return [event]


def make_pair(
    transport: str,
    *,
    layout: KVLayout | None = None,
    num_blocks: int = 64,
    config: TransferConfig = FAST,
    slice_bytes: int = 100,
) -> Pair:
    """A pair that the caller closes; slice_bytes: how finely the fake one delivers."""
    layout = layout or make_layout()
    num_bytes = num_blocks * layout.block_bytes
    memory = PoolMemory(num_blocks, layout.block_bytes)
    memory.buffer[:] = secrets.token_bytes(num_bytes)
    destination = bytearray(num_bytes)
    views = memoryview(destination), memory.buffer
    life = BlockLife(num_blocks)
    received: list[MoverEvent] = []
    sent: list[MoverEvent] = []

    def hear(event: MoverEvent) -> None:
        received.extend(each_of(event))

    def note(event: MoverEvent) -> None:
        sent.extend(each_of(event))

    network: FakeNetwork | None = None
    reads = Network()
    receiver: Receiver
    sender: Sender
    if transport == "fake":
        network = FakeNetwork(slice_bytes)
        receiver = FakeReceiver(network, life, views[0], layout, hear)
        sender = FakeSender(network, views[1], layout, note, config)
    elif transport == "shm":
        receiver = ShmReceiver(Intake(life, views[0], layout, hear), config)
        sender = ShmSender(memory, layout, note, config)
    elif transport != "tcp":
        reader = _engine(transport, reads, is_read=False)
        intake = Intake(life, views[0], layout, hear)
        receiver = PullReceiver(transport, reader, intake, config)
        read = _engine(transport, reads, is_read=True)
        sender = PullSender(transport, read, memory, layout, note, config)
    else:
        receiver = TcpReceiver(Intake(life, views[0], layout, hear), config)
        sender = TcpSender(views[1], layout, note, config)
    return Pair(
        layout, num_blocks, memory.buffer, destination, memory, life, receiver, sender, received, sent,
        network, reads,
    )  # fmt: skip


def _engine(transport: str, reads: Network, *, is_read: bool) -> Engine:
    if transport == "pull":
        return MemoryEngine(reads)
    try:
        return NixlEngine(is_read=is_read) if transport == "nixl" else MooncakeEngine("127.0.0.1")
    except ConfigError as error:
        if "is not installed" not in error.message:
            raise
        pytest.skip(error.message)


@contextmanager
def pair(transport: str, **options: object) -> Iterator[Pair]:
    """A pair that is closed at the end."""
    with tempfile.TemporaryDirectory(prefix="baton-test-") as folder:
        config = replace(options.pop("config", FAST), ipc_dir=folder)  # type: ignore[type-var]
        made = make_pair(transport, config=config, **options)  # type: ignore[arg-type]
        try:
            yield made
        finally:
            close_pair(made)


def close_pair(made: Pair) -> None:
    """Give everything back; BufferError while somebody holds a view of P's pool."""
    made.sender.close()
    made.receiver.close()
    made.memory.close()
    made.memory.buffer.release()
    made.memory.generations.release()
    made.memory.mapping.close()  # BufferError while somebody holds a view of it
