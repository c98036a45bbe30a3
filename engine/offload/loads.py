"""KV on its way from tiers back into the pool, ahead of the sequences that need it.

A load serves one waiting sequence: it pins what the pool has of the sequence's chain, takes blocks for what tiers
have beyond, and lets the tiers' movers fill them under a permit. What came whole and verified is committed; then all
is let go, head last, and the sequence, which held nothing, waits at its old place again: it finds the blocks like
anything cached. So a load that fails, is slow or is given up costs its sequence nothing but the time that it took.

    look_up -> nothing to load                                      (the sequence waits on)
            -> asks the shared store -> loads -> over               (the sequence is WAITING_FOR_KV until then)
                            \\-> over, with less or nothing

Promises: nothing is committed that was not verified, and nothing behind a gap; a load is begun only where it is
faster than to compute, by measured rates, and is cut short when it turns out not to be; what is promised to looked-up
sequences fits the pool together. Engine thread only; never waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from core.blocks import BlockLife, Permit
from core.ids import BlockId, SessionId
from engine.channel import monotonic_ms
from engine.kvcache.chain import BlockContent
from engine.kvcache.manager import KVManager
from engine.kvcache.storage import Storage
from engine.offload.targets import PermittedBlocks
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence as EngineSequence
from kvtransfer.events import PostEvent
from kvtransfer.tiers.base import BlockKey
from kvtransfer.tiers.connector import KVConnector, Segment, head_of
from kvtransfer.tiers.mover import AskDone, LoadDone

PATIENCE_MS = 10.0
"""A load is let go on for so long beyond twice what was predicted, before it is held to what computing would take."""

ASK_SHARE = 0.1
"""A shared store is waited for no longer than this share of the time that computing the tokens would take."""


@dataclass(slots=True)
class LoadCounters:
    """Tokens, since the start.

    queries: looked up in tiers, beyond what the pool had. hits: read back and committed.
    declined: held by a tier, and not loaded because to compute them is faster.
    """

    queries: int = 0
    hits: int = 0
    declined: int = 0


@dataclass(eq=False, slots=True)
class _Load:
    """One sequence's load.

    contents: of all its full blocks. first: how many of them the pool had.
    keys: of the blocks behind those, position by position, in each position group by group.
    pinned, blocks: held here: the pool's own, and those to be filled, in the order of keys.
    is_good: of each of the blocks, whether it is there and verified.
    first_of_job: for each segment that a mover has not answered, the place of its first block.
    due_ms: when it is looked at again; 0 for never.
    """

    sequence: EngineSequence
    contents: list[BlockContent]
    first: int
    keys: list[BlockKey]
    is_asking: bool = False
    pinned: list[BlockId] = field(default_factory=list)
    blocks: list[BlockId] = field(default_factory=list)
    permit: Permit | None = None
    targets: list[PermittedBlocks] = field(default_factory=list)
    is_good: list[bool] = field(default_factory=list)
    first_of_job: dict[int, int] = field(default_factory=dict)
    started_ms: float = 0.0
    due_ms: float = 0.0
    followers: list[EngineSequence] = field(default_factory=list)


class LoadSide:
    """The loads of one engine; see the module.

    storage: memory of the pool. post: for movers that leave quarantined blocks.
    arriving_share: share of the pool that may be held for sequences that do not decode yet.
    prefill_tokens_per_s: what computing is taken to do before `note_step` has told.
    """

    def __init__(
        self,
        connector: KVConnector,
        scheduler: Scheduler,
        storage: Storage,
        post: PostEvent,
        *,
        arriving_share: float,
        prefill_tokens_per_s: float,
    ) -> None:
        self._connector = connector
        self._scheduler = scheduler
        self._kv: KVManager = scheduler.kv
        self._pool = scheduler.kv.pool
        self._life: BlockLife = scheduler.kv.pool.life
        self._storage = storage
        self._post = post
        self._arriving_share = arriving_share
        self._compute_s_a_token = 1.0 / prefill_tokens_per_s
        self._loads: dict[EngineSequence, _Load] = {}
        self._by_job: dict[int, _Load] = {}
        self._ready: set[EngineSequence] = set()
        self._questions: set[int] = set()
        self.counters = LoadCounters()

    # ---- what there is

    @property
    def num_open(self) -> int:
        """Loads under way, and jobs that movers have not answered."""
        return len(self._loads) + len(self._by_job.keys() | self._questions)

    @property
    def num_permits(self) -> int:
        """Permits granted to loads and in force."""
        return sum(load.permit is not None for load in self._loads.values())

    def held_blocks(self) -> Iterator[list[BlockId]]:
        """The blocks that each load holds."""
        for load in self._loads.values():
            yield [*load.pinned, *load.blocks]

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step of mostly prompt tokens took so long: what computing costs."""
        self._compute_s_a_token += 0.2 * (seconds / num_tokens - self._compute_s_a_token)

    # ---- looking up

    def look_ahead(self) -> None:
        """Look up those waiting sequences, in order, for whose prompts there is room beside those in front of them.

        What was loaded for a sequence behind is no hindrance, or the two would wait for each other.
        """
        self._let_go_of_ended()
        promised = 0
        for sequence in self._scheduler.queued():
            num_tokens = sequence.num_tokens + 1
            needed = self._kv.num_blocks_for(num_tokens)
            if load := self._loads.get(sequence):
                promised += needed - len(load.pinned) - len(load.blocks)
            elif sequence.is_looked_up:
                promised += needed if sequence in self._ready else 0
            elif (promised and promised + needed > self._pool.num_free) or not self._kv.fits(
                sequence, num_tokens
            ):
                return
            elif self.look_up(sequence):
                promised += needed

    def look_up(self, sequence: EngineSequence) -> bool:
        """Begin to load what tiers have of a waiting sequence without blocks; whether it is held for that now."""
        sequence.is_looked_up = True
        contents = self._kv.contents(sequence)
        first = len(self._kv.matched(sequence)[0])
        keys = [
            BlockKey(content.key, group)
            for content in contents[first:]
            for group in range(self._kv.num_groups)
        ]
        if not keys:
            return False
        if leader := self._load_of(keys[0]):
            leader.followers.append(sequence)
            self._scheduler.hold(sequence)
            return True
        self.counters.queries += self._num_tokens(keys)
        load = _Load(sequence, contents, first, keys)
        return self._ask(load) or self._begin(load)

    def reclaim(self) -> bool:
        """Somebody who runs lacks a block: end the last load in order, with what has come; whether there was one."""
        loads = [load for load in self._loads.values() if load.blocks]
        if not loads:
            return False
        self._finish(max(loads, key=lambda load: self._scheduler.order_of(load.sequence)))
        return True

    def drop(self) -> None:
        """End every load, and keep nothing of it."""
        for load in list(self._loads.values()):
            load.is_good = [False] * len(load.is_good)
            self._finish(load)

    # ---- ends of jobs

    def ask_done(self, event: AskDone) -> None:
        """The shared store has answered; its tier has noted it."""
        self._questions.discard(event.job)
        load = self._by_job.pop(event.job, None)
        if load is not None and load.is_asking:
            self._go_on(load)

    def load_done(self, event: LoadDone) -> None:
        """A tier has filled, or not filled, a segment."""
        load = self._by_job.pop(event.job, None)
        if load is None:
            return  # the connector's own
        first = load.first_of_job.pop(event.job)
        if self._loads.get(load.sequence) is not load:
            return  # given up meanwhile
        bad = {*event.damaged, *event.unread}
        for index, placement in enumerate(event.placements, first):
            load.is_good[index] = placement not in bad
        if not load.first_of_job:
            self._finish(load)

    def expire(self) -> None:
        """Cut short what has turned out slower than computing; go on without a store that does not answer."""
        now = monotonic_ms()
        for load in list(self._loads.values()):
            if not load.due_ms or load.due_ms > now:
                continue
            if load.is_asking:
                self._go_on(load)
            elif self._is_too_slow(load, now):
                self._finish(load)

    def next_due_s(self, most: float) -> float:
        """Seconds until `expire` has something to look at, no more than `most`."""
        due = [load.due_ms for load in self._loads.values() if load.due_ms]
        return max(0.0, min(most, (min(due) - monotonic_ms()) / 1e3)) if due else most

    # ---- inside

    def _ask(self, load: _Load) -> bool:
        """Ask a shared store where our own tiers do not have all; whether the sequence waits for the answer."""
        if not self._connector.has_shared or self._questions - self._by_job.keys():
            return False  # none, or one that has not answered a question that was given up
        known = sum(len(segment.keys) for segment in self._connector.find(load.keys))
        if known == len(load.keys):
            return False
        job = self._connector.new_job()
        load.is_asking = True
        tokens = self._num_tokens(load.keys[known:])
        load.due_ms = monotonic_ms() + 1e3 * ASK_SHARE * tokens * self._compute_s_a_token
        self._open(load)
        self._by_job[job] = load
        self._questions.add(job)
        self._connector.ask(job, load.keys[known:], lambda: load.is_asking)
        return True

    def _go_on(self, load: _Load) -> None:
        """With what the shared store has said, or without it. Those that follow go on too: together, if it loads."""
        followers, load.followers = load.followers, []
        self._close(load)
        if self._scheduler.is_held(load.sequence):
            self._scheduler.resume(load.sequence)
            if self._begin(load):
                load.followers = followers
                return
        self._release_followers(followers)

    def _begin(self, load: _Load) -> bool:
        """Take blocks and have them filled; whether there is anything to wait for."""
        segments = self._choose(load)
        num_keys = sum(len(segment.keys) for segment in segments)
        blocks = self._take(load, num_keys) if num_keys else None
        if blocks is None:
            return False
        load.blocks, load.is_good = blocks, [False] * num_keys
        load.permit = self._life.grant(SessionId(self._connector.new_job()), 0, blocks)
        load.started_ms = monotonic_ms()
        load.due_ms = load.started_ms + 2e3 * self._connector.predict_s(segments) + PATIENCE_MS
        self._open(load)
        for segment in segments:
            job = self._connector.new_job()
            self._by_job[job] = load
            load.first_of_job[job] = segment.first
            ids = blocks[segment.first : segment.first + len(segment.keys)]
            targets = PermittedBlocks(self._life, load.permit, ids, self._storage, self._post)
            load.targets.append(targets)
            self._connector.load(job, segment, targets)
        return True

    def _open(self, load: _Load) -> None:
        self._loads[load.sequence] = load
        self._scheduler.hold(load.sequence)

    def _choose(self, load: _Load) -> Sequence[Segment]:
        """What is worth loading, and fits beside what other sequences hold that do not decode yet."""
        found = self._connector.find(load.keys)
        compute_s = self._compute_s_a_token * self._kv.block_size / self._kv.num_groups
        chosen = self._connector.worthwhile(found, compute_s)
        declined = found[len(chosen) :]
        self.counters.declined += sum(self._num_tokens(segment.keys) for segment in declined)
        self._connector.look_again(declined)
        return head_of(chosen, self._num_allowed(), self._kv.num_groups)

    def _num_allowed(self) -> int:
        """Blocks that loads may take beside those held already; without any, one load may take what it likes."""
        held = self._scheduler.num_undecoded_blocks + sum(map(len, self.held_blocks()))
        cap = int(self._pool.num_usable * self._arriving_share)
        return self._pool.num_free if not held else max(0, min(cap - held, self._pool.num_free))

    def _take(self, load: _Load, num_blocks: int) -> list[BlockId] | None:
        """Pin the head, so that it stays in front of what comes, and take blocks; nothing where they are lacking."""
        pinned = [ids[: load.first] for ids in self._kv.matched(load.sequence)]
        if len(pinned[0]) < load.first:
            return None  # evicted while the store was asked
        load.pinned = [block for position in zip(*pinned, strict=True) for block in position]
        for block in load.pinned:
            self._pool.acquire(block)
        blocks = self._pool.allocate(num_blocks)
        if blocks is None:
            self._pool.release(reversed(load.pinned))
            load.pinned = []
        return blocks

    def _is_too_slow(self, load: _Load, now: float) -> bool:
        """Whether computing the rest would be faster than waiting for it, as fast as it has come so far."""
        num_done = sum(targets.num_done for targets in load.targets)
        ms_a_block = (now - load.started_ms) / max(1, num_done)
        compute_ms = 1e3 * self._compute_s_a_token * self._kv.block_size / self._kv.num_groups
        load.due_ms = now + PATIENCE_MS
        return ms_a_block > compute_ms

    def _finish(self, load: _Load) -> None:
        """Keep what is whole and verified, let go of everything, and let the sequence go on."""
        num_good = self._close(load)
        self.counters.hits += num_good * self._kv.block_size
        if self._scheduler.is_held(load.sequence):
            self._scheduler.resume(load.sequence)
            if num_good:
                self._ready.add(load.sequence)

    def _close(self, load: _Load) -> int:
        """End a load, or its question; how many positions it brought."""
        del self._loads[load.sequence]
        if load.is_asking:
            load.is_asking = False
            self._by_job = {job: other for job, other in self._by_job.items() if other is not load}
        num_good = 0
        if load.permit is not None:
            self._life.revoke(load.permit)
            load.permit = None
            num_good = self._commit(load)
            self._pool.release(reversed([*load.pinned, *load.blocks]))
            load.pinned, load.blocks = [], []
        self._release_followers(load.followers)
        return num_good

    def _release_followers(self, followers: Sequence[EngineSequence]) -> None:
        """Whoever waited for another one's load is looked up again."""
        for follower in followers:
            if self._scheduler.is_held(follower):
                follower.is_looked_up = False
                self._scheduler.resume(follower)

    def _commit(self, load: _Load) -> int:
        """Commit the head that came without a gap; how many positions it has."""
        groups = self._kv.num_groups
        num_good = next((i for i, good in enumerate(load.is_good) if not good), len(load.is_good))
        num_positions = num_good // groups
        for index, block in enumerate(load.blocks[: num_positions * groups]):
            position, group = divmod(index, groups)
            num_layers = len(self._storage.layout.groups[group].layers)
            self._pool.begin_fill(block)
            self._storage.bring_in(group, block, 0, num_layers)
            self._pool.commit(block, load.contents[load.first + position], group)
        return num_positions

    def _let_go_of_ended(self) -> None:
        """Sequences that ended while they were held, whose loads serve nobody; and those that have their blocks."""
        for load in list(self._loads.values()):
            if not self._scheduler.is_held(load.sequence):
                self._close(load)
        self._ready = {s for s in self._ready if s.is_waiting and s.is_looked_up}

    def _load_of(self, key: BlockKey) -> _Load | None:
        """The load that is to bring a block, if any."""
        for load in self._loads.values():
            if key in load.keys[: max(1, len(load.blocks))]:
                return load
        return None

    def _num_tokens(self, keys: Sequence[BlockKey]) -> int:
        return len(keys) // self._kv.num_groups * self._kv.block_size
