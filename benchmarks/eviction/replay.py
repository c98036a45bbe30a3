"""Traces as chains of block ids, and what eviction policies make of them.

A request reads the blocks of its chain that are held, uses all of them, and stores those that are not: what a tier
sees whose requests come one after the other. Nothing else is in use when a request comes.
"""

from __future__ import annotations

import heapq
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtransfer.tiers.policies import make_policy

Trace = list[list[int]]


def read_trace(path: Path) -> Trace:
    """The chain of every request, in order of arrival; ids name a block and all before it."""
    return [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()]


def describe(trace: Trace) -> dict[str, Any]:
    """How large a trace is, and the hit ratio of a store that never evicts."""
    num_accesses = sum(map(len, trace))
    num_blocks = len({block for chain in trace for block in chain})
    return {
        "requests": len(trace),
        "accesses": num_accesses,
        "blocks": num_blocks,
        "hit_ratio_without_limit": 1 - num_blocks / num_accesses,
    }


def replay(trace: Trace, policy_name: str, capacity: int) -> dict[str, Any]:
    """Hits of one policy at one capacity, as shares of all blocks asked for.

    hit_ratio: blocks that were held. prefix_hit_ratio: those with every block before them held too, which are what a
    request can use.
    """
    policy = make_policy(policy_name, capacity)
    num_hits = num_prefix_hits = num_refused = 0
    started_s = time.perf_counter()
    for chain in trace:
        held = {block for block in chain if block in policy}
        num_hits += len(held)
        num_prefix_hits += next(
            (i for i, block in enumerate(chain) if block not in held), len(chain)
        )
        policy.touch(chain)
        absent = [block for block in chain if block not in held]
        if policy.admit(absent, held) is None:
            num_refused += 1
        else:
            policy.unpin(absent)
    num_accesses = sum(map(len, trace))
    return {
        "hit_ratio": num_hits / num_accesses,
        "prefix_hit_ratio": num_prefix_hits / num_accesses,
        "refused_requests": num_refused,
        "us_per_block": (time.perf_counter() - started_s) / num_accesses * 1e6,
        "figures": policy.figures(),
    }


def belady_hit_ratio(accesses: Sequence[int], capacity: int) -> float:
    """Hits of the store that knows the future, as a share: no policy has more.

    L. A. Belady 1966: what leaves is the block whose next use is farthest, which may be the one that comes.
    """
    next_use = _next_uses(accesses)
    held: dict[int, float] = {}  # block -> its next use
    farthest: list[tuple[float, int]] = []  # (-next use, block), old ones included
    num_hits = 0
    for position, block in enumerate(accesses):
        num_hits += block in held
        if block not in held and len(held) == capacity:
            while held.get(farthest[0][1]) != -farthest[0][0]:
                heapq.heappop(farthest)
            if -farthest[0][0] <= next_use[position]:
                continue
            del held[heapq.heappop(farthest)[1]]
        held[block] = next_use[position]
        heapq.heappush(farthest, (-next_use[position], block))
    return num_hits / len(accesses)


def _next_uses(accesses: Sequence[int]) -> list[float]:
    """For each access the position of the next one to the same block; infinity where there is none."""
    next_use = [math.inf] * len(accesses)
    seen: dict[int, int] = {}
    for position in range(len(accesses) - 1, -1, -1):
        next_use[position] = seen.get(accesses[position], math.inf)
        seen[accesses[position]] = position
    return next_use
