"""The choice: filters, scores, ties, and when splitting pays. Pure functions over candidates."""

from dataclasses import replace
from typing import Any

import pytest

from core.errors import ConfigError, ContextTooLong, OverloadedError
from core.kv_layout import SlotFormat
from core.worker_info import Role, WorkerRates
from services.gateway.config import RoutingConfig
from services.gateway.routing.base import Candidate, Route, RouteQuery
from services.gateway.routing.picker import Picker
from tests.support.fake_worker import make_info

QUERY = RouteQuery("fake", make_info().model_bundle_digest, num_prompt_tokens=160, max_tokens=32)


def worker(
    name: str, role: Role = Role.MIXED, *, info: dict[str, Any] | None = None, **state: Any
) -> Candidate:
    return Candidate(make_info(name, role=role, **(info or {})), **state)


def pick(*candidates: Candidate, query: RouteQuery = QUERY, **config: Any) -> Route:
    return Picker(RoutingConfig(**config)).pick(candidates, query)


def names(route: Route) -> tuple[str, list[str]]:
    return route.owner.info.id, [candidate.info.id for candidate in route.prefill]


def test_a_prompt_is_split_between_decode_and_prefill():
    route = pick(worker("p", Role.PREFILL), worker("d", Role.DECODE))
    assert names(route) == ("d", ["p"])
    assert route.is_split


def test_a_mixed_worker_runs_alone_rather_than_ask_another_mixed_one():
    assert names(pick(worker("m1"), worker("m2"))) == ("m1", [])


def test_a_mixed_worker_asks_a_prefill_worker_and_a_decode_worker_a_mixed_one():
    assert names(pick(worker("m"), worker("p", Role.PREFILL))) == ("m", ["p"])
    query_busy = worker("m", num_requests=50)
    assert names(pick(worker("d", Role.DECODE), query_busy)) == ("d", ["m"])


@pytest.mark.parametrize(("lacking", "splits"), [(17, True), (16, True), (15, False), (1, False)])
def test_splitting_pays_from_a_threshold_of_missing_tokens(lacking, splits):
    decode = worker("d", Role.DECODE, device_tokens=160 - lacking)
    route = pick(decode, worker("p", Role.PREFILL), split_min_tokens=16)
    assert route.is_split is splits


FAST, SLOW, NONE = 16_000.0, 1_250.0, 0.0
"""Load rates beside a prefill rate of 1,000 tokens a second: a loaded token costs 1/16, 4/5, all of a computed one."""


def tiered(name: str, role: Role, load_rate: float, **state: int) -> Candidate:
    rates = WorkerRates(prefill_tokens_per_s=1000.0, load_tokens_per_s=load_rate)
    return worker(name, role, info={"rates": rates}, **state)


@pytest.mark.parametrize(
    ("load_rate", "prefill_state", "splits"),
    [
        (FAST, {"device_tokens": 144}, False),  # 144 / 16 + 8 left: less than split_min_tokens
        (SLOW, {"device_tokens": 144}, True),  # 123.2 to do here, 16 there
        (SLOW, {}, False),  # 123.2 to do here, 160 there
        (SLOW, {"device_tokens": 144, "queued_tokens": 108}, False),  # 123.2 here, 124 there
        (SLOW, {"device_tokens": 144, "queued_tokens": 107}, True),  # 123.2 here, 123 there
        (NONE, {}, True),  # nothing here but 152 tokens to compute
    ],
)
def test_a_prompt_in_the_owners_tiers_is_split_where_another_is_done_sooner(
    load_rate, prefill_state, splits
):
    decode = tiered("d", Role.DECODE, load_rate, device_tokens=8, tier_tokens=144)
    prefill = tiered("p", Role.PREFILL, load_rate, **prefill_state)
    assert pick(decode, prefill, split_min_tokens=18).is_split is splits


def test_much_to_load_in_a_fast_tier_is_not_given_away():
    query = replace(QUERY, num_prompt_tokens=1610, max_tokens=32)
    decode = tiered("d", Role.DECODE, FAST, tier_tokens=1600)  # 100 + 10 tokens' worth
    assert names(pick(decode, worker("p", Role.PREFILL), query=query)) == ("d", [])
    assert names(pick(decode, worker("p", Role.PREFILL, device_tokens=1536), query=query))[1]


def test_tiers_count_for_prefill_decode_and_mixed_workers_alike():
    state = {"device_tokens": 16, "tier_tokens": 128}
    near = {"device_tokens": 96}
    for role in (Role.DECODE, Role.MIXED):
        assert (
            pick(tiered("a", role, SLOW, **near), tiered("b", role, SLOW, **state)).owner.info.id
            == "a"
        ), role
        assert (
            pick(tiered("a", role, FAST, **near), tiered("b", role, FAST, **state)).owner.info.id
            == "b"
        ), role
    for load_rate, first in ((SLOW, "p1"), (FAST, "p2"), (NONE, "p1")):
        route = pick(
            worker("d", Role.DECODE),
            tiered("p1", Role.PREFILL, load_rate, **near),
            tiered("p2", Role.PREFILL, load_rate, **state),
        )
        assert route.prefill[0].info.id == first


def test_one_output_token_is_a_local_run_on_a_prefill_worker():
    query = replace(QUERY, max_tokens=1)
    cluster = worker("d", Role.DECODE), worker("p", Role.PREFILL)
    assert names(pick(*cluster, query=query)) == ("p", [])
    assert names(pick(worker("d", Role.DECODE), query=query)) == ("d", [])
    assert names(pick(worker("m"), query=query)) == ("m", [])


def test_without_prefill_workers_the_decode_worker_runs_the_prompt():
    assert names(pick(worker("d", Role.DECODE))) == ("d", [])


def test_prefill_workers_alone_cannot_serve_and_it_is_said():
    with pytest.raises(OverloadedError, match=r"only prefill workers serve .* \(p1, p2\)"):
        pick(worker("p1", Role.PREFILL), worker("p2", Role.PREFILL))
    with pytest.raises(OverloadedError, match="no live worker"):
        pick()


def test_other_models_and_tokenizers_are_out():
    wrong = (
        worker("a", info={"models": ("other",)}),
        worker("b", info={"model_bundle_digest": "other"}),
    )
    assert names(pick(*wrong, worker("z"))) == ("z", [])


def test_a_worker_that_is_too_short_is_out_and_the_longest_is_named():
    short = worker("a", info={"max_model_len": 100})
    assert names(pick(short, worker("z"))) == ("z", [])
    with pytest.raises(ContextTooLong, match=r"length is 100 tokens.* 192 tokens"):
        pick(short)


def test_prefill_workers_whose_kv_cannot_be_used_are_not_asked():
    decode = worker("d", Role.DECODE)
    other_model = replace(make_info().identity, model_digest="other")
    group = make_info().layout.groups[0]
    other_dtype = replace(group, slot=SlotFormat.of("fp8_e4m3", group.slot.head_dim))
    other_layout = replace(make_info().layout, groups=(other_dtype,))
    other_blocks = replace(make_info().layout, block_size=32)
    route = pick(
        decode,
        worker("p1", Role.PREFILL, info={"identity": other_model}),
        worker("p2", Role.PREFILL, info={"layout": other_layout}),
        worker("p3", Role.PREFILL),
        worker("p4", Role.PREFILL, info={"layout": other_blocks}),
    )
    assert names(route) == ("d", ["p3", "p4"])


def test_an_idle_worker_goes_before_a_busy_one():
    assert names(pick(worker("a", num_requests=3), worker("b")))[0] == "b"
    assert names(pick(worker("a", queued_tokens=3000), worker("b")))[0] == "b"


def test_a_cached_prefix_outweighs_a_little_load_and_not_much():
    holder = {"device_tokens": 144}
    assert names(pick(worker("a"), worker("b", num_requests=2, **holder)))[0] == "b"
    assert names(pick(worker("a"), worker("b", num_requests=100, **holder)))[0] == "a"


def test_prefill_candidates_are_ordered_by_work_before_the_prompts_end():
    route = pick(
        worker("d", Role.DECODE),
        worker("p1", Role.PREFILL, queued_tokens=100),
        worker("p2", Role.PREFILL, queued_tokens=50, device_tokens=16),
        worker("p3", Role.PREFILL, queued_tokens=200, device_tokens=144),
        worker("p4", Role.PREFILL, queued_tokens=5000),
        max_prefill_candidates=3,
    )
    assert names(route) == ("d", ["p2", "p3", "p1"])


def test_ties_go_to_the_worker_chosen_longest_ago_then_to_the_lower_id():
    assert names(pick(worker("b"), worker("a")))[0] == "a"
    assert names(pick(worker("b", last_routed=1), worker("a", last_routed=2)))[0] == "b"


def test_weights_name_known_scorers():
    with pytest.raises(ConfigError, match="--decode-scorer-weights: 'luck' is unknown"):
        Picker(RoutingConfig(decode_weights={"luck": 1.0}))
    with pytest.raises(ConfigError, match="-1"):
        RoutingConfig(prefill_weights={"load": -1.0})


def test_a_weight_of_zero_switches_a_signal_off():
    holder = worker("b", num_requests=1, device_tokens=144)
    route = pick(worker("a"), holder, decode_weights={"prefix": 0.0, "load": 1.0})
    assert route.owner.info.id == "a"
