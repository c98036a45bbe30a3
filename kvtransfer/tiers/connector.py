"""The tiers below one engine's device pool, nearest first, each with its mover: KVConnector.

Decides which tier a chain is read from and whether that is faster than to compute it; keeps both halves of every pair
together. Knows no pool and no sequence: whoever calls brings keys, and memory for the bytes.

Engine thread only; ends of jobs come back through `post` and are given to `load_done`, `store_done`, `ask_done`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from core.events import Tier as TierName
from kvtransfer.tiers.base import BlockKey, Placement, Tier, TierChange
from kvtransfer.tiers.load_rate import LoadRate
from kvtransfer.tiers.mover import AskDone, LoadDone, LoadTargets, PostDone, StoreDone, TierMover

READERS = 2
"""Threads that a long load from a tier of our own is read by."""

INITIAL_BYTES_PER_S = {TierName.HOST: 4e9, TierName.DISK: 1e9, TierName.REMOTE: 0.25e9}
"""What a tier is taken to give back before it has given anything."""


class Segment(NamedTuple):
    """Consecutive blocks of a chain that one tier gives back. first: the place of the first key in the chain."""

    tier: TierName
    first: int
    keys: tuple[BlockKey, ...]


@dataclass(slots=True)
class TierSeconds:
    """Time that a tier's mover has spent."""

    load_seconds_total: float = 0.0
    store_seconds_total: float = 0.0


class _Scratch:
    """Takes a block that nobody needs; a LoadTargets."""

    def __init__(self, block_bytes: int) -> None:
        self._buffer = memoryview(bytearray(block_bytes))

    def enter(self, index: int) -> memoryview | None:
        return self._buffer

    def leave(self, index: int) -> None:
        pass


class _Level:
    """One tier and what is under way in it."""

    def __init__(self, name: TierName, tier: Tier, mover: TierMover, rate: LoadRate) -> None:
        self.name = name
        self.tier = tier
        self.mover = mover
        self.rate = rate
        self.num_loading_blocks = 0
        self.seconds = TierSeconds()


class KVConnector:
    """See the module.

    tiers: by name, nearest first; owned from now on. None at all is allowed: then nothing is ever found.
    post: puts the end of a job into the engine's inbox; any thread.
    max_waiting_bytes: what of stores may wait in one tier, whose source memory must not change meanwhile.
    load_rate: limit of what any one tier gives back, in bytes a second, 0 for none.
    initial_rates: bytes a second that a tier is taken to give back before it has given anything.
    """

    def __init__(
        self,
        tiers: Mapping[TierName, Tier],
        post: PostDone,
        max_waiting_bytes: int,
        load_rate: float = 0.0,
        initial_rates: Mapping[TierName, float] | None = None,
    ) -> None:
        initial = {**INITIAL_BYTES_PER_S, **(initial_rates or {})}
        self._levels = {
            name: _Level(
                name,
                tier,
                TierMover(
                    name,
                    tier,
                    post,
                    max_waiting_bytes,
                    load_rate,
                    num_readers=1 if tier.is_shared else READERS,
                ),
                LoadRate(min(initial[name], load_rate or initial[name])),
            )
            for name, tier in tiers.items()
        }
        self._jobs = count(1)

    # ---- what there is

    @property
    def names(self) -> list[TierName]:
        """The tiers there are, nearest first."""
        return list(self._levels)

    @property
    def own_names(self) -> list[TierName]:
        """Those that no other worker shares."""
        return [name for name, level in self._levels.items() if not level.tier.is_shared]

    @property
    def has_shared(self) -> bool:
        """Whether a tier has to be asked over a network."""
        return any(level.tier.is_shared for level in self._levels.values())

    @property
    def num_loading_blocks(self) -> int:
        """Blocks that are being read."""
        return sum(level.num_loading_blocks for level in self._levels.values())

    def tier(self, name: TierName) -> Tier:
        """A tier, to look at."""
        return self._levels[name].tier

    def seconds(self, name: TierName) -> TierSeconds:
        """Time that a tier's mover has spent."""
        return self._levels[name].seconds

    def bytes_per_s(self, name: TierName) -> float:
        """What a tier is taken to give back now."""
        return self._levels[name].rate.bytes_per_s

    def num_waiting_blocks(self, name: TierName) -> int:
        """Blocks to be stored in a tier that are not written yet."""
        return self._levels[name].mover.num_waiting_blocks

    def has(self, name: TierName, key: BlockKey) -> bool:
        """Whether a tier holds a block."""
        return bool(self._levels[name].tier.lookup([key]))

    def room(self, name: TierName) -> int:
        """How many blocks may be stored in a tier now, beside those that wait to be written."""
        return self._levels[name].mover.room()

    def new_job(self) -> int:
        """A number that no other job has."""
        return next(self._jobs)

    # ---- finding

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """A request uses a chain; once a request, when it begins, wherever its blocks are."""
        for level in self._levels.values():
            level.tier.touch(chain)

    def find(self, chain: Sequence[BlockKey]) -> list[Segment]:
        """The longest head of a chain that the tiers have together, each block from the nearest that has it."""
        segments: list[Segment] = []
        first = 0
        while first < len(chain):
            rest = chain[first:]
            for level in self._levels.values():
                if num_held := level.tier.lookup(rest):
                    end = first + num_held
                    segments.append(Segment(level.name, first, tuple(chain[first:end])))
                    first = end
                    break
            else:
                break
        return segments

    def predict_s(self, segments: Sequence[Segment]) -> float:
        """How long segments would take to read, behind what is being read already; tiers read side by side."""
        totals = {
            name: level.rate.seconds_for(level.num_loading_blocks * level.tier.block_bytes)
            for name, level in self._levels.items()
        }
        for segment in segments:
            level = self._levels[segment.tier]
            num_bytes = len(segment.keys) * level.tier.block_bytes
            totals[segment.tier] += level.rate.seconds_for(num_bytes)
        return max((totals[segment.tier] for segment in segments), default=0.0)

    def worthwhile(
        self, segments: Sequence[Segment], compute_s_a_block: float
    ) -> Sequence[Segment]:
        """The head of the segments that saves most time against computing it; empty where every load is slower."""
        best, most_saved, num_blocks = 0, 0.0, 0
        for taken, segment in enumerate(segments, 1):
            num_blocks += len(segment.keys)
            saved = num_blocks * compute_s_a_block - self.predict_s(segments[:taken])
            if saved > most_saved:
                best, most_saved = taken, saved
        return segments[:best]

    def look_again(self, segments: Sequence[Segment]) -> None:
        """Segments that were not worth it: where nothing has been read for long, see what the tier gives by now."""
        for segment in segments:
            level = self._levels[segment.tier]
            if level.rate.is_stale and not level.num_loading_blocks:
                one = segment._replace(keys=segment.keys[:1])
                self.load(self.new_job(), one, _Scratch(level.tier.block_bytes))

    # ---- jobs

    def ask(
        self, job: int, chain: Sequence[BlockKey], is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Ask the shared tier for a chain; answered by AskDone. is_wanted: see TierMover.ask."""
        for level in self._levels.values():
            if level.tier.is_shared:
                level.mover.ask(job, chain, is_wanted)
                return

    def load(self, job: int, segment: Segment, targets: LoadTargets) -> None:
        """Read a segment that `find` has just given; answered by LoadDone."""
        level = self._levels[segment.tier]
        placements = level.tier.prepare_load(segment.keys)
        assert placements is not None, f"{segment.tier}: a block that was found is not held"
        level.num_loading_blocks += len(placements)
        level.mover.load(job, placements, targets)

    def plan_store(self, name: TierName, chain: Sequence[BlockKey]) -> tuple[Placement, ...]:
        """What a tier lacks of a chain and admits: `room` at most are asked for. Follow with `store` at once."""
        level = self._levels[name]
        plan = level.tier.prepare_store(chain)
        return plan.placements if plan is not None else ()

    def store(
        self,
        name: TierName,
        job: int,
        placements: Sequence[Placement],
        blocks: Sequence[memoryview],
    ) -> None:
        """Write the blocks of a `plan_store`, whose bytes are not to change meanwhile; answered by StoreDone."""
        self._levels[name].mover.store(job, placements, blocks)

    def load_done(self, event: LoadDone) -> None:
        """The second half of a load."""
        level = self._levels[event.tier]
        level.tier.complete_load(event.placements, event.damaged, event.unread)
        level.num_loading_blocks -= len(event.placements)
        level.seconds.load_seconds_total += event.seconds
        num_good = len(event.placements) - len(event.unread) - len(event.damaged)
        if num_good:  # what is missing or damaged may be told at once, or late
            level.rate.note(num_good * level.tier.block_bytes, event.seconds)

    def store_done(self, event: StoreDone) -> None:
        """The second half of a store."""
        level = self._levels[event.tier]
        level.tier.complete_store(event.placements, event.ok)
        level.seconds.store_seconds_total += event.seconds

    def ask_done(self, event: AskDone) -> None:
        """The shared tier's answer."""
        self._levels[event.tier].tier.note_found(event.chain[: event.num_found])

    # ---- all of it

    def take_changes(self) -> dict[TierName, list[TierChange]]:
        """What became found or vanished in each tier of our own since the last call; tiers without change left out."""
        changes: dict[TierName, list[TierChange]] = {}
        for name, level in self._levels.items():
            taken = level.tier.take_changes()
            if taken and not level.tier.is_shared:
                changes[name] = taken
        return changes

    def held(self) -> dict[TierName, list[BlockKey]]:
        """Every block that is held in each tier of our own."""
        levels = self._levels.items()
        return {name: level.tier.keys() for name, level in levels if not level.tier.is_shared}

    def clear(self) -> None:
        """Give up every block in the tiers of our own, and what is known of a shared one, which keeps them."""
        for level in self._levels.values():
            level.tier.clear()

    def close(self) -> None:
        """End the movers, then the tiers. What was under way is answered, but nobody needs to hear. Idempotent."""
        for level in self._levels.values():
            level.mover.stop()
            level.tier.close()


def head_of(segments: Sequence[Segment], num_blocks: int, num_groups: int) -> list[Segment]:
    """The head of the segments that has no more than so many blocks, `num_groups` for each position."""
    left = num_blocks // num_groups * num_groups
    whole = sum(len(segment.keys) for segment in segments) // num_groups * num_groups
    left = min(left, whole)
    kept: list[Segment] = []
    for segment in segments:
        if left <= 0:
            break
        kept.append(segment._replace(keys=segment.keys[:left]))
        left -= len(segment.keys)
    return kept
