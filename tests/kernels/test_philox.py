"""Philox-4x32-10 against its authors' known answers, and the numbers sampling makes of it, frozen."""

from __future__ import annotations

import pytest
import torch

from kernels.reference.philox import philox_4x32_10, uniforms

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
MASK = (1 << 32) - 1


@pytest.mark.peer_vectors
@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    words = philox_4x32_10(torch.tensor([counter]), torch.tensor([key]))
    assert tuple(words[0].tolist()) == answer


def test_rows_do_not_touch_each_other() -> None:
    counters = torch.tensor([counter for counter, _, _ in KNOWN_ANSWERS])
    keys = torch.tensor([key for _, key, _ in KNOWN_ANSWERS])
    words = philox_4x32_10(counters, keys)
    assert [tuple(row) for row in words.tolist()] == [answer for _, _, answer in KNOWN_ANSWERS]


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """The same rounds in plain integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF])
def test_a_number_is_the_top_53_bits_of_the_first_two_words(seed: int) -> None:
    positions, choices = [0, 1, 7, 2**31], [0, 3, 0, 127]
    numbers = uniforms([seed] * 4, positions, choices)
    assert numbers.dtype == torch.float64
    for number, position, choice in zip(numbers.tolist(), positions, choices, strict=True):
        high, low, *_ = scalar_philox([position, choice, 0, 0], [seed & MASK, seed >> 32])
        assert number == ((high << 32 | low) >> 11) * 2.0**-53


def test_seed_position_choice_and_purpose_all_count() -> None:
    base = uniforms([5], [3], [1])
    others = [
        uniforms([6], [3], [1]),
        uniforms([5 + (1 << 32)], [3], [1]),
        uniforms([5], [4], [1]),
        uniforms([5], [3], [2]),
        uniforms([5], [3], [1], purpose=1),
    ]
    assert len({number.item() for number in [base, *others]}) == 6


def test_frozen_numbers() -> None:
    """A change here changes the tokens of every seeded request in every cluster."""
    numbers = uniforms([0, 42, 2**64 - 1, 42], [0, 0, 9, 1], [0, 0, 0, 2])
    assert numbers.tolist() == [
        0.3990464708489645,
        0.6129598811894158,
        0.14726771660735116,
        0.5418999413658389,
    ]


def test_numbers_are_uniform() -> None:
    numbers = uniforms([7] * 20_000, range(20_000), [0] * 20_000)
    assert 0.0 <= float(numbers.min()) < 0.001
    assert 0.999 < float(numbers.max()) < 1.0
    counts = torch.histc(numbers.float(), bins=50, min=0.0, max=1.0)
    chi_square = float(((counts - 400) ** 2 / 400).sum())
    assert chi_square < 85.35  # 0.999 quantile of 49 degrees of freedom
