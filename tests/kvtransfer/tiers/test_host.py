"""The host tier's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import ConfigError
from kvtransfer.pool_memory import PoolMemory, num_blocks_within
from kvtransfer.tiers.host import HostTier
from tests.kvtransfer.tiers.harness import chain, content, held, key, load, make_tier, store


@pytest.mark.parametrize("block_bytes", [1, 7, 4096, 1 << 20])
@pytest.mark.parametrize("num_bytes", [0, 4095, 4096, 4097, 5000, 70_000, 9_000_000])
def test_as_many_blocks_as_fit_with_their_header(num_bytes: int, block_bytes: int) -> None:
    def needed(num_blocks: int) -> int:
        return -(-(64 + 8 * num_blocks) // 4096) * 4096 + num_blocks * block_bytes

    num_blocks = num_blocks_within(num_bytes, block_bytes)
    assert num_blocks == 0 or needed(num_blocks) <= num_bytes
    assert needed(num_blocks + 1) > num_bytes
    if num_blocks:
        memory = PoolMemory(num_blocks, block_bytes)
        assert len(memory.mapping) == needed(num_blocks)
        memory.close()


def test_memory_that_cannot_be_mapped_is_refused_with_its_size() -> None:
    with pytest.raises(ConfigError, match="9000000000000000000 bytes cannot be mapped"):
        HostTier(9_000_000_000_000_000_000, 1 << 40)


@pytest.mark.parametrize("bit", [0, 4_321, 8 * 1000 - 1])
def test_one_flipped_bit_is_a_miss(bit: int, tmp_path: Path) -> None:
    tier = make_tier("host", tmp_path)
    assert isinstance(tier, HostTier)
    plan = store(tier, 1, 2)
    tier.slot_buffer(plan.placements[0].slot)[bit // 8] ^= 1 << bit % 8
    assert load(tier, chain(1, 2)) == [None, content(key(2))]
    assert held(tier, [1, 2]) == [2]
    assert tier.counters.damaged_blocks_total == 1
    assert tier.counters.loaded_blocks_total == 1
    tier.close()
