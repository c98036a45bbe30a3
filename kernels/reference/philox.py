"""Counter-based random numbers: Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").

A number is a function of key and counter alone, so a split, preempted or migrated run needs tokens, never generator
state. For sampling:

    key     = seed (64 bits; low word first)
    counter = (output position, choice, purpose, 0)
    u       = the top 53 bits of (word 0 << 32 | word 1), times 2**-53: in [0, 1)

Words are 32 bits, held in int64 tensors; the product of two words wraps in int64 and its halves are masked out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PURPOSE_SAMPLE = 0
"""Counter word 2 of the numbers that choose tokens; other purposes are reserved."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_WORD_BITS = 32
_WORD_MASK = (1 << _WORD_BITS) - 1
_FRACTION_BITS = 53


def philox_4x32_10(counter: Tensor, key: Tensor) -> Tensor:
    """Four random words a row. counter: [rows, 4], key: [rows, 2], both int64 in [0, 2**32); result [rows, 4]."""
    word0, word1, word2, word3 = counter.unbind(-1)  # each [rows]
    key0, key1 = key.unbind(-1)
    for round_index in range(_NUM_ROUNDS):
        if round_index:
            key0 = (key0 + _KEY_STEPS[0]) & _WORD_MASK
            key1 = (key1 + _KEY_STEPS[1]) & _WORD_MASK
        product0, product1 = word0 * _MULTIPLIERS[0], word2 * _MULTIPLIERS[1]
        word0 = _high(product1) ^ word1 ^ key0
        word2 = _high(product0) ^ word3 ^ key1
        word1, word3 = product1 & _WORD_MASK, product0 & _WORD_MASK
    return torch.stack((word0, word1, word2, word3), dim=-1)


def uniforms(
    seeds: Sequence[int],
    positions: Sequence[int],
    choices: Sequence[int],
    purpose: int = PURPOSE_SAMPLE,
) -> Tensor:
    """One number in [0, 1) a row, float64 [rows]. seeds in [0, 2**64), the rest in [0, 2**32)."""
    key = torch.tensor([(seed & _WORD_MASK, seed >> _WORD_BITS) for seed in seeds])
    counter = torch.tensor(
        [
            (position, choice, purpose, 0)
            for position, choice in zip(positions, choices, strict=True)
        ]
    )
    words = philox_4x32_10(counter, key)  # [rows, 4]
    low_bits = 2 * _WORD_BITS - _FRACTION_BITS
    bits = (words[:, 0] << (_WORD_BITS - low_bits)) | (words[:, 1] >> low_bits)
    return bits.double() * 2.0**-_FRACTION_BITS


def _high(product: Tensor) -> Tensor:
    """The upper word of an unsigned 64-bit product that an int64 holds."""
    return (product >> _WORD_BITS) & _WORD_MASK
