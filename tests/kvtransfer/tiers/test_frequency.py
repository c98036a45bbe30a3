"""Frequencies double with each use, fall with time, and are bounded in number."""

from __future__ import annotations

import pytest

from kvtransfer.tiers.frequency import FrequencyFilter


def make(
    min_frequency: int = 2, max_keys: int = 100, decay_uses: int = 0
) -> FrequencyFilter[object]:
    return FrequencyFilter(min_frequency, max_keys, decay_uses)


def test_a_frequency_is_one_and_doubles() -> None:
    uses = make()
    seen = []
    for _ in range(5):
        uses.use("a")
        seen.append(uses.frequency("a"))
    assert seen == [1, 2, 4, 8, 16]
    assert uses.frequency("b") == 0


@pytest.mark.parametrize(("least", "passing_use"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (5, 4)])
def test_a_key_passes_from_its_least_frequency_on(least: int, passing_use: int) -> None:
    uses = make(min_frequency=least)
    passed = [uses.passes("a")]
    for _ in range(5):
        uses.use("a")
        passed.append(uses.passes("a"))
    assert passed == [number >= passing_use for number in range(6)]


def test_frequencies_fall_by_one_in_so_many_uses() -> None:
    uses = make(decay_uses=10)
    for _ in range(3):
        uses.use("a")  # 4, at use 3
    seen = []
    for number in range(50):
        uses.use(number)
        seen.append(uses.frequency("a"))
    assert seen == [4] * 9 + [3] * 10 + [2] * 10 + [1] * 10 + [0] * 11
    uses.use("a")
    assert uses.frequency("a") == 1


def test_a_frequency_has_an_end() -> None:
    uses = make()
    for _ in range(1_000):
        uses.use("a")
    assert uses.frequency("a") == 1 << 20


def test_the_keys_used_last_are_known_and_no_more() -> None:
    uses = make(max_keys=3)
    for key in (1, 2, 1, 3, 4):
        uses.use(key)
    assert len(uses) == 3
    assert [uses.frequency(key) for key in (1, 2, 3, 4)] == [2, 0, 1, 1]
    for key in range(10_000):
        uses.use(key)
    assert len(uses) == 3
