"""gpu-check without a card: one line and nothing claimed; and its steps, tried at small sizes in the interpreter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import report
from benchmarks.gpu import __main__ as gpu_check
from benchmarks.gpu import attention, memory, products, serving, timing
from tests.support.triton_device import DEVICE, IS_INTERPRETED

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="the check itself runs on a card")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "ROUND_MS", 0.0)
    monkeypatch.setattr(timing, "WARM_UP_CALLS", 0)


def test_without_a_card_one_line_is_said_and_nothing_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(report, "write", lambda *_: pytest.fail("something was claimed"))
    assert gpu_check.main() == 0
    assert capsys.readouterr().out == (
        "gpu-check: torch sees no CUDA card here; nothing was run.\n"
    )


@pytest.mark.parametrize("num_rows", [1, 12])
def test_attention_is_compared_with_sdpa(num_rows: int) -> None:
    """Decode, and a chunk behind a context."""
    case = attention.Case("tiny", 1, num_rows, 20, num_heads=4, num_kv_heads=2, head_dim=16)
    figures = attention.run_case(case, DEVICE, 1.0)
    assert figures["is_right"]
    assert set(figures["sides"]) == {*attention.POOLS, "sdpa"}
    assert figures["sdpa_over_ours"] > 0
    assert figures["flex_over_ours"] is None


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention.Case("tiny", 1, 1, 20, num_heads=2, num_kv_heads=1, head_dim=16)
    sides = attention.Sides(case, DEVICE)
    assert sides.max_error() <= attention.TOLERANCE
    right = sides.ours("bfloat16")()
    monkeypatch.setattr(sides, "ours", lambda _: lambda: right + 0.1)
    assert sides.max_error() > attention.TOLERANCE


def test_counts_of_bytes_and_operations() -> None:
    case = attention.Case("tiny", 2, 3, 20, num_heads=4, num_kv_heads=2, head_dim=16)
    sides = attention.Sides(case, DEVICE)
    assert sides.kv_bytes("bfloat16") == 2 * 2 * 20 * 2 * 16 * 2
    assert sides.kv_bytes("int8_per_token_head") == 2 * 2 * 20 * 2 * (16 + 4)
    assert sides.operations() == 4 * 2 * 4 * 16 * (18 + 19 + 20)


def test_products_and_row_wise_kernels_are_measured() -> None:
    figures = products.run(DEVICE, 32, 256, (2,))
    assert all("ms" in side for side in figures["2 rows"].values())
    assert set(figures["2 rows"]) == {"bfloat16 library", "int4", "int8", *products.BLOCK_FORMATS}
    ceiling = memory.copy_gb_per_s(DEVICE, 1 << 20)
    row_wise = memory.row_wise(DEVICE, ceiling, 1)
    assert all(figure["share_of_copy"] > 0 for figure in row_wise.values())


def test_a_side_that_cannot_run_says_why() -> None:
    def fail() -> None:
        raise RuntimeError("no such kernel\non this card")

    figures = timing.measure({"ours": lambda: None, "other": fail}, DEVICE)
    assert figures["other"] == {"failed": "no such kernel"}
    assert timing.ratio(figures, "other", "ours") is None


@pytest.mark.parametrize(
    ("changes", "is_right"),
    [
        ({}, True),
        ({"text": "another"}, False),
        ({"num_sessions": 0.0}, False),
        ({"kernels": {"p": "triton (card)", "d": "reference (torch)"}}, False),
    ],
)
def test_a_split_answer_is_compared_with_card_and_reference(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_right: bool
) -> None:
    """Right where it is served on the card, over a session, with the text of the other side."""
    asked: list[tuple[str, ...]] = []

    def ask(_: Path, roles: dict[str, str], arguments: list[str]) -> serving.Answer:
        asked.append((*roles, *arguments))
        on_card = {"p": "triton (card)", "d": "triton (card)"}
        answer = serving.Answer("text", float("p" in roles), on_card)
        return replace(answer, **changes) if "p" in roles else answer

    monkeypatch.setattr(serving, "ask", ask)
    figures = serving.run()
    assert {name: step["is_right"] for name, step in figures.items()} == {
        "split, bfloat16": is_right,
        "split, float32": is_right,
    }
    assert [arguments[:5] for arguments in asked] == [
        ("p", "d", "--device", "cuda", "--dtype"),
        ("m", "--device", "cuda", "--dtype", "bfloat16"),
        ("p", "d", "--device", "cuda", "--dtype"),
        ("m", "--device", "cpu", "--kernel-backend", "reference"),
    ]


def test_what_is_wrong_fails_the_check() -> None:
    figures = {
        "correctness": {"is_right": True},
        "serving": {"split": {"is_right": True}, "other": {"is_right": False}},
        "attention": {"one": {"is_right": True}, "two": {"is_right": False}},
    }
    assert gpu_check._wrong_steps(figures) == ["other", "two"]
