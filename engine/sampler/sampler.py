"""Chooses tokens for a batch of rows; see `kernels.reference.sampling` for the rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sampler.rows import SampledToken, SampleRow


class Sampler:
    """Stateless: what it answers depends on the rows alone, never on their company or on earlier steps."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """One token a row. logits: [num_rows, vocab_size] float32, not changed."""
        raise NotImplementedError
