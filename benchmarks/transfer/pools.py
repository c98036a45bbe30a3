"""Pools whose blocks are one run each."""

from __future__ import annotations

import gc
import sys

from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat

BLOCK_SIZE = 16
SWITCH_INTERVAL_S = 0.0005
"""As in an engine's process."""

POOL_BYTES = 192 << 20
"""Beyond what any cache holds."""


def layout_of(run_bytes: int) -> KVLayout:
    """A layout with one layer a block, of `run_bytes` bytes."""
    head_dim = run_bytes // (2 * 2 * BLOCK_SIZE)  # K and V, two bytes an element, one head
    slot = SlotFormat.of("float16", head_dim)
    layout = KVLayout(BLOCK_SIZE, (KVGroup(GroupKind.FULL_ATTENTION, (0,), 1, slot),))
    assert layout.block_bytes == run_bytes, "a run is a multiple of 64 bytes"
    return layout


def settle() -> None:
    """Do as a worker does when it has loaded: what is there by now is not looked through for garbage again."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def num_blocks_of(run_bytes: int) -> int:
    """Blocks of a pool, the null block included."""
    return POOL_BYTES // run_bytes + 1
