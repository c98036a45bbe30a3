"""One layer of a KV pool as kernels see it: strided over the pool's bytes, whatever its elements are.

A view owns no memory and copies none. What stands in a slot is `values` times `scales`; where a format keeps no
scales, the values alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ELEMENT_TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
}
"""Element type of each KV dtype of `core.kv_layout.KV_DTYPES`."""


@dataclass(frozen=True, slots=True, eq=False)
class KVView:
    """K and V of one layer, of every block of a pool.

    values: `[num_blocks, Hkv, 2, block_size, D]` (2: K, V), the last axis contiguous; float32, bfloat16, float16,
        float8_e4m3fn, float8_e5m2 or int8.
    scales: `[num_blocks, Hkv, 2, block_size]` float32, one a token and head; None where every scale is 1.
    """

    values: Tensor
    scales: Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return self.values.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self.values.shape[1]

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.values.shape[3]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.values.shape[4]
