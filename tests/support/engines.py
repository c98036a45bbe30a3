"""Real engines over a tiny model, stepped by the test, and a wire between a decode and a prefill engine.

Everything is real but the model's size and the fronts: the scheduler, the pool, the tcp movers and their threads, or
movers over a network in memory that the test drives. The wire turns what one engine says into what the other hears, as
two fronts and a Prefill stream would; a test can hold messages back, drop them or cut the stream.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec

from core.block_hash import HashRoot
from core.blocks import BlockLife
from core.ids import RequestId, SessionId
from core.kv_identity import KVIdentity
from core.kv_layout import KVLayout
from core.request import Request, SamplingParams
from engine.assembly import assemble
from engine.channel import Inbox
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.devices import HOST
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.device_storage import allocate_device_pool
from engine.kvcache.storage import allocate_pool
from engine.messages import (
    AbortRequest,
    AddPrefill,
    AddRequest,
    AnnouncePrefill,
    CallPrefill,
    ChoiceOutput,
    DeclinePrefill,
    EndPrefill,
    EngineProgress,
    EngineReady,
    FirstTokens,
    GrantPrefill,
    PrefillAnnounced,
    PrefillAnswered,
    PrefillDeclined,
    PrefillEnded,
    PrefillGranted,
    PrefillLost,
    PrefillRenewed,
    PrefillRoom,
    RefusePrefill,
    RoomForPrefill,
    StepDone,
    TransportOffer,
)
from engine.movers import make_movers
from engine.offload.offload import Offload
from engine.offload.opening import open_tiers
from engine.runner.model_runner import ModelRunner
from engine.sampler.sampler import Sampler
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from engine.stats import EngineStats
from kvtransfer.config import TransferConfig
from kvtransfer.transports.base import Receiver, Sender
from kvtransfer.transports.choice import Receivers, Senders
from kvtransfer.transports.fake.ends import FakeReceiver, FakeSender
from kvtransfer.transports.fake.network import FakeNetwork
from tests.support import ledger_model
from tests.support.ledger_model import GROUP_SHAPES, LedgerRunner, LedgerSampler, ledger_layout
from tests.support.poison import POISON_BYTE
from tests.support.tiny_model import tiny_model

BLOCK_SIZE = 16


class EngineHarness:
    """One engine without a process: `turn` it, read what it said."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        budget: int = 48,
        model_seed: int = 0,
        is_staged: bool = False,
        is_ledger: bool = False,
        network: FakeNetwork | None = None,
        **config: Any,
    ) -> None:
        """is_staged: whether movers have a memory of their own beside the kernels'; what was never written is NaN.

        is_ledger: whether the model is the ledger, see there. network: what movers use instead of sockets.
        """
        self.config = EngineConfig(model="tiny", max_num_seqs=16, **{"ipc_dir": "none", **config})
        model = _ledger(self.config, model_seed) if is_ledger else _tiny(self.config, model_seed)
        self.layout, self.identity = model.layout, model.identity
        self.root = HashRoot.of(self.identity, lossy_settings=self.config.lossy_settings)
        self.storage = storage = _allocate(self.layout, num_blocks + 1, is_staged=is_staged)
        self.pool = BlockPool(BlockLife(num_blocks + 1, storage.memory.generations))
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=self.config.block_size,
                max_num_batched_tokens=budget,
                max_num_seqs=16,
                max_model_len=512,
                vocab_size=model.vocab_size,
                policy=self.config.scheduling_policy,
                hash_root=self.root if self.config.enable_prefix_caching else None,
            ),
            self.pool,
        )
        self.inbox = Inbox()
        self.said: deque[Any] = deque()
        self.outputs: dict[RequestId, list[ChoiceOutput]] = defaultdict(list)
        self.stats = EngineStats()
        self.num_told = 0
        self.receivers, self.senders = self._movers(network)
        self.core = EngineCore(
            config=self.config,
            inbox=self.inbox,
            send=self._hear,
            identity=self.identity,
            layout=self.layout,
            scheduler=self.scheduler,
            pool=self.pool,
            storage=storage,
            runner=model.make_runner(storage),
            sampler=model.sampler,
            eos_token_ids=frozenset(),
            receivers=self.receivers,
            senders=self.senders,
            offload=self._offload(num_blocks),
        )

    def _offload(self, num_blocks: int) -> Offload:
        config, post = self.config.offload, self.inbox.post
        self.tiers = open_tiers(config, self.layout, self.root, num_blocks, post)
        lazy_blocks = 0 if config.store == "eager" else 8
        return Offload(self.tiers, self.scheduler, self.storage, post, lazy_blocks=lazy_blocks)

    @property
    def receiver(self) -> Receiver:
        """The end that takes runs in; the best one where there are several."""
        return self.receivers._receivers[0]

    @property
    def sender(self) -> Sender:
        """The end that sends; the best one where there are several."""
        return next(iter(self.senders._senders.values()))

    def _movers(self, network: FakeNetwork | None) -> tuple[Receivers, Senders]:
        life, layout, post = self.pool.life, self.layout, self.inbox.post
        if network is None:
            return make_movers(self.config, life, self.storage, layout, post)
        config = TransferConfig(link_rate_bytes_s=self.config.link_rate_bytes_s)
        buffer = self.storage.buffer
        receiver = FakeReceiver(network, life, buffer, layout, post)
        senders = Senders(
            {"fake": lambda post: FakeSender(network, buffer, layout, post, config)}, post
        )
        return Receivers(receiver.intake, [receiver]), senders

    def _hear(self, message: Any) -> None:
        if not isinstance(message, StepDone):
            self.said.append(message)
            return
        self.stats = message.stats
        self.num_told += bool(message.outputs)
        for output in message.outputs:
            self.outputs[output.request_id].append(output)

    def turn(self, wait_s: float = 0.0) -> None:
        """One turn of the engine's loop, and a look at its books."""
        self.core.turn(wait_s)
        self.core.check_integrity()

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        """The answer so far."""
        outputs = self.outputs[RequestId(request_id)]
        return [token for o in outputs if o.choice == choice for token in o.token_ids]

    def finish_reasons(self, request_id: str) -> dict[int, str]:
        """Finish reason by choice, of those that have ended."""
        outputs = self.outputs[RequestId(request_id)]
        return {o.choice: o.finish_reason for o in outputs if o.finish_reason}

    def is_idle(self) -> bool:
        """Whether nothing is held, open or owed."""
        stats = self.stats
        return not any(
            (
                self.scheduler.has_work,
                stats.num_running,
                stats.num_waiting,
                stats.num_arriving,
                self.scheduler.num_loading,
                self.pool.num_held,
                self.pool.num_quarantined,
                stats.num_open_sessions,
                stats.blocks_outstanding,
                self.pool.life.num_live_permits,
                self.core._offload.is_busy,
            )
        )

    def close(self) -> None:
        """Look at its books once more, and join its movers."""
        try:
            self.core.check_integrity()
            assert not self.stats.integrity_violations_total, "found broken while it was idle"
        finally:
            self.core.close()


class _Model(NamedTuple):
    """What a harness needs of a model."""

    layout: KVLayout
    identity: KVIdentity
    vocab_size: int
    make_runner: Callable[[Any], Any]
    sampler: Any


def _tiny(config: EngineConfig, seed: int) -> _Model:
    model = tiny_model(seed)
    groups = model.config.kv_groups(config.kv_dtype)
    layout = KVLayout(config.block_size, groups, wire_dtype=config.wire_dtype)
    identity = KVIdentity(f"tiny{seed}", "float32", "float32", "", model.config.group_shapes())
    make_runner = partial(ModelRunner, model, layout, layers_per_range=1)
    return _Model(layout, identity, model.config.vocab_size, make_runner, Sampler())


def _ledger(config: EngineConfig, seed: int) -> _Model:
    layout = ledger_layout(config.block_size)
    identity = KVIdentity(f"ledger{seed}", "float32", "float32", "", GROUP_SHAPES)
    make_runner = partial(LedgerRunner, layout)
    return _Model(layout, identity, ledger_model.VOCAB_SIZE, make_runner, LedgerSampler())


def _allocate(layout: KVLayout, num_blocks: int, *, is_staged: bool) -> Any:
    if not is_staged:
        return allocate_pool(layout, num_blocks)
    storage = allocate_device_pool(layout, num_blocks, HOST)
    storage.tensor.fill_(POISON_BYTE)
    storage.mirror.tensor.fill_(POISON_BYTE)
    return storage


class AssembledEngine(EngineHarness):
    """The same, put together by `engine.assembly` from its config, as an engine process does it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.inbox = Inbox()
        self.said: deque[Any] = deque()
        self.outputs: dict[RequestId, list[ChoiceOutput]] = defaultdict(list)
        self.stats = EngineStats()
        self.num_told = 0
        self.core = assemble(config, self.inbox, self._hear)
        self.progress = [m.message for m in self.said if isinstance(m, EngineProgress)]
        (ready,) = [message for message in self.said if isinstance(message, EngineReady)]
        self.said.clear()
        self.kernels, self.identity, self.layout = ready.kernels, ready.identity, ready.layout
        self.root = ready.hash_root
        self.pool, self.scheduler = self.core._pool, self.core._scheduler
        self.receivers, self.senders = self.core._receivers, self.core._senders


def make_request(
    request_id: str, prompt: list[int] | tuple[int, ...], *, max_tokens: int = 8, **sampling: Any
) -> Request:
    """A greedy request unless told otherwise."""
    params = SamplingParams(**{"seed": 7, "temperature": 0.0, "max_tokens": max_tokens, **sampling})
    return Request(RequestId(request_id), "tiny", tuple(prompt), params)


def run_alone(request: Request, **harness: Any) -> list[list[int]]:
    """The answer, a list a choice, of one engine that runs everything itself."""
    engine = EngineHarness(**harness)
    try:
        engine.inbox.post(AddRequest(request))
        turn_until(lambda: len(engine.finish_reasons(request.id)) == request.sampling.n, engine)
        return [engine.tokens(request.id, choice) for choice in range(request.sampling.n)]
    finally:
        engine.close()


def turn_until(done: Callable[[], bool], *engines: Any, timeout_s: float = 20.0) -> None:
    """Turn everything in turn until `done`."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "nothing more happens"
        for engine in engines:
            engine.turn(0.001)


@dataclass
class Wire:
    """A decode engine and its prefill candidates, by address.

    network: what carries KV, when that is in memory; each turn lets everything on it happen.
    dropped: message types that the wire loses. held: while true nothing passes. is_slow: while true KV does not move.
    """

    decode: EngineHarness
    prefill: dict[str, EngineHarness]
    dropped: set[type] = field(default_factory=set)
    held: bool = False
    network: FakeNetwork | None = None
    is_slow: bool = False
    passed: list[Any] = field(default_factory=list)
    streams: dict[tuple[int, int], str] = field(default_factory=dict)

    def turn(self, wait_s: float = 0.0) -> None:
        """Carry every message that waits, and what is on the network."""
        while self.carry_one():
            pass
        if self.network is not None and not self.is_slow:
            self.network.run()

    def carry_one(self) -> bool:
        """Carry one message, D's before those of P; whether there was one."""
        if self.held:
            return False
        if self.decode.said:
            self._to_prefill(self.decode.said.popleft())
            return True
        for address, engine in self.prefill.items():
            if engine.said:
                self._to_decode(address, engine.said.popleft())
                return True
        return False

    def renew(self) -> None:
        """D's front says of every open session that it is still wanted."""
        lease_ms = self.decode.config.session_lease_ms
        for key, address in self.streams.items():
            if address in self.prefill:
                self.prefill[address].inbox.post(PrefillRenewed(*_name(key), lease_ms))

    def lose_streams(self, address: str) -> None:
        """The control connection between D and one P is gone: each side hears of its end."""
        for key in [key for key, at in self.streams.items() if at == address]:
            if address in self.prefill:
                self.prefill[address].inbox.post(PrefillEnded(*_name(key), "the stream is lost"))
            self._lose(key, "PeerLost", "connection reset")

    def end_streams(self) -> None:
        """Every P hears that D is gone."""
        for key, address in self.streams.items():
            if address in self.prefill:
                self.prefill[address].inbox.post(PrefillEnded(*_name(key), "the stream is lost"))

    def cut(self, address: str) -> None:
        """The prefill worker dies: its streams end on D's side, and it hears and says nothing more."""
        self.prefill.pop(address).close()
        self.lose_streams(address)

    def _lose(self, key: tuple[int, int], kind: str, reason: str) -> None:
        if self.streams.pop(key, None) is not None:
            self.decode.inbox.post(PrefillLost(*_name(key), kind, reason))

    def _to_prefill(self, message: Any) -> None:
        self.passed.append(message)
        key = (message.session_id, message.attempt)
        if isinstance(message, CallPrefill):
            self.streams[key] = message.candidate
            if message.candidate not in self.prefill:
                self._lose(key, "PeerLost", "connection refused")
                return
        engine = self.prefill.get(self.streams.get(key, ""))
        if engine is None or type(message) in self.dropped:
            return
        engine.inbox.post(_as_heard_by_prefill(message, self.decode))
        if isinstance(message, EndPrefill):
            self.streams.pop(key, None)

    def _to_decode(self, address: str, message: Any) -> None:
        self.passed.append(message)
        key = (message.session_id, message.attempt)
        if self.streams.get(key) != address or type(message) in self.dropped:
            return
        if isinstance(message, RefusePrefill):
            self._lose(key, message.error_kind, message.message)
        elif isinstance(message, AnnouncePrefill):
            layout = self.prefill[address].layout
            self.decode.inbox.post(PrefillAnnounced(*key, message.num_cached_tokens, layout))
        elif isinstance(message, FirstTokens):
            self.decode.inbox.post(PrefillAnswered(*msgspec.structs.astuple(message)))


def _name(key: tuple[int, int]) -> tuple[SessionId, int]:
    return SessionId(key[0]), key[1]


def _as_heard_by_prefill(message: Any, decode: EngineHarness) -> Any:
    key = (message.session_id, message.attempt)
    if isinstance(message, CallPrefill):
        return AddPrefill(
            *key,
            message.request,
            message.num_held_tokens,
            decode.identity,
            decode.layout,
            [TransportOffer(kind, list(addresses)) for kind, addresses in decode.receivers.offers],
            message.session_secret,
            message.lease_remaining_ms,
        )
    if isinstance(message, GrantPrefill):
        return PrefillGranted(*key, message.first_missing_block)
    if isinstance(message, DeclinePrefill):
        return PrefillDeclined(*key)
    if isinstance(message, RoomForPrefill):
        return PrefillRoom(*key)
    assert isinstance(message, EndPrefill), message
    return PrefillEnded(*key, "completed" if message.completed else "given up")


def abort(engine: EngineHarness, request_id: str) -> None:
    """The client is gone."""
    engine.inbox.post(AbortRequest(RequestId(request_id)))
