"""Tile sizes as data: a row for each card and class of shapes. No code, nothing measured at run time.

Chosen by arithmetic and by what the compiler reports ahead of time (registers, spills, shared memory), without a
card: memory-bound kernels get enough bytes in flight, compute-bound ones the largest tile that spills nothing.
`make gpu-check` measures them where there is a card. The rows named `interpreter` are small: there a tile's cost is
the number of its operations, not their size, but the tests want several tiles a row.
"""

from __future__ import annotations

from typing import NamedTuple


class AttentionTile(NamedTuple):
    """block_rows: query rows times heads of a KV head, at least; block_positions: KV positions a step of the loop."""

    block_rows: int
    block_positions: int
    num_warps: int
    num_stages: int


class ProductTile(NamedTuple):
    """One program's part of a product: rows x outputs.

    block_columns: inputs a step of the loop, 0 where the weight's chunks say. num_slices: parts of the columns that
    one program walks side by side.
    """

    block_rows: int
    block_outputs: int
    block_columns: int
    num_warps: int
    num_stages: int
    num_slices: int = 1


ATTENTION: dict[tuple[str, str, int, int], AttentionTile] = {
    # (card, kind, bytes of a query element, largest head_dim)
    ("interpreter", "prefill", 4, 256): AttentionTile(32, 32, 4, 1),
    ("interpreter", "split", 4, 256): AttentionTile(16, 32, 4, 1),
    ("interpreter", "prefill", 2, 256): AttentionTile(32, 32, 4, 1),
    ("interpreter", "split", 2, 256): AttentionTile(16, 32, 4, 1),
    ("sm_80", "prefill", 2, 64): AttentionTile(128, 64, 8, 3),
    ("sm_80", "prefill", 2, 128): AttentionTile(128, 32, 8, 3),
    ("sm_80", "prefill", 2, 256): AttentionTile(64, 32, 8, 2),
    ("sm_80", "split", 2, 64): AttentionTile(16, 128, 4, 3),
    ("sm_80", "split", 2, 128): AttentionTile(16, 64, 4, 3),
    ("sm_80", "split", 2, 256): AttentionTile(16, 32, 4, 3),
    ("sm_80", "prefill", 4, 64): AttentionTile(32, 32, 4, 2),
    ("sm_80", "prefill", 4, 128): AttentionTile(32, 32, 8, 2),
    ("sm_80", "prefill", 4, 256): AttentionTile(16, 32, 8, 1),
    ("sm_80", "split", 4, 64): AttentionTile(16, 32, 4, 2),
    ("sm_80", "split", 4, 128): AttentionTile(16, 32, 4, 2),
    ("sm_80", "split", 4, 256): AttentionTile(16, 16, 4, 2),
    ("sm_90", "prefill", 2, 64): AttentionTile(128, 64, 4, 3),
    ("sm_90", "prefill", 2, 128): AttentionTile(128, 64, 8, 3),
    ("sm_90", "prefill", 2, 256): AttentionTile(64, 64, 8, 2),
    ("sm_90", "split", 2, 64): AttentionTile(16, 128, 4, 4),
    ("sm_90", "split", 2, 128): AttentionTile(16, 128, 4, 3),
    ("sm_90", "split", 2, 256): AttentionTile(16, 32, 4, 4),
    ("sm_90", "prefill", 4, 64): AttentionTile(32, 32, 4, 2),
    ("sm_90", "prefill", 4, 128): AttentionTile(32, 32, 8, 2),
    ("sm_90", "prefill", 4, 256): AttentionTile(16, 32, 8, 1),
    ("sm_90", "split", 4, 64): AttentionTile(16, 32, 4, 2),
    ("sm_90", "split", 4, 128): AttentionTile(16, 32, 8, 2),
    ("sm_90", "split", 4, 256): AttentionTile(16, 16, 8, 2),
    ("sm_100", "prefill", 2, 64): AttentionTile(128, 64, 8, 3),
    ("sm_100", "prefill", 2, 128): AttentionTile(128, 64, 8, 3),
    ("sm_100", "prefill", 2, 256): AttentionTile(64, 64, 8, 2),
    ("sm_100", "split", 2, 64): AttentionTile(16, 128, 4, 4),
    ("sm_100", "split", 2, 128): AttentionTile(16, 128, 4, 3),
    ("sm_100", "split", 2, 256): AttentionTile(16, 32, 4, 4),
    ("sm_100", "prefill", 4, 64): AttentionTile(32, 32, 4, 2),
    ("sm_100", "prefill", 4, 128): AttentionTile(32, 32, 8, 2),
    ("sm_100", "prefill", 4, 256): AttentionTile(16, 32, 8, 1),
    ("sm_100", "split", 4, 64): AttentionTile(16, 32, 4, 2),
    ("sm_100", "split", 4, 128): AttentionTile(16, 32, 8, 2),
    ("sm_100", "split", 4, 256): AttentionTile(16, 16, 8, 2),
}

FEW_ROWS, SOME_ROWS = 16, 64
"""The most rows of a product of the classes `few` and `some`; more are `many`."""

PRODUCTS: dict[tuple[str, str, int, str], ProductTile] = {
    # (card, kernel, bytes of an input element, class of the number of rows)
    ("interpreter", "dense", 2, "some"): ProductTile(32, 32, 32, 4, 1),
    ("interpreter", "four_bit", 2, "few"): ProductTile(16, 32, 0, 4, 1, 4),
    ("interpreter", "four_bit", 2, "some"): ProductTile(32, 32, 0, 4, 1),
    ("interpreter", "four_bit", 2, "many"): ProductTile(64, 32, 0, 4, 1),
    ("interpreter", "eight_bit", 2, "few"): ProductTile(16, 32, 32, 4, 1, 4),
    ("interpreter", "eight_bit", 2, "some"): ProductTile(32, 32, 32, 4, 1),
    ("interpreter", "eight_bit", 2, "many"): ProductTile(64, 32, 32, 4, 1),
    ("sm_80", "dense", 2, "some"): ProductTile(64, 64, 64, 4, 4),
    ("sm_80", "four_bit", 2, "few"): ProductTile(16, 32, 0, 8, 4, 8),
    ("sm_80", "four_bit", 2, "some"): ProductTile(64, 32, 0, 4, 4),
    ("sm_80", "four_bit", 2, "many"): ProductTile(128, 64, 0, 8, 4),
    ("sm_80", "eight_bit", 2, "few"): ProductTile(16, 32, 32, 8, 4, 8),
    ("sm_80", "eight_bit", 2, "some"): ProductTile(64, 32, 64, 4, 4),
    ("sm_80", "eight_bit", 2, "many"): ProductTile(128, 64, 64, 8, 3),
    ("sm_90", "dense", 2, "some"): ProductTile(64, 64, 128, 4, 4),
    ("sm_90", "four_bit", 2, "few"): ProductTile(16, 32, 0, 8, 4, 8),
    ("sm_90", "four_bit", 2, "some"): ProductTile(64, 32, 0, 4, 4),
    ("sm_90", "four_bit", 2, "many"): ProductTile(128, 64, 0, 8, 4),
    ("sm_90", "eight_bit", 2, "few"): ProductTile(16, 32, 32, 8, 4, 8),
    ("sm_90", "eight_bit", 2, "some"): ProductTile(64, 32, 64, 4, 4),
    ("sm_90", "eight_bit", 2, "many"): ProductTile(128, 64, 64, 8, 4),
    ("sm_100", "dense", 2, "some"): ProductTile(64, 64, 128, 4, 4),
    ("sm_100", "four_bit", 2, "few"): ProductTile(16, 32, 0, 8, 4, 8),
    ("sm_100", "four_bit", 2, "some"): ProductTile(64, 32, 0, 4, 4),
    ("sm_100", "four_bit", 2, "many"): ProductTile(128, 64, 0, 8, 4),
    ("sm_100", "eight_bit", 2, "few"): ProductTile(16, 32, 32, 8, 4, 8),
    ("sm_100", "eight_bit", 2, "some"): ProductTile(64, 32, 64, 4, 4),
    ("sm_100", "eight_bit", 2, "many"): ProductTile(128, 64, 64, 8, 4),
}

FLOAT32_PRODUCT = ProductTile(32, 32, 32, 4, 2)
"""Every product of float32 inputs on every card: done by plain multipliers, kept for checking rather than serving."""
