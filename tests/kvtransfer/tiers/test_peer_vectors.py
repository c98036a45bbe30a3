"""The host tier beside a peer's: its scenarios, step by step, as tests/data/peer-vectors/eviction.jsonl tells them.

The peer's batches become evictable in the order given; Baton's are chains, whose head is to leave last. So a batch that
the peer completes is completed here in reverse, which is the same order of leaving. The peer touches in reverse too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.block_hash import BlockHash
from kvtransfer.tiers.base import BlockKey, Placement
from kvtransfer.tiers.frequency import FrequencyFilter
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.policies import ArcPolicy

VECTORS = Path(__file__).parents[2] / "data" / "peer-vectors" / "eviction.jsonl"
SCENARIOS = [json.loads(line) for line in VECTORS.read_text().splitlines()]

NO_GHOST = (
    "T1 fills the whole store and B1 is empty: the paper's case IV.A evicts the oldest of T1 without making it a "
    "ghost. The peer, whose ghosts may be c beside c resident keys in T1, keeps it in B1."
)

DIFFERENT: dict[str, tuple[dict[int, dict[str, Any]], str]] = {
    "arc: a use of a ghost of T1 raises the target": (
        {5: {"b1": 0}, 7: {"target": 0.0}},
        f"{NO_GHOST} Nor would a touch of a ghost move the target: it moves once a request, when the key comes in.",
    ),
    "arc: a failed store leaves nothing": ({5: {"t1": 3, "t2": 0, "b1": 0}}, NO_GHOST),
}
"""Scenario -> what Baton's ARC is to show at which step instead, and why."""


def key(number: int) -> BlockKey:
    return BlockKey(BlockHash(number.to_bytes(16, "little")))


def keys(numbers: list[int]) -> list[BlockKey]:
    return [key(number) for number in numbers]


class Player:
    """A tier and the placements that are under way."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        capacity_bytes = 4096 + scenario["capacity"] * 4096
        self.tier = HostTier(capacity_bytes, 4096, scenario["policy"])
        assert self.tier.num_slots == scenario["capacity"]
        self.storing: dict[BlockKey, Placement] = {}
        self.loading: list[Placement] = []

    def play(self, step: dict[str, Any]) -> None:
        getattr(self, step["do"])(**{name: value for name, value in step.items() if name != "do"})

    def prepare_store(self, keys: list[int], refused: bool = False, **expected: Any) -> None:
        plan = self.tier.prepare_store([key(number) for number in keys])
        assert (plan is None) == refused
        if plan is None:
            return
        self.storing |= {placement.key: placement for placement in plan.placements}
        got = {
            "stored": [placement.key for placement in plan.placements],
            "slots": [placement.slot for placement in plan.placements],
            "evicted": list(plan.evicted),
            "num_evicted": len(plan.evicted),
        }
        least = expected.pop("min_evicted", 0)
        assert len(plan.evicted) >= least
        for name, value in expected.items():
            is_keys = name in ("stored", "evicted")
            assert got[name] == ([key(number) for number in value] if is_keys else value), name

    def complete_store(self, keys: list[int], ok: bool) -> None:
        placements = [self.storing.pop(key(n)) for n in keys if key(n) in self.storing]
        self.tier.complete_store(placements[::-1], ok)

    def prepare_load(self, keys: list[int], slots: list[int] | None = None) -> None:
        placements = self.tier.prepare_load([key(number) for number in keys])
        assert placements is not None
        self.loading += placements
        if slots is not None:
            assert [placement.slot for placement in placements] == slots

    def complete_load(self, keys: list[int]) -> None:
        placements = []
        for number in keys:
            placements.append(next(p for p in self.loading if p.key == key(number)))
            self.loading.remove(placements[-1])
        self.tier.complete_load(placements[::-1])

    def touch(self, keys: list[int]) -> None:
        self.tier.touch([key(number) for number in keys])

    def clear(self) -> None:
        self.tier.clear()

    def set_target(self, target: float) -> None:
        self.arc._target = target

    def lookup(self, held: list[int] = [], absent: list[int] = []) -> None:  # noqa: B006
        assert [self.tier.lookup([key(number)]) for number in held] == [1] * len(held)
        assert [self.tier.lookup([key(number)]) for number in absent] == [0] * len(absent)

    def see(self, **expected: Any) -> None:
        figures = self.tier.figures() | {
            "used": len(self.tier),
            "evictable": len(self.tier) - self.tier.num_pinned,
        }
        for name, value in expected.items():
            bound, _, figure = name.partition("_")
            if name == "changes":
                changes = self.tier.take_changes()
                assert [(c.kind.value, set(c.keys)) for c in changes] == [
                    (kind, set(keys(numbers))) for kind, numbers in value
                ]
            elif bound == "in":
                held = getattr(self.arc, f"_{figure}")
                assert [number for number in value if key(number) not in held] == []
            elif bound == "min":
                assert figures[figure] >= value, name
            elif bound == "max":
                assert figures[figure] <= value, name
            else:
                assert figures[name] == value, name

    @property
    def arc(self) -> ArcPolicy[BlockKey]:
        policy = self.tier._policy
        assert isinstance(policy, ArcPolicy)
        return policy


@pytest.mark.peer_vectors
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario["name"])
def test_a_peers_scenario(scenario: dict[str, Any]) -> None:
    player = Player(scenario)
    instead, _ = DIFFERENT.get(scenario["name"], ({}, ""))
    for number, step in enumerate(scenario["steps"]):
        if number in instead:
            with pytest.raises(AssertionError):
                player.play(step)
            player.see(**instead[number])
        else:
            player.play(step)
    player.tier.close()


def test_every_difference_is_one_of_a_scenario_that_there_is() -> None:
    steps = {scenario["name"]: scenario["steps"] for scenario in SCENARIOS}
    for name, (instead, why) in DIFFERENT.items():
        assert why
        assert [steps[name][number]["do"] for number in instead] == ["see"] * len(instead)


@pytest.mark.peer_vectors
def test_a_peers_filter_of_blocks_used_once() -> None:
    """Threshold 2, three keys tracked: the second use passes, and a key that was forgotten begins again."""
    uses: FrequencyFilter[int] = FrequencyFilter(2, max_keys=3, decay_uses=0)
    uses.use(1)
    uses.use(2)
    assert [uses.passes(1), uses.passes(2)] == [False, False]
    uses.use(1)
    assert [uses.passes(1), uses.passes(2)] == [True, False]
    uses.use(3)
    uses.use(4)
    assert uses.frequency(2) == 0
    uses.use(2)
    assert (uses.frequency(2), uses.passes(2)) == (1, False)
