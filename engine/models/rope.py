"""Rotary position embeddings: every scaling variant becomes one frequency per pair and one factor on cos and sin.

A model rotates element i of a head with element i + D/2 by `position * frequency[i]`. Variants differ only in the
frequencies and the factor, both fixed at load, so that the model and its kernels know one rotation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import ModelLoadError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One way to rotate.

    theta: base of the frequencies.
    kind: a name in ROPE_KINDS.
    factor: how much longer than original_max_position the model reaches.
    original_max_position: the length the model was first trained for; 0 takes max_position.
    low_freq_factor, high_freq_factor: bounds of the blended band (llama3).
    beta_fast, beta_slow: rotations that bound the blended band (yarn).
    mscale, mscale_all_dim: numerator and denominator of yarn's factor on cos and sin; 0 leaves them out.
    attention_factor: the factor on cos and sin when the model names it (yarn, longrope).
    truncate: whether yarn rounds the band's bounds to whole dimensions.
    short_factors, long_factors: divisors of the frequencies (longrope), by whether max_position exceeds the original.
    divisors: divisors of the frequencies that the model's file gives as they are; empty for none.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            known = ", ".join(ROPE_KINDS)
            raise ModelLoadError(f"rope scaling: {self.kind!r} is unknown; known: {known}")
        if self.factor <= 0 or self.theta <= 0:
            raise ModelLoadError(
                f"rope scaling: factor ({self.factor}) and theta ({self.theta}) must be positive"
            )


def reach(config: RopeConfig, max_position: int) -> int:
    """The longest position served: some kinds of scaling reach past the model's `max_position`."""
    if config.kind == "linear":
        return int(max_position * max(config.factor, 1.0))
    if config.kind == "yarn":
        original = config.original_max_position or max_position
        return max(max_position, int(original * config.factor))
    return max_position


def rope_frequencies(config: RopeConfig, head_dim: int, max_position: int) -> tuple[Tensor, float]:
    """(`[head_dim / 2]` float32 radians a position, the factor on cos and sin)."""
    base = _base_frequencies(config.theta, head_dim)
    original = config.original_max_position or max_position
    factor = 1.0
    if config.kind == "linear":
        base = base / config.factor
    elif config.kind == "llama3":
        base = _llama3(base, config, original)
    elif config.kind == "yarn":
        base, factor = _yarn(base, config, head_dim, original)
    elif config.kind == "longrope":
        base, factor = _longrope(base, config, max_position, original)
    # `dynamic` rescales only sequences longer than max_position, which are never served.
    if config.divisors:
        base = base / _divisors(config.divisors, head_dim)
    return base, factor


def _base_frequencies(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponents)


def _divisors(values: tuple[float, ...], head_dim: int) -> Tensor:
    if len(values) != head_dim // 2:
        raise ModelLoadError(
            f"rope scaling: {len(values)} frequency factors given, {head_dim // 2} needed"
        )
    return torch.tensor(values, dtype=torch.float32)


def _llama3(base: Tensor, config: RopeConfig, original: int) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    if config.high_freq_factor <= config.low_freq_factor:
        raise ModelLoadError(
            f"rope scaling: high_freq_factor ({config.high_freq_factor}) must exceed "
            f"low_freq_factor ({config.low_freq_factor})"
        )
    wavelength = 2 * math.pi / base
    stretched = base / config.factor
    smooth = (original / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - smooth) * stretched + smooth * base
    result = torch.where(wavelength > original / config.low_freq_factor, stretched, base)
    is_between = (wavelength >= original / config.high_freq_factor) & (
        wavelength <= original / config.low_freq_factor
    )
    return torch.where(is_between, blended, result)


def _yarn(base: Tensor, config: RopeConfig, head_dim: int, original: int) -> tuple[Tensor, float]:
    """Dimensions that turn fast are kept, slow ones stretched, with a ramp between two rotation counts."""

    def dimension(rotations: float) -> float:
        ratio = original / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    stretched = base / config.factor
    frequencies = stretched * ramp + base * (1 - ramp)
    return frequencies, _yarn_factor(config)


def _yarn_factor(config: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def _longrope(
    base: Tensor, config: RopeConfig, max_position: int, original: int
) -> tuple[Tensor, float]:
    """Own divisors a dimension. KV is reused at any length, so the model's reach picks the set, not a prompt's."""
    values = config.long_factors if max_position > original else config.short_factors
    divisors = _divisors(values, 2 * base.shape[0])
    if config.attention_factor is not None:
        return base / divisors, config.attention_factor
    scaled = config.factor > 1
    factor = math.sqrt(1 + math.log(config.factor) / math.log(original)) if scaled else 1.0
    return base / divisors, factor
