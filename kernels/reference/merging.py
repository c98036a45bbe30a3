"""Attention over disjoint ranges of positions, put together."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_partials(outputs: Tensor, log_sums: Tensor) -> Tensor:
    """See `kernels.ops.merge_partials`.

    The fold keeps the largest log-sum so far, and both sums relative to it:

        largest' = max(largest, log_sum)
        total'   = total * exp(largest - largest') + exp(log_sum - largest')
        merged'  = merged * exp(largest - largest') + output * exp(log_sum - largest')
    """
    merged = torch.zeros_like(outputs[0])  # [T, Hq, D]
    total = torch.zeros_like(log_sums[0])  # [T, Hq]
    largest = torch.full_like(log_sums[0], float("-inf"))
    for output, log_sum in zip(outputs, log_sums, strict=True):
        higher = torch.maximum(largest, log_sum)
        # Nothing seen yet: the difference of two infinities is no number, any finite one does.
        base = higher.masked_fill(higher == float("-inf"), 0.0)
        kept, added = (largest - base).exp(), (log_sum - base).exp()
        # What a partial that saw nothing holds may be anything.
        seen = output.masked_fill((added == 0).unsqueeze(-1), 0.0)
        merged = merged * kept.unsqueeze(-1) + seen * added.unsqueeze(-1)
        total = total * kept + added
        largest = higher
    return merged / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
