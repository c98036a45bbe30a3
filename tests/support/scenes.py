"""Scenes for split serving: a decode engine, its prefill engines and the wire, run to their end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from core.request import Request
from engine.messages import AddRequest
from kvtransfer.transports.fake.network import FakeNetwork
from tests.support.engines import EngineHarness, Wire, abort, make_request, run_alone, turn_until
from tests.support.tiny_model import VOCAB_SIZE

SLICE_BYTES = 100
"""What a network in memory delivers at once: a fraction of a layer of a block."""


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCAB_SIZE) for i in range(length)]


@contextmanager
def split_pair(
    *addresses: str,
    prefill: dict[str, Any] | None = None,
    network: FakeNetwork | None = None,
    **decode: Any,
) -> Iterator[Wire]:
    """A decode engine and a prefill engine for each address; network: what KV travels on, None for sockets."""
    options = {"network": network, **(prefill or {})}
    engines = {address: EngineHarness(**options) for address in addresses or ("p1",)}
    wire = Wire(EngineHarness(network=network, **decode), engines, network=network)
    try:
        yield wire
    finally:
        for engine in [wire.decode, *wire.prefill.values()]:
            engine.close()


@contextmanager
def ledger_pair(
    *addresses: str, prefill: dict[str, Any] | None = None, **decode: Any
) -> Iterator[tuple[Wire, FakeNetwork]]:
    """The same with the ledger as model, on a network in memory that delivers in small slices."""
    network, ledger = FakeNetwork(SLICE_BYTES), {"is_ledger": True}
    options = {**ledger, **(prefill or {})}
    with split_pair(*addresses, prefill=options, network=network, **ledger, **decode) as wire:
        yield wire, network


def submit(wire: Wire, request: Request, *candidates: str) -> None:
    wire.decode.inbox.post(AddRequest(request, list(candidates)))


def run_to_end(wire: Wire, *requests: Request) -> None:
    """Turn until every choice has ended, then until nothing is held anywhere."""

    def ended() -> bool:
        reasons = [wire.decode.finish_reasons(r.id) for r in requests]
        return all(len(x) == r.sampling.n for x, r in zip(reasons, requests, strict=True))

    turn_until(ended, wire, wire.decode, *wire.prefill.values())
    settle(wire)


def settle(wire: Wire) -> None:
    engines = [wire.decode, *wire.prefill.values()]
    turn_until(lambda: all(engine.is_idle() for engine in engines), wire, *engines)


def answer(wire: Wire, request: Request) -> list[list[int]]:
    return [wire.decode.tokens(request.id, choice) for choice in range(request.sampling.n)]


def run_random_mix(seed: int, **harness: Any) -> None:
    """Requests, aborts and a prefill worker lost; what was not aborted has the answer of one engine alone."""
    chance = random.Random(seed)
    requests = [
        make_request(
            f"r{i}",
            random_prompt(chance.randrange(1, 150), chance.randrange(4)),
            max_tokens=chance.randrange(2, 20),
            n=chance.choice([1, 1, 2]),
            temperature=chance.choice([0.5, 1.0]),
            seed=i,
        )
        for i in range(20)
    ]
    aborted: set[str] = set()
    with split_pair(
        "p1", "p2", num_blocks=40, prefill={"num_blocks": 30, **harness}, **harness
    ) as wire:
        for index, request in enumerate(requests):
            submit(wire, request, *chance.sample(["p1", "p2"], chance.randrange(3)))
            for _ in range(chance.randrange(8)):
                wire.turn()
                for engine in [wire.decode, *wire.prefill.values()]:
                    engine.turn()
            if chance.random() < 0.25:
                aborted.add(chance.choice(requests[: index + 1]).id)
                abort(wire.decode, max(aborted))
            if index == 12:
                wire.cut("p1")
        for name in aborted:
            abort(wire.decode, name)
        run_to_end(wire, *requests)
        for request in requests:
            if "abort" not in wire.decode.finish_reasons(request.id).values():
                assert answer(wire, request) == run_alone(request), request
