"""Sampling on the host: the reference's numbers and ids on every variant, at the boundaries between ids too."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.cpu.backend import HostBackend
from kernels.reference import sampling
from kernels.workspace import Workspace
from tests.support.host_kernels import backends, examples, on_every_variant
from tests.support.poison import poisoned_memory
from tests.support.sampling_rule import restated_draw

VOCABULARY = 49_152
LAST_NUMBER = 1 - 2.0**-53
LOGPROB_TOLERANCE = 1e-14
"""The logarithm of a sum of up to exp(11) in its last bit, and the last bit of what it is taken from."""

BROKEN_ROWS = [[1.0, math.nan, 0.0], [math.nan] * 3, [1.0, math.inf, 0.0], [-math.inf] * 3]
WHAT_BREAKS_THEM = ["a NaN", "NaNs", "an infinity", "all banned"]


class Setting(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


settings_of_rows = st.builds(
    Setting,
    st.sampled_from([0.01, 0.3, 0.7, 1.0, 2.5]),
    st.sampled_from([0, 1, 3, 40, 300, 10**6]),
    st.sampled_from([1.0, LAST_NUMBER, 0.99, 0.9, 0.5, 0.01, 1e-9]),
    st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
)


def logits_of(num_rows: int, vocab_size: int, seed: int, kind: str = "normal") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    if kind == "ties":
        return logits.round_()
    if kind == "close":
        return logits.mul_(2.0**-22)
    if kind == "banned":
        logits[torch.rand(logits.shape, generator=generator) < 0.6] = -math.inf
        logits[:, vocab_size // 2] = 0.5
    return logits


def boundary_numbers(logits: Tensor, setting: Setting, seed: int) -> list[float]:
    """Numbers on and beside the boundaries of some ids of one row, and the least and greatest of all."""
    weights = sampling.to_weights(logits.view(1, -1), [setting.temperature], Workspace())
    inside, over_blocks = sampling.fold(weights)
    before = torch.nn.functional.pad(over_blocks, (1, 0))[:, :-1]
    sums = (before.unsqueeze(-1) + inside).flatten()
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(logits), (12,), generator=generator)
    numbers = [0.0, LAST_NUMBER]
    for share in (sums[places] / sums[-1]).tolist():
        numbers += [math.nextafter(share, 0.0), share, math.nextafter(share, 1.0)]
    return [min(number, LAST_NUMBER) for number in numbers]


def draw(backend: object, logits: Tensor, numbers: list[float], settings: list[Setting]) -> Tensor:
    lists = [list(values) for values in zip(*settings, strict=True)]
    u = torch.tensor(numbers, dtype=torch.float64)
    return backend.draw(logits, u, *lists, Workspace())  # type: ignore[attr-defined, no-any-return]


# ---------------------------------------------------------------- random numbers


@examples(100)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
        min_size=1,
        max_size=40,
    ),
    purpose=st.sampled_from([0, 1, 2**32 - 1]),
)
def test_random_numbers_are_the_references(rows: list[tuple[int, int, int]], purpose: int) -> None:
    seeds, positions, choices = (list(each) for each in zip(*rows, strict=True))
    with poisoned_memory():
        ours = on_every_variant(lambda b: b.uniforms(seeds, positions, choices, purpose))
    assert torch.equal(ours, reference.uniforms(seeds, positions, choices, purpose))


# ---------------------------------------------------------------- draws


@examples(150)
@given(
    vocab_size=st.sampled_from([1, 2, 5, 255, 256, 257, 1000, 2048, 5000]),
    setting=settings_of_rows,
    kind=st.sampled_from(["normal", "ties", "close", "banned"]),
    seed=st.integers(0, 999),
)
def test_a_number_draws_the_references_id_at_every_boundary(
    vocab_size: int, setting: Setting, kind: str, seed: int
) -> None:
    (row,) = logits_of(1, vocab_size, seed, kind)
    numbers = boundary_numbers(row, setting, seed)
    logits, settings = row.expand(len(numbers), -1), [setting] * len(numbers)
    with poisoned_memory():
        ours = on_every_variant(lambda backend: draw(backend, logits, numbers, settings))
    assert ours.tolist() == draw(reference, logits, numbers, settings).tolist()


@examples(30)
@given(
    vocab_size=st.integers(1, 700), setting=settings_of_rows, u=st.floats(0, 1, exclude_max=True)
)
def test_draws_are_the_rule(vocab_size: int, setting: Setting, u: float) -> None:
    logits = logits_of(1, vocab_size, seed=vocab_size)
    ours = on_every_variant(lambda backend: draw(backend, logits, [u], [setting]))
    assert ours.item() == restated_draw(logits[0].tolist(), u, *setting)


@examples(10)
@given(
    settings=st.lists(settings_of_rows, min_size=1, max_size=40),
    kind=st.sampled_from(["normal", "ties", "close", "banned"]),
    seed=st.integers(0, 999),
)
def test_rows_of_a_vocabulary_each_with_settings_of_its_own(
    settings: list[Setting], kind: str, seed: int
) -> None:
    logits = logits_of(len(settings), VOCABULARY, seed, kind)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(len(settings), generator=generator, dtype=torch.float64).tolist()
    before = logits.clone()
    ours = on_every_variant(lambda backend: draw(backend, logits, numbers, settings))
    assert ours.tolist() == draw(reference, logits, numbers, settings).tolist()
    assert torch.equal(logits, before)
    alone = [
        int(draw(backends()[0], logits[i : i + 1], numbers[i : i + 1], settings[i : i + 1]))
        for i in range(len(settings))
    ]
    assert alone == ours.tolist()


def test_rows_may_lie_apart() -> None:
    wide = torch.full((3, 700), math.nan)
    wide[:, 50:650] = logits_of(3, 600, seed=1)
    numbers, settings = [0.1, 0.5, 0.9], [Setting(top_p=0.9)] * 3
    ours = on_every_variant(lambda b: draw(b, wide[:, 50:650], numbers, settings))
    assert ours.tolist() == draw(reference, wide[:, 50:650], numbers, settings).tolist()


@pytest.mark.parametrize("setting", [Setting(), Setting(top_k=2), Setting(top_p=0.5)])
@pytest.mark.parametrize("row", BROKEN_ROWS, ids=WHAT_BREAKS_THEM)
def test_logits_that_are_no_numbers_are_refused(row: list[float], setting: Setting) -> None:
    logits = torch.stack((torch.tensor([1.0, 2.0, 3.0]), torch.tensor(row)))
    for backend in backends():
        with pytest.raises(AssertionError, match="not finite"):
            draw(backend, logits, [0.5, 0.5], [Setting(), setting])


# ---------------------------------------------------------------- log-probabilities


def flattened(answers: list[tuple[float, int, list[int], list[float]]]) -> Tensor:
    """Every number of the answers, in float64."""
    return torch.tensor(
        [number for answer in answers for part in answer for number in _listed(part)],
        dtype=torch.float64,
    )


def _listed(part: float | list[int] | list[float]) -> list[float]:
    return [*part] if isinstance(part, list) else [part]


def assert_logprobs_are_the_references(
    logits: Tensor, rows: list[int], token_ids: list[int], num_top: list[int]
) -> None:
    given = (logits, rows, token_ids, num_top, Workspace())

    def run(backend: HostBackend) -> Tensor:
        return flattened(backend.token_logprobs(*given))

    with poisoned_memory():
        on_every_variant(run)
        ours = backends()[0].token_logprobs(*given)
    for own, expected in zip(ours, reference.token_logprobs(*given), strict=True):
        assert own[1:3] == expected[1:3], "rank and best ids"
        near = pytest.approx([expected[0], *expected[3]], rel=0, abs=LOGPROB_TOLERANCE)
        assert [own[0], *own[3]] == near


@examples(80)
@given(
    vocab_size=st.sampled_from([1, 2, 5, 19, 256, 257, 1000, 5121, 6000]),
    kind=st.sampled_from(["normal", "ties", "close"]),
    asked=st.lists(
        st.tuples(st.integers(0, 3), st.floats(0, 1), st.sampled_from([0, 1, 2, 5, 20])),
        min_size=1,
        max_size=12,
    ),
    seed=st.integers(0, 999),
)
def test_logprobs(
    vocab_size: int, kind: str, asked: list[tuple[int, float, int]], seed: int
) -> None:
    rows, shares, num_top = (list(each) for each in zip(*asked, strict=True))
    token_ids = [int(share * (vocab_size - 1)) for share in shares]
    logits = logits_of(4, vocab_size, seed, kind)
    assert_logprobs_are_the_references(logits, rows, token_ids, num_top)


@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_logprobs_of_a_vocabulary(kind: str) -> None:
    logits = logits_of(5, VOCABULARY, seed=2, kind=kind)
    best = logits.argmax(dim=1).tolist()
    assert_logprobs_are_the_references(logits, [0, 1, 2, 3, 4], best, [20, 0, 1, 5, 20])


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[0.0, -0.0, -1.0, -0.0, 0.0]])
    assert_logprobs_are_the_references(logits, [0, 0], [1, 2], [3, 5])


@pytest.mark.parametrize("row", BROKEN_ROWS, ids=WHAT_BREAKS_THEM)
def test_logprobs_of_what_is_no_number_are_refused(row: list[float]) -> None:
    logits = torch.stack((torch.tensor([1.0, 2.0, 3.0]), torch.tensor(row)))
    for backend in (*backends(), reference):
        with pytest.raises(AssertionError, match="not finite"):
            backend.token_logprobs(logits, [0, 1], [0, 0], [2, 3], Workspace())


def test_an_id_that_the_model_lacks_is_our_mistake() -> None:
    logits = torch.zeros(2, 5)
    with pytest.raises(AssertionError, match="ids that the model has"):
        backends()[0].token_logprobs(logits, [0], [5], [1], Workspace())
    with pytest.raises(AssertionError, match="rows of the logits"):
        backends()[0].token_logprobs(logits, [2], [0], [1], Workspace())
