"""Memory in large pages: zero, where it should begin, shared by weights and by whoever comes in whatever mode."""

from __future__ import annotations

import torch

from kernels.cpu.large_pages import WeightMemory, large_pages

LARGE_PAGE = 2 << 20


def test_it_begins_at_a_large_page_and_is_zero() -> None:
    for num_bytes in (1, 100, LARGE_PAGE, LARGE_PAGE + 1):
        memory = large_pages(num_bytes)
        assert memory.shape == (num_bytes,)
        assert memory.data_ptr() % LARGE_PAGE == 0
        assert not memory.any()


def test_weights_lie_apart_and_aligned_in_as_many_pieces_as_they_need() -> None:
    memory = WeightMemory()
    sizes = (100, 3, 64, 9 << 20, 9 << 20, 40 << 20, 5)
    taken = [memory.take(size) for size in sizes]
    for number, (weight, size) in enumerate(zip(taken, sizes, strict=True), start=1):
        assert weight.shape == (size,)
        assert weight.data_ptr() % 64 == 0
        weight.fill_(number)
    for number, weight in enumerate(taken, start=1):
        assert bool((weight == number).all())


def test_a_piece_begun_in_inference_mode_serves_others() -> None:
    memory = WeightMemory()
    with torch.inference_mode():
        memory.take(10).fill_(1)
    other = memory.take(10)
    other[:] = 2
    assert int(other.sum()) == 20
