"""Looks tile sizes up: by the card, and by the class that a shape falls into. The sizes are in `tables`."""

from __future__ import annotations

import torch

from core.errors import ConfigError
from kernels.triton import settings
from kernels.triton.launch import current_card
from kernels.triton.tables import (
    ATTENTION,
    FEW_ROWS,
    FLOAT32_PRODUCT,
    PRODUCTS,
    SOME_ROWS,
    AttentionTile,
    ProductTile,
)

ELEMENTWISE_BLOCK = 1024
"""Elements of one program of a flat pass."""

MOVED_WORDS = 2048
"""Words of a block that one program moves: 16 KiB of the widest."""

VOCABULARY_BLOCK = 4096
"""Logits of one program that looks for the largest."""

LARGEST_HALF = 32
"""Columns of half a chunk of four-bit quants, at most."""

PROGRAMS_A_MULTIPROCESSOR = 2
"""Programs of split attention that a multiprocessor is given, at least, where there is enough to read."""

_ELEMENTS_A_WARP = 512
_MAX_WARPS = 8


def row_warps(num_elements: int) -> int:
    """Warps of a program that holds `num_elements` at once: 16 elements a thread, a power of two of warps."""
    wanted = max(1, num_elements // _ELEMENTS_A_WARP)
    return min(_MAX_WARPS, 1 << (wanted.bit_length() - 1))


def attention_tile(kind: str, dtype: torch.dtype, head_dim: int) -> AttentionTile:
    """The tile of `prefill` or `split` attention for queries of `dtype`."""
    card = current_card().name
    sizes = sorted(
        size
        for name, k, width, size in ATTENTION
        if (name, k, width) == (card, kind, dtype.itemsize)
    )
    fitting = [size for size in sizes if size >= head_dim]
    if not fitting:
        limit = sizes[-1] if sizes else 0
        raise ConfigError(
            f"head_dim: {head_dim} of {dtype} must be at most {limit} for triton attention on {card}"
        )
    return ATTENTION[card, kind, dtype.itemsize, fitting[0]]


def product_tile(kernel: str, dtype: torch.dtype, num_rows: int) -> ProductTile:
    """The tile of a product of `num_rows` rows of `dtype`; one for all numbers where bits may not depend on it.

    `dense` has one always: where bits may depend on the number of rows, the vendor's library does plain products.
    """
    if dtype.itemsize > 2:
        return FLOAT32_PRODUCT
    kind = "few" if num_rows <= FEW_ROWS else "some" if num_rows <= SOME_ROWS else "many"
    if kernel == "dense" or settings.is_batch_invariant():
        kind = "some"
    return PRODUCTS[current_card().name, kernel, dtype.itemsize, kind]
