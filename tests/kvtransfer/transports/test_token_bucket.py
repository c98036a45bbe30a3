"""The rate of a link, by a clock of its own."""

from __future__ import annotations

import itertools

import pytest

from kvtransfer.transports.links.token_bucket import MAX_LIMITED_SLICE_BYTES, TokenBucket


def send_for(
    bucket: TokenBucket, seconds: float, timer_s: float = 0.001
) -> list[tuple[float, int]]:
    """(time, bytes) of each slice when a thread sleeps as told, but wakes by the millisecond."""
    now_s, sent = 1000.0, []
    end_s = now_s + seconds
    while now_s < end_s:
        wait_s = bucket.wait_s(now_s)
        if wait_s > 0:
            now_s += (int(wait_s / timer_s) + 1) * timer_s
            continue
        bucket.spend(bucket.slice_bytes)
        sent.append((now_s, bucket.slice_bytes))
        now_s += 10e-6
    return sent


@pytest.mark.parametrize("rate", [2_000, 100_000, 5_000_000, 100_000_000, 2_000_000_000])
def test_the_rate_is_held_and_used(rate: int) -> None:
    bucket = TokenBucket(rate)
    seconds = 5.0
    total = sum(size for _, size in send_for(bucket, seconds))
    assert total <= rate * seconds + 2 * max(bucket.slice_bytes, rate * 0.004)
    assert total >= 0.8 * rate * seconds


@pytest.mark.parametrize("rate", [100_000, 5_000_000, 50_000_000])
def test_progress_is_smooth(rate: int) -> None:
    sent = send_for(TokenBucket(rate), 2.0)
    gaps_s = [b - a for (a, _), (b, _) in itertools.pairwise(sent)]
    assert max(gaps_s) <= 0.007
    assert max(size for _, size in sent) <= MAX_LIMITED_SLICE_BYTES


def test_idle_time_is_not_saved_up() -> None:
    bucket = TokenBucket(5_000_000)
    bucket.wait_s(0.0)
    bucket.wait_s(3600.0)
    burst = 0
    while bucket.wait_s(3600.0) == 0.0:
        bucket.spend(bucket.slice_bytes)
        burst += bucket.slice_bytes
    assert burst <= 2 * bucket.slice_bytes


def test_no_rate_is_no_limit() -> None:
    bucket = TokenBucket(0)
    assert not bucket.is_limited
    bucket.spend(1 << 40)
    assert bucket.wait_s(0.0) == 0.0
