"""The counter-based generator against its authors' known answers, and the numbers that sampling takes from it."""

from __future__ import annotations

import pytest
import torch

from kernels.reference.philox import philox_4x32_10, uniforms

ALL = 0xFFFFFFFF
VECTORS = [
    "0x1.c7d00ce1ca141p-1",
    "0x1.58102837bf8b9p-1",
    "0x1.067ff1b844b92p-1",
    "0x1.efa10a72b702fp-1",
]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ALL,) * 4, (ALL,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, ...], words: str
) -> None:
    (row,) = philox_4x32_10(torch.tensor([counter]), torch.tensor([key])).tolist()
    assert " ".join(f"{word:08x}" for word in row) == words


def test_a_uniform_is_the_top_53_bits_of_the_first_two_words() -> None:
    (value,) = uniforms([0], [0], [0]).tolist()
    assert value == (0x6627E8D5E169C58D >> 11) * 2.0**-53


def test_vectors_of_the_sampling_counter() -> None:
    """Frozen: a change of these changes every seeded answer ever given."""
    seeds = [1, 1, 1, 2**64 - 1]
    values = uniforms(seeds, [0, 1, 0, 7], [0, 0, 1, 3]).tolist()
    assert [value.hex() for value in values] == VECTORS


def test_each_of_seed_position_and_choice_matters_and_company_does_not() -> None:
    together = uniforms([5, 6, 5, 5], [0, 0, 1, 0], [0, 0, 0, 1]).tolist()
    assert len(set(together)) == 4
    alone = [
        uniforms([s], [p], [c]).item() for s, p, c in [(5, 0, 0), (6, 0, 0), (5, 1, 0), (5, 0, 1)]
    ]
    assert together == alone
    assert all(0.0 <= value < 1.0 for value in together)
