"""Which ids top-k and top-p keep: torch's own sorts on the card, for all rows that ask at once.

See `kernels.reference.sampling` for the rule: all that equal the last one kept stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def least_logits(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """The least logit that each row keeps, float32 `[rows]`: the k-th largest, or -inf where top_k keeps all."""
    vocab_size, device = logits.shape[1], logits.device
    least = torch.full((len(logits),), float("-inf"), dtype=logits.dtype, device=device)
    asking = [row for row, k in enumerate(top_k) if 0 < k < vocab_size]
    if not asking:
        return least
    rows = torch.tensor(asking, device=device)
    last = torch.tensor([[top_k[row] - 1] for row in asking], device=device)  # [asking, 1]
    largest_first = logits[rows].topk(int(max(top_k[row] for row in asking)), dim=1).values
    least[rows] = largest_first.gather(1, last)[:, 0]
    return least


def drop_above_top_p(weights: Tensor, top_p: Sequence[float]) -> None:
    """Set to 0, in place, weights `[rows, blocks, FOLD_BLOCK]` below the last one that reaches top_p of the sum."""
    asking = [row for row, p in enumerate(top_p) if p < 1]
    if not asking:
        return
    rows = torch.tensor(asking, device=weights.device)
    share = torch.tensor(
        [[top_p[row]] for row in asking], dtype=torch.float64, device=weights.device
    )
    flat = weights.flatten(1)  # [rows, ids]
    asked = flat[rows]
    # The sum in the order of the rule: inside blocks, then over blocks.
    total = weights[rows].cumsum(dim=2)[:, :, -1].cumsum(dim=1)[:, -1:]  # [asking, 1]
    largest_first = asked.sort(dim=1, descending=True).values
    is_short = largest_first.cumsum(dim=1) < share * total
    last = is_short.sum(dim=1, keepdim=True).clamp_(max=asked.shape[1] - 1)
    flat[rows] = asked.masked_fill_(asked < largest_first.gather(1, last), 0.0)
