"""Parts of the sampling rule in plain Python, as the docstrings of `kernels.reference` state them."""

from __future__ import annotations

import math

FOLD_BLOCK = 256


def restated_exp(x: float) -> float:
    """Python rounds every operation on floats to nearest even, and fuses none."""
    if math.isnan(x):
        return x
    if x < -708.0:
        return 0.0
    n = (x * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0
    r = x - n * (0x162E42FEE * 2.0**-33) - n * 1.90821492927058770002e-10
    p = 1.0 / math.factorial(13)
    for power in range(12, -1, -1):
        p = p * r + 1.0 / math.factorial(power)
    return p * 2.0 ** int(n)


def restated_fold(weights: list[float]) -> tuple[list[float], float]:
    """Cumulative weights and their total."""
    sums, before = [], 0.0
    for start in range(0, len(weights), FOLD_BLOCK):
        inside = 0.0
        for weight in weights[start : start + FOLD_BLOCK]:
            inside += weight
            sums.append(before + inside)
        before += inside
    return sums, before


def restated_draw(
    logits: list[float], u: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> int:
    """The id that a number draws."""
    largest = max(logits)
    weights = [restated_exp((x - largest) / temperature) for x in logits]
    weights = [w if w >= min_p else 0.0 for w in weights]
    if 0 < top_k < len(logits):
        least_logit = sorted(logits, reverse=True)[top_k - 1]
        weights = [w if x >= least_logit else 0.0 for w, x in zip(weights, logits, strict=True)]
    if top_p < 1:
        _, total = restated_fold(weights)
        mass = 0.0
        for weight in sorted(weights, reverse=True):
            mass += weight
            if mass >= top_p * total:
                break
        weights = [w if w >= weight else 0.0 for w in weights]
    sums, total = restated_fold(weights)
    return next(i for i, s in enumerate(sums) if s > u * total)
