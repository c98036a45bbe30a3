"""Where assembled weights come from: tensors by their Hugging Face names, whatever file holds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from kernels.weights import BlockWeight, DenseWeight


class WeightSource(Protocol):
    """Tensors of one model. Names are those of transformers' state dicts."""

    def names(self) -> Iterable[str]:
        """Every tensor the files hold, under the names that `matrix` and `vector` take."""
        ...

    def matrix(self, name: str) -> DenseWeight | BlockWeight:
        """A matrix `[num_rows, num_columns]` in the form it is served in."""
        ...

    def vector(self, name: str) -> Tensor:
        """A vector in the dtype of activations."""
        ...

    def digest(self) -> str:
        """Hex digest of names, types, shapes and content of every tensor; equal for equal content."""
        ...

    def close(self) -> None:
        """Give up the files; tensors handed out stay valid."""
        ...


TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Names of activation types, as `core.kv_layout` spells them."""
