"""Scenes for split serving: a decode engine, its prefill engines and the wire, run to their end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from core.request import Request
from engine.messages import AddRequest
from tests.support.engines import EngineHarness, Wire, turn_until
from tests.support.tiny_model import VOCAB_SIZE


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCAB_SIZE) for i in range(length)]


@contextmanager
def split_pair(
    *addresses: str, prefill: dict[str, Any] | None = None, **decode: Any
) -> Iterator[Wire]:
    """A decode engine and a prefill engine for each address."""
    engines = {address: EngineHarness(**(prefill or {})) for address in addresses or ("p1",)}
    wire = Wire(EngineHarness(**decode), engines)
    try:
        yield wire
    finally:
        for engine in [wire.decode, *wire.prefill.values()]:
            engine.close()


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
