"""The stop rule, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduler.stopping import check_stop
from tests.support.sequences import make_sequence

EOS = frozenset({2, 9})


def ending(*output: int, max_length: int = 1000, **settings: Any) -> tuple[str, int | None]:
    sequence = make_sequence("s", prompt=(50, 51, 52), output=(output,), **settings)
    return check_stop(sequence, EOS, max_length)


@pytest.mark.peer_vectors
@pytest.mark.parametrize(
    ("output", "settings", "answer"),
    [
        ((), {}, ("", None)),
        ((5,), {}, ("", None)),
        ((5, 2), {}, ("stop", None)),
        ((5, 9), {}, ("stop", None)),
        ((2, 5), {}, ("", None)),
        ((5, 2), {"ignore_eos": True}, ("", None)),
        ((5, 7), {"stop_token_ids": (7,)}, ("stop", 7)),
        ((5, 2), {"ignore_eos": True, "stop_token_ids": (2,)}, ("stop", 2)),
        ((5, 2), {"stop_token_ids": (2,)}, ("stop", None)),
        ((5, 2), {"min_tokens": 3}, ("", None)),
        ((5, 7), {"min_tokens": 3, "stop_token_ids": (7,)}, ("", None)),
        ((5, 6, 2), {"min_tokens": 3}, ("stop", None)),
        ((5, 6, 8), {"max_tokens": 3}, ("length", None)),
        ((5, 6, 2), {"max_tokens": 3}, ("stop", None)),
        ((5, 6), {"max_tokens": 3}, ("", None)),
    ],
)
def test_rule(
    output: tuple[int, ...], settings: dict[str, Any], answer: tuple[str, int | None]
) -> None:
    assert ending(*output, **settings) == answer


def test_the_context_ends_what_min_tokens_would_keep_going() -> None:
    assert ending(5, 6, max_length=6, min_tokens=4) == ("", None)
    assert ending(5, 6, 2, max_length=6, min_tokens=4) == ("length", None)
    assert ending(5, 6, 2, max_length=6) == ("stop", None)
