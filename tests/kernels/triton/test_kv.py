"""The pool in every format: writes and conversions give the reference's bits, blocks move whole and in order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.kv_layout import KV_DTYPES
from engine.kvcache.storage import PoolStorage
from kernels import reference, triton
from kernels.kv_view import KVView
from kernels.triton.blocks import waves
from tests.support.paged_steps import LAYER, Case, Step, make_pool
from tests.support.triton_device import IS_INTERPRETED, on_device

few = settings(max_examples=10 if IS_INTERPRETED else 100)


def layer_on_device(storage: PoolStorage) -> KVView:
    """The middle layer of a copy of a host pool where the kernels run; the copy takes the pool's place."""
    storage._tensor = on_device(storage.tensor)
    return storage.layer_views(0)[LAYER]


def written_by(backend, case: Case, keys, values) -> torch.Tensor:
    """Every byte of a poisoned pool after a step's rows were written; one row goes nowhere."""
    step = Step(case)
    layer = step.layer if backend is reference else layer_on_device(step.storage)
    step.metadata.slot_mapping[0] = -1
    is_ours = backend is triton
    backend.write_kv(
        on_device(keys) if is_ours else keys,
        on_device(values) if is_ours else values,
        layer,
        step.metadata,
    )
    return step.storage.tensor.cpu()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_writes_give_the_references_bits(kv_dtype: str, dtype: torch.dtype) -> None:
    """Ordinary numbers, and those at the edges of the formats: ties, subnormals, too large ones, zeros."""
    case = Case(((3, 5), (0, 18)), num_kv_heads=3, head_dim=20, kv_dtype=kv_dtype, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(23, 3, 20, generator=generator) for _ in range(2))
    keys[5] *= 1000
    keys[6] *= 2.0**-8
    keys[7] *= 2.0**-16
    keys[8] = 0
    keys[9] = (keys[9] * 8).round() / 16
    values[10] = torch.arange(60).view(3, 20) * 2.0**-10
    keys, values = keys.to(dtype), values.to(dtype)
    if kv_dtype != "float16":
        keys[11, 0, 0] = 60000.0
    ours = written_by(triton, case, keys, values)
    theirs = written_by(reference, case, keys, values)
    assert torch.equal(ours, theirs)


@few
@given(
    st.sampled_from(sorted(KV_DTYPES)), st.integers(1, 5), st.integers(1, 70), st.integers(0, 99)
)
def test_writes_of_any_shape(kv_dtype: str, heads: int, head_dim: int, seed: int) -> None:
    case = Case(((7, 9),), num_kv_heads=heads, head_dim=4 * head_dim, kv_dtype=kv_dtype)
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(9, heads, 4 * head_dim, generator=generator) for _ in range(2))
    wide = torch.stack((keys, values), dim=1)  # strided, as slices of one product are
    assert torch.equal(
        written_by(triton, case, wide[:, 0], wide[:, 1]), written_by(reference, case, keys, values)
    )


@pytest.mark.parametrize("source", KV_DTYPES)
@pytest.mark.parametrize("destination", KV_DTYPES)
def test_conversions_give_the_references_bits(source: str, destination: str) -> None:
    case = Case(((0, 40),), num_kv_heads=2, head_dim=12, kv_dtype=source)
    step = Step(case)
    step.write_step()
    blocks = [int(block) for block in step.tables[0, :2]]
    pools = [
        make_pool(Case(case.sequences, head_dim=12, kv_dtype=destination), step.layer.num_blocks)
        for _ in range(2)
    ]
    reference.convert_kv(step.layer, blocks, pools[0].layer_views(0)[LAYER], [2, 1])
    ours = layer_on_device(pools[1])
    triton.convert_kv(layer_on_device(step.storage), blocks, ours, [2, 1])
    assert torch.equal(pools[1].tensor.cpu(), pools[0].tensor)


# ---------------------------------------------------------------- whole blocks

block_ids = st.integers(0, 7)
pairs = st.lists(st.tuples(block_ids, block_ids), max_size=12)


def pool_of(block_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (8, block_bytes), dtype=torch.uint8, generator=generator)


@few
@given(pairs, st.sampled_from([1, 6, 12, 64, 20_000]))
def test_copies_in_order(copies: list[tuple[int, int]], block_bytes: int) -> None:
    """Also where a copy reads what an earlier one wrote, or writes what an earlier one read."""
    pool = pool_of(block_bytes)
    ours = on_device(pool)
    triton.copy_blocks(ours, copies)
    reference.copy_blocks(pool, copies)
    assert torch.equal(ours.cpu(), pool)


@given(pairs)
def test_waves_depend_on_nothing_inside_them(copies: list[tuple[int, int]]) -> None:
    found = waves(copies)
    assert [pair for wave in found for pair in wave] == copies
    for wave in found:
        written = [destination for _, destination in wave]
        assert len(set(written)) == len(written)
        assert not any(source in written[:place] for place, (source, _) in enumerate(wave))
        assert not any(
            destination in [source for source, _ in wave[:place]]
            for place, (_, destination) in enumerate(wave)
        )


@pytest.mark.parametrize("block_bytes", [3, 8, 100, 40_000])
def test_blocks_gathered_and_scattered(block_bytes: int) -> None:
    pool = pool_of(block_bytes)
    ours = on_device(pool)
    staging = triton.gather_blocks(ours, [5, 0, 5, 7])
    assert torch.equal(staging.cpu(), reference.gather_blocks(pool, [5, 0, 5, 7]))
    triton.scatter_blocks(staging[1:], ours, [1, 2, 3])
    reference.scatter_blocks(staging[1:].cpu(), pool, [1, 2, 3])
    assert torch.equal(ours.cpu(), pool)


def test_no_blocks_are_no_launch() -> None:
    pool = on_device(pool_of(64))
    assert triton.gather_blocks(pool, []).shape == (0, 64)
    triton.copy_blocks(pool, [])
    assert torch.equal(pool.cpu(), pool_of(64))
