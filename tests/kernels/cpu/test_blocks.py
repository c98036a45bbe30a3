"""Whole blocks on the host: the reference's bytes on every variant, and not one byte beside them."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.kv_layout import KV_DTYPES
from engine.kvcache.storage import PoolStorage
from kernels import reference
from kernels.cpu.backend import HostBackend
from kernels.reference import kv_formats
from tests.support.host_kernels import backends, examples, on_every_variant
from tests.support.paged_steps import LAYER, Case, make_pool
from tests.support.poison import POISON_BYTE, poisoned_memory

LARGE = 3 * 32_768 + 5  # bytes: more than one tile, the last one not whole


def random_pool(num_blocks: int, block_bytes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, generator=generator)


pools = st.builds(
    random_pool, st.integers(2, 9), st.sampled_from([1, 7, 64, 300, LARGE]), st.integers(0, 999)
)


@examples(40)
@given(pool=pools, seed=st.integers(0, 999))
def test_copies_follow_each_other(pool: Tensor, seed: int) -> None:
    """A destination may be the source of a later pair, and a pair may name one block twice."""
    chooser = random.Random(seed)
    pairs = [(chooser.randrange(len(pool)), chooser.randrange(len(pool))) for _ in range(seed % 7)]

    def run(backend: HostBackend) -> Tensor:
        own = pool.clone()
        backend.copy_blocks(own, pairs)
        return own

    expected = pool.clone()
    reference.copy_blocks(expected, pairs)
    assert torch.equal(on_every_variant(run), expected)


@examples(40)
@given(pool=pools, seed=st.integers(0, 999))
def test_gather_and_scatter(pool: Tensor, seed: int) -> None:
    chooser = random.Random(seed)
    taken = chooser.choices(range(len(pool)), k=seed % 9)
    before = pool.clone()
    with poisoned_memory():
        staging = on_every_variant(lambda backend: backend.gather_blocks(pool, taken))
    assert torch.equal(staging, reference.gather_blocks(pool, taken))
    assert torch.equal(pool, before)
    given_blocks = chooser.sample(range(len(pool)), min(len(taken), len(pool)))
    rows = staging[: len(given_blocks)]

    def run(backend: HostBackend) -> Tensor:
        own = pool.clone()
        backend.scatter_blocks(rows, own, given_blocks)
        return own

    expected = pool.clone()
    reference.scatter_blocks(rows, expected, given_blocks)
    assert torch.equal(on_every_variant(run), expected)


def test_blocks_may_lie_apart() -> None:
    wide = random_pool(4, 100, 0)
    pool, beside = wide[:, 20:70], wide[:, 70:].clone()
    expected = pool[[1, 3]].clone()
    gathered = backends()[0].gather_blocks(pool, [1, 3])
    assert torch.equal(gathered, expected)
    backends()[0].scatter_blocks(gathered, pool, [2, 0])
    assert torch.equal(pool[[2, 0]], expected)
    assert torch.equal(wide[:, 70:], beside)


def test_a_block_beyond_the_pool_is_our_mistake() -> None:
    backend, pool = backends()[0], random_pool(3, 8, 0)
    for call in (
        lambda: backend.copy_blocks(pool, [(0, 3)]),
        lambda: backend.gather_blocks(pool, [-1]),
        lambda: backend.scatter_blocks(pool[:1], pool, [3]),
    ):
        with pytest.raises(AssertionError, match="blocks of the pool"):
            call()


# ---------------------------------------------------------------- conversion


def filled_pool(case: Case, seed: int) -> PoolStorage:
    """Four blocks of numbers of very different sizes, beyond what fp8 holds too, and heads of zeros."""
    storage = make_pool(case, 4)
    layer = storage.layer_views(0)[LAYER]
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(layer.values.shape, generator=generator)
    sizes = torch.randint(-8, 8, (*numbers.shape[:-1], 1), generator=generator)
    numbers = torch.ldexp(numbers, sizes)
    numbers[torch.rand(numbers.shape, generator=generator) < 0.05] *= 1000
    numbers[torch.rand(numbers.shape[:-1], generator=generator) < 0.1] = 0
    numbers.clamp_(-6e4, 6e4)
    values, scales = kv_formats.quantize(numbers, layer)
    layer.values.copy_(values)
    if layer.scales is not None and scales is not None:
        layer.scales.copy_(scales)
    return storage


@pytest.mark.parametrize(("source", "destination"), [*product(KV_DTYPES, KV_DTYPES)])
def test_conversion_gives_the_references_bytes(source: str, destination: str) -> None:
    for head_dim, block_size in ((8, 16), (48, 5), (64, 16)):
        shape = {"num_kv_heads": 3, "block_size": block_size, "head_dim": head_dim}
        layer = filled_pool(Case((), kv_dtype=source, **shape), head_dim).layer_views(0)[LAYER]
        target = Case((), kv_dtype=destination, **shape)

        def convert(operations: object, layer: object = layer, target: Case = target) -> Tensor:
            storage = make_pool(target, 7)
            given_layer = storage.layer_views(0)[LAYER]
            operations.convert_kv(layer, [2, 1, 2], given_layer, [5, 3, 6])  # type: ignore[attr-defined]
            return storage.tensor.clone()

        ours, expected = on_every_variant(convert), convert(reference)
        assert torch.equal(ours, expected)
        assert bool((ours[[0, 1, 2, 4]] == POISON_BYTE).all())


@pytest.mark.parametrize("destination", KV_DTYPES)
def test_what_is_no_number_stays_none_and_touches_no_other_head(destination: str) -> None:
    source = make_pool(Case((), 2, head_dim=16), 2).layer_views(0)[LAYER]
    source.values.fill_(1.0)
    source.values[1, 1, 0, 3, 5] = math.nan
    target = Case((), 2, head_dim=16, kv_dtype=destination)
    for backend in backends():
        layer = make_pool(target, 2).layer_views(0)[LAYER]
        backend.convert_kv(source, [1], layer, [1])
        held = kv_formats.dequantize(layer.values[1], None, torch.float32)
        if layer.scales is not None:
            held = held * layer.scales[1].unsqueeze(-1)
        broken = held[1, 0, 3].clone()
        assert bool(broken[5].isnan()) if layer.scales is None else bool(broken.isnan().all())
        held[1, 0, 3] = 1.0
        torch.testing.assert_close(held, torch.ones_like(held))


def test_conversion_between_different_shapes_is_our_mistake() -> None:
    first = make_pool(Case((), 2), 2).layer_views(0)[LAYER]
    second = make_pool(Case((), 3), 2).layer_views(0)[LAYER]
    with pytest.raises(AssertionError, match="one shape"):
        backends()[0].convert_kv(first, [1], second, [1])
