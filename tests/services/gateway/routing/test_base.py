"""What a worker's blocks are worth to a query, by where they lie and how fast they come back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.worker_info import WorkerRates
from services.gateway.config import RoutingConfig
from services.gateway.routing.base import Candidate, RouteQuery
from services.gateway.routing.scorers import score_prefill_work, score_prefix, total_scores
from tests.support.fake_worker import make_info

PROMPT_TOKENS = 160
QUERY = RouteQuery("fake", "digest", num_prompt_tokens=PROMPT_TOKENS, max_tokens=32)


def holder(prefill_rate: float, load_rate: float, **state: int) -> Candidate:
    rates = WorkerRates(prefill_tokens_per_s=prefill_rate, load_tokens_per_s=load_rate)
    return Candidate(make_info(rates=rates), **state)


@pytest.mark.parametrize(
    ("load_rate", "load_cost", "cached", "spared", "work"),
    [
        (4000, 0.25, 96, 32 + 48, 300 + 64 + 16),
        (2000, 0.5, 96, 32 + 32, 300 + 64 + 32),
        (1000, 1, 32, 32, 300 + 128),  # as fast as computing: computed
        (500, 1, 32, 32, 300 + 128),  # slower than computing: computed
        (0, 1, 32, 32, 300 + 128),  # no tier, or not measured: no credit
    ],
)
def test_tokens_in_a_tier_count_at_their_load_rate(load_rate, load_cost, cached, spared, work):
    worker = holder(1000, load_rate, queued_tokens=300, device_tokens=32, tier_tokens=64)
    assert worker.load_cost == load_cost
    assert worker.cached_tokens == cached
    assert worker.spared_tokens == spared
    assert worker.work_tokens(QUERY) == work


def test_without_a_prefill_rate_nothing_says_that_loading_is_faster():
    worker = holder(0, 4000, device_tokens=32, tier_tokens=64)
    assert (worker.load_cost, worker.cached_tokens, worker.spared_tokens) == (1, 32, 32)


def test_what_lies_on_the_device_is_spared_whatever_the_rates():
    for prefill_rate, load_rate in [(0, 0), (1000, 0), (1000, 10), (1000, 10_000)]:
        worker = holder(prefill_rate, load_rate, device_tokens=96)
        assert (worker.cached_tokens, worker.spared_tokens) == (96, 96)


def test_scores_follow_the_same_numbers():
    device = holder(1000, 4000, device_tokens=96)
    tier = holder(1000, 4000, device_tokens=32, tier_tokens=64)
    slow = holder(1000, 500, device_tokens=32, tier_tokens=64)
    config = RoutingConfig()
    assert score_prefix([device, tier, slow], QUERY, config) == [96 / 160, 80 / 160, 32 / 160]
    work = score_prefill_work([device, tier, slow], QUERY, config)
    assert work == [1 - 64 / 128, 1 - 80 / 128, 0]


counts = st.integers(0, PROMPT_TOKENS - 1)
rates = st.sampled_from([0.0, 1e-3, 1.0, 999.0, 1000.0, 1001.0, 1e5, 1e12])


@st.composite
def improvements(draw: st.DrawFn) -> tuple[Candidate, Candidate]:
    """A worker, and the same one with no token farther away and some nearer."""
    device, anywhere = sorted([draw(counts), draw(counts)])
    more_device = draw(st.integers(device, PROMPT_TOKENS - 1))
    more_anywhere = draw(st.integers(max(more_device, anywhere), PROMPT_TOKENS - 1))
    worker = holder(
        draw(rates),
        draw(rates),
        queued_tokens=draw(st.integers(0, 500)),
        device_tokens=device,
        tier_tokens=anywhere - device,
    )
    tier_tokens = more_anywhere - more_device
    return worker, replace(worker, device_tokens=more_device, tier_tokens=tier_tokens)


others = st.lists(improvements().map(lambda pair: pair[0]), max_size=3)


@given(improvements(), others)
def test_more_tokens_or_nearer_ones_never_make_a_prediction_worse(pair, rivals):
    worker, better = pair
    tolerance = 1e-9 * PROMPT_TOKENS
    assert better.work_tokens(QUERY) <= worker.work_tokens(QUERY) + tolerance
    assert better.spared_tokens >= worker.spared_tokens - tolerance
    assert better.cached_tokens >= worker.cached_tokens
    config = RoutingConfig()
    for weights in (config.decode_weights, config.prefill_weights, {"prefix": 1.0}):
        before = total_scores([worker, *rivals], QUERY, weights, config)
        after = total_scores([better, *rivals], QUERY, weights, config)
        assert after[0] >= before[0] - 1e-9
        overtaken = [place for place, score in enumerate(before) if before[0] >= score]
        assert all(after[0] >= after[place] - 1e-9 for place in overtaken)


@given(improvements())
def test_loading_is_never_predicted_worse_than_computing_and_never_better_than_the_device(pair):
    for worker in pair:
        computed = replace(worker, tier_tokens=0)
        anywhere = worker.device_tokens + worker.tier_tokens
        on_device = replace(worker, device_tokens=anywhere, tier_tokens=0)
        tolerance = 1e-9 * PROMPT_TOKENS
        work = worker.work_tokens(QUERY)
        assert on_device.work_tokens(QUERY) - tolerance <= work
        assert work <= computed.work_tokens(QUERY) + tolerance
