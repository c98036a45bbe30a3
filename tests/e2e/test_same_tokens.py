"""Splitting changes nothing: 50 prompts, 64 greedy tokens, always what transformers gives on the same weights.

With weights in float32 the oracle judges. With weights kept in blocks, as workers run by default, answers are held
against each other: the host kernels promise equal bits, so not one token may differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.answers import Answer, ask_all, ask_within, judge, mtbench_prompts
from tests.support.nodes import Cluster, Node, run_cluster, wait_until
from tests.support.valkey import running_valkey

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NUM_PROMPTS, NUM_TOKENS, MAX_VOID = 50, 64, 3
CONCURRENCY = 25
WHILE_KILLING = 6
NUM_KILLS = 3
NUM_ALONE = 12
LINK_RATE = "5M"


def ask_everything(cluster: Cluster, concurrency: int = CONCURRENCY) -> list[Answer]:
    return asyncio.run(ask_all(cluster.url, mtbench_prompts(NUM_PROMPTS), NUM_TOKENS, concurrency))


def report(capsys: pytest.CaptureFixture[str], void: Sequence[str]) -> None:
    """List void answers in the test's output, also when it passes."""
    with capsys.disabled():
        print(f"\nvoid by near ties: {len(void)} of {NUM_PROMPTS}", *void, sep="\n  ")


def test_mixed(mixed_cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    answers = ask_everything(mixed_cluster)
    report(capsys, judge(answers, MAX_VOID))
    mixed_cluster.wait_idle()


def test_split_cold_and_warm(split_cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    decode = split_cluster.workers["d"]
    before = decode.metrics()
    cold = ask_everything(split_cluster)
    report(capsys, judge(cold, MAX_VOID))
    split_cluster.wait_idle()
    after = decode.metrics()
    completed = "baton:sessions_completed_total"
    assert after[completed] - before[completed] == NUM_PROMPTS, "every prompt was split"
    warm = ask_everything(split_cluster)
    report(capsys, judge(warm, MAX_VOID))
    split_cluster.wait_idle()
    assert sum(answer.cached_tokens for answer in warm) > sum(a.cached_tokens for a in cold)


def test_by_default_all_ways_to_serve_give_equal_tokens(logs: Path) -> None:
    """25 at a time on a mixed worker, a few of them alone there, split cold and warm, and between unlike workers."""
    roles, blocks = {"p": "prefill", "d": "decode"}, {"p": ["--block-size", "48"]}
    with (
        running_valkey() as redis,
        run_cluster(logs / "mixed-kept", {"m": "mixed"}) as mixed,
        run_cluster(logs / "kept", roles, redis_url=redis.url) as split,
        run_cluster(logs / "unlike", roles, own_arguments=blocks) as unlike,
    ):
        expected, ways = asyncio.run(_ask_in_all_ways(mixed, split, unlike))
        assert _num_split(split) >= NUM_PROMPTS, "every prompt was split"
        assert _num_split(unlike) == NUM_ALONE, "every prompt was split"
    for way, answers in ways.items():
        differing = [i for i, a in enumerate(answers) if a.token_ids != expected[i].token_ids]
        assert differing == [], f"{way}: answers {differing} have other tokens"


def _num_split(cluster: Cluster) -> int:
    cluster.wait_idle()
    return int(cluster.workers["d"].metrics()["baton:sessions_completed_total"])


async def _ask_in_all_ways(
    mixed: Cluster, split: Cluster, unlike: Cluster
) -> tuple[list[Answer], dict[str, list[Answer]]]:
    """What a mixed worker says, and what is said in every other way; each cluster keeps about one core busy."""
    texts = mtbench_prompts(NUM_PROMPTS)
    some = texts[:NUM_ALONE]

    async def ask_in_turn(cluster: Cluster, *rounds: tuple[list[str], int]) -> list[list[Answer]]:
        return [await ask_all(cluster.url, asked, NUM_TOKENS, count) for asked, count in rounds]

    (alone, together), (cold, warm), (other_blocks,) = await asyncio.gather(
        ask_in_turn(mixed, (some, 1), (texts, CONCURRENCY)),
        ask_in_turn(split, (texts, CONCURRENCY), (texts, CONCURRENCY)),
        ask_in_turn(unlike, (some, NUM_ALONE)),
    )
    ways = {"alone": alone, "cold": cold, "warm": warm, "between unlike workers": other_blocks}
    return together, ways


@pytest.mark.failure_edge("P dies mid-transfer")
@pytest.mark.failure_edge("P restarts on same address")
def test_split_with_the_prefill_worker_killed_again_and_again(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = {"p": "prefill", "d": "decode"}
    arguments = ["--link-rate", LINK_RATE, "--weight-format", "expanded"]
    with (
        running_valkey() as redis,
        run_cluster(
            logs / "killed", roles, redis_url=redis.url, worker_arguments=arguments, threads=2
        ) as cluster,
    ):
        prefill = cluster.workers["p"]
        answers, num_kills = asyncio.run(_ask_while_killing(cluster, prefill))
        assert num_kills >= NUM_KILLS
        report(capsys, judge(answers, MAX_VOID))
        cluster.wait_idle()
        assert cluster.workers["d"].metrics()["baton:sessions_failed_total"] >= NUM_KILLS


async def _ask_while_killing(cluster: Cluster, prefill: Node) -> tuple[list[Answer], int]:
    """All prompts, a few at a time so that each life of P gets some; P dies whenever blocks are on their way.

    What is left when it has died for the last time is asked as elsewhere.
    """
    places = asyncio.Semaphore(WHILE_KILLING)
    asking = asyncio.create_task(
        ask_within(cluster.url, mtbench_prompts(NUM_PROMPTS), NUM_TOKENS, places)
    )
    num_kills = 0
    while not asking.done() and num_kills < NUM_KILLS:
        await asyncio.to_thread(_wait_mid_transfer, prefill, asking)
        if asking.done():
            break
        prefill.kill()
        num_kills += 1
        prefill.start()
        await asyncio.to_thread(prefill.wait_ready)
    for _ in range(CONCURRENCY - WHILE_KILLING):
        places.release()
    return await asking, num_kills


def _wait_mid_transfer(prefill: Node, asking: asyncio.Task[list[Answer]]) -> None:
    """Until counters show a block acknowledged and one outstanding."""

    def is_mid_transfer() -> bool:
        metrics = prefill.metrics()
        acknowledged = metrics["baton:blocks_acknowledged_total"] >= 1
        return asking.done() or (acknowledged and metrics["baton:blocks_outstanding"] >= 1)

    wait_until(is_mid_transfer, "a block acknowledged and one outstanding", 120.0)
