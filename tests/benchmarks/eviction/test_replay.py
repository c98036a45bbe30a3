"""The replay counts right, the bound is one, and the chart is one."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.eviction import chart
from benchmarks.eviction.__main__ import draw, measure
from benchmarks.eviction.replay import belady_hit_ratio, describe, replay
from kvtransfer.tiers.policies import POLICIES

ROOT = Path(__file__).parents[3]


def best_hits(accesses: tuple[int, ...], capacity: int) -> int:
    """The most hits that any sequence of choices gives, by trying all."""

    @cache
    def from_here(position: int, held: frozenset[int]) -> int:
        if position == len(accesses):
            return 0
        block = accesses[position]
        if block in held:
            return 1 + from_here(position + 1, held)
        choices = [held]
        if len(held) < capacity:
            choices.append(held | {block})
        choices += [held - {one} | {block} for one in held]
        return max(from_here(position + 1, choice) for choice in choices)

    return from_here(0, frozenset())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 4))
def test_no_sequence_of_choices_has_more_hits_than_belady(
    accesses: list[int], capacity: int
) -> None:
    best = best_hits(tuple(accesses), capacity)
    assert belady_hit_ratio(accesses, capacity) == best / len(accesses)


@given(
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True), max_size=30).filter(
        bool
    ),
    st.integers(5, 12),
    st.sampled_from(POLICIES),
)
def test_no_policy_has_more_hits_than_belady(
    trace: list[list[int]], capacity: int, policy: str
) -> None:
    figures = replay(trace, policy, capacity)
    bound = belady_hit_ratio([block for chain in trace for block in chain], capacity)
    assert figures["prefix_hit_ratio"] <= figures["hit_ratio"] <= bound + 1e-12
    assert figures["refused_requests"] == 0


def test_hits_are_counted_by_block_and_by_prefix() -> None:
    trace = [[1, 2, 3], [1, 2, 4], [9, 2]]
    for policy in POLICIES:
        figures = replay(trace, policy, 10)
        assert figures["hit_ratio"] == 3 / 8
        assert figures["prefix_hit_ratio"] == 2 / 8
    assert describe(trace) == {
        "requests": 3, "accesses": 8, "blocks": 5, "hit_ratio_without_limit": 3 / 8,
    }  # fmt: skip


def test_lru_evicts_by_last_use_and_tail_first() -> None:
    trace = [[1, 2, 3], [7, 8], [1, 2, 3]]
    # 3 and 2 leave for 7 and 8, so that of the last request only its head is held.
    assert replay(trace, "lru", 3)["hit_ratio"] == 1 / 8
    assert belady_hit_ratio([1, 2, 3, 7, 8, 1, 2, 3], 3) == 3 / 8


def test_a_request_larger_than_the_store_is_counted_as_refused() -> None:
    assert replay([[1, 2, 3]], "lru", 2)["refused_requests"] == 1


def test_the_chart_is_xml_with_a_line_for_each_policy() -> None:
    trace = [[number % 1500, number % 700 + 5000] for number in range(4000)]
    figures = {"one": measure(trace), "two & <more>": measure(trace)}
    assert [row["capacity"] for row in figures["one"]["rows"]] == [1000, 2000, 5000]
    root = ElementTree.fromstring(draw(figures))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{space}polyline")) == 2 * (1 + len(POLICIES))
    texts = [text.text for text in root.iter(f"{space}text")]
    assert "two & <more>" in texts
    assert {"Belady (bound)", "ARC", "LRU", "5k"} <= set(texts)


def test_a_line_is_where_its_figures_are() -> None:
    root = ElementTree.fromstring(chart.draw({"panel": {"line": [(1000, 0.0), (10_000, 0.5)]}}))
    (line,) = root.iter("{http://www.w3.org/2000/svg}polyline")
    assert line.get("points") == "0.0,260.0 420.0,0.0"


def test_missing_traces_are_named(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.eviction", "--traces", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert f"{tmp_path} has no conversation_trace.jsonl and no synthetic_trace.jsonl" in run.stderr
    assert "--traces FOLDER" in run.stderr


@pytest.mark.parametrize("policy", POLICIES)
def test_a_store_that_holds_all_hits_all_but_the_first_uses(policy: str) -> None:
    trace = [[number % 7, 10 + number % 5] for number in range(100)]
    limit = describe(trace)["hit_ratio_without_limit"]
    assert replay(trace, policy, 12)["hit_ratio"] == pytest.approx(limit)
