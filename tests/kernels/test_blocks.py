"""Whole blocks of a byte pool: copied, gathered, scattered."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import ops
from tests.support.poison import poisoned_memory


def random_pool(num_blocks: int, block_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, generator=generator)


pools = st.builds(random_pool, st.integers(2, 12), st.integers(1, 300), st.integers(0, 2**31))


def test_copy_blocks_copies_whole_blocks_in_order() -> None:
    pool = torch.arange(5, dtype=torch.uint8)[:, None].repeat(1, 8)
    ops.copy_blocks(pool, [(1, 2), (2, 4)])
    assert pool[:, 0].tolist() == [0, 1, 1, 3, 1]


@given(pool=pools, seed=st.integers(0, 2**31))
def test_gather_takes_blocks_in_the_order_named(pool: torch.Tensor, seed: int) -> None:
    """Also the same block twice, and none."""
    block_ids = random.Random(seed).choices(range(len(pool)), k=seed % 9)
    before = pool.clone()
    with poisoned_memory():
        staging = ops.gather_blocks(pool, block_ids)
    assert staging.shape == (len(block_ids), pool.shape[1])
    assert [row.tolist() for row in staging] == [pool[block].tolist() for block in block_ids]
    staging.fill_(0)
    assert torch.equal(pool, before), "what was gathered is a copy"


@given(pool=pools, seed=st.integers(0, 2**31))
def test_scatter_writes_the_blocks_named_and_no_other(pool: torch.Tensor, seed: int) -> None:
    block_ids = random.Random(seed).sample(range(len(pool)), seed % len(pool))
    staging = random_pool(len(block_ids), pool.shape[1], seed)
    expected = [row.tolist() for row in pool]
    for row, block in zip(staging.tolist(), block_ids, strict=True):
        expected[block] = row
    ops.scatter_blocks(staging, pool, block_ids)
    assert pool.tolist() == expected


@given(pool=pools, seed=st.integers(0, 2**31))
def test_scatter_undoes_gather(pool: torch.Tensor, seed: int) -> None:
    block_ids = random.Random(seed).sample(range(len(pool)), len(pool))
    other = torch.zeros_like(pool)
    ops.scatter_blocks(ops.gather_blocks(pool, block_ids), other, block_ids)
    assert torch.equal(other, pool)
