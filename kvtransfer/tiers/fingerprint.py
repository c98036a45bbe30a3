"""What the bytes of a tier that outlives its process belong to, in 16 bytes."""

from __future__ import annotations

import xxhash

from core.block_hash import HashRoot
from core.canonical import pack_fields
from core.kv_layout import KVLayout

FINGERPRINT_BYTES = 16


def fingerprint(root: HashRoot, layout: KVLayout, rank: int = 0) -> bytes:
    """Equal exactly where blocks of equal hash have equal bytes: same KV, held the same way, of the same rank.

    The root covers model, adapter, recipe and lossy settings; the layout says how one of its ranks holds them.
    """
    fields: list[str | int | bytes] = [
        root.algorithm.value, root.block_size, root.seed,
        layout.block_size, layout.order, layout.tensor_ranks, layout.pipeline_ranks, rank,
    ]  # fmt: skip
    for group in layout.groups:
        window = -1 if group.window is None else group.window
        fields += [group.kind.value, group.num_kv_heads, window, pack_fields(group.layers)]
        fields += [group.slot.name, group.slot.dtype, group.slot.head_dim]
    return xxhash.xxh3_128_digest(pack_fields(fields))
