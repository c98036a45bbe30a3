"""What a tier is taken to give back follows what it gave, new loads first."""

from __future__ import annotations

import pytest

from kvtransfer.tiers.load_rate import STALE_S, LoadRate


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_mean_is_of_the_time_a_byte_takes() -> None:
    rate = LoadRate(1000.0)
    rate.note(500, 1.5)  # 3 ms a byte, and 1 ms before
    assert rate.bytes_per_s == pytest.approx(500.0)
    assert rate.seconds_for(250) == pytest.approx(0.5)


def test_two_slow_loads_are_enough_to_be_found_slow() -> None:
    rate = LoadRate(1e9)
    for _ in range(2):
        rate.note(1000, 1.0)
    assert rate.bytes_per_s == pytest.approx(1000 / 0.75, rel=1e-3)


def test_a_rate_is_stale_until_something_is_read() -> None:
    clock = Clock()
    rate = LoadRate(1000.0, clock)
    clock.now += STALE_S + 1
    assert rate.is_stale
    rate.note(500, 0.5)
    assert not rate.is_stale
