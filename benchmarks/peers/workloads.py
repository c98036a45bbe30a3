"""What is asked of every peer, and the figures taken from the answers.

Prompts are random token ids, drawn from a seed that names workload, round and attempt: equal for all peers, new each
time, so that no prefix cache helps where none is meant to. Greedy, and an end token does not end an answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.peers.peer import Peer
from benchmarks.peers.timeline import decode_rate, joint_decode_rate, whole_rate

VOCAB = range(100, 49_000)
DECODE_PROMPT, DECODE_TOKENS = 32, 128
STREAM_PROMPT, STREAM_TOKENS = 256, 64
SHARED_TOKENS, NEW_TOKENS = 1_500, 33

Figures = Mapping[str, float]


@dataclass(frozen=True)
class Workload:
    """A request pattern: run(peer, chance) gives its figures by measure."""

    name: str
    run: Callable[[Peer, random.Random], Figures]


LOWER_IS_BETTER = ("warm TTFT ms", "memory MiB")


def workloads() -> dict[str, Workload]:
    """All workloads by name, in the order in which they run."""
    listed = [
        Workload("prefill-512", partial(_prefill, 512)),
        Workload("prefill-2000", partial(_prefill, 2_000)),
        Workload("decode", _decode),
        Workload("streams-8", partial(_streams, 8)),
        Workload("streams-32", partial(_streams, 32)),
        Workload("warm", _warm),
    ]
    return {workload.name: workload for workload in listed}


def warm_up(peer: Peer, chance: random.Random) -> None:
    """A short request before a peer's turn: pages and caches as a server in use has them."""
    peer.ask([_prompt(chance, 64)], 8)


def fill(peer: Peer, chance: random.Random, num_tokens: int) -> None:
    """Write the whole KV budget once, in prompts of 2,000 tokens."""
    for _ in range(num_tokens // 2_000):
        peer.ask([_prompt(chance, 2_000)], 1)


def ratio(measure: str, value: float, best: float) -> float:
    """How a value stands beside the best one, as its share of speed: above 1 is better, also where less is."""
    return best / value if measure in LOWER_IS_BETTER else value / best


def best_of(measure: str, medians: Mapping[str, float]) -> str:
    """The name with the best median."""
    choose = min if measure in LOWER_IS_BETTER else max
    return choose(medians, key=lambda name: medians[name])


def _prefill(length: int, peer: Peer, chance: random.Random) -> Figures:
    (line,) = peer.ask([_prompt(chance, length)], 1)
    return {f"prefill {length} tok/s": length / line.first_s}


def _decode(peer: Peer, chance: random.Random) -> Figures:
    (line,) = peer.ask([_prompt(chance, DECODE_PROMPT)], DECODE_TOKENS)
    return {"decode tok/s": decode_rate(line)}


def _streams(number: int, peer: Peer, chance: random.Random) -> Figures:
    prompts = [_prompt(chance, STREAM_PROMPT) for _ in range(number)]
    lines = peer.ask(prompts, STREAM_TOKENS)
    figures = {f"{number} streams tok/s": whole_rate(lines)}
    if number == 8:
        figures[f"{number} streams, all decoding, tok/s"] = joint_decode_rate(lines)
    return figures


def _warm(peer: Peer, chance: random.Random) -> Figures:
    shared = _prompt(chance, SHARED_TOKENS)
    _, (line,) = (peer.ask([shared + _prompt(chance, NEW_TOKENS)], 1) for _ in range(2))
    return {"warm TTFT ms": line.first_s * 1e3}


def _prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.choice(VOCAB) for _ in range(length)]
