"""A recorded step: it replays what the operations say, tells its marks, and refuses what it cannot replay."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.errors import ConfigError
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from engine.kvcache.storage import allocate_pool
from engine.runner.forward_batch import BatchItem, ForwardBatch, build_batch
from engine.runner.model_runner import ModelRunner
from kernels import ops, reference
from kernels.cpu.backend import HostBackend
from kernels.cpu.host_program import OWN_ROWS, joined_rows
from kernels.cpu.lowering import LEAST_JOINED, MOST_JOINED
from kernels.cpu.team import variants
from kernels.gguf_formats import FORMAT_BY_NAME
from kernels.step import StepMetadata
from kernels.weights import DenseWeight
from tests.support.random_weights import random_blocks
from tests.support.tiny_model import tiny_model


@pytest.fixture
def backend() -> HostBackend:
    own = HostBackend(2)
    ops.use_backend(own)
    return own


def tiny_runner() -> ModelRunner:
    """The tiny model on the backend in use. Its weights are dense and packed here."""
    model = tiny_model()
    config = model.config
    slot = SlotFormat.of("float32", config.head_dim)
    group = KVGroup(
        GroupKind.FULL_ATTENTION, tuple(range(config.num_layers)), config.num_kv_heads, slot
    )
    layout = KVLayout(16, (group,))
    return ModelRunner(model, layout, allocate_pool(layout, 64))


def one_prompt(length: int) -> ForwardBatch:
    ids = [(7 * i) % 97 for i in range(length)]
    return build_batch([BatchItem(ids, 0, list(range(1, 40)), True)], 16)


def test_a_tiny_model_gives_the_references_logits(backend: HostBackend) -> None:
    native = tiny_runner().forward(one_prompt(40)).clone()
    ops.use_backend(reference)
    torch.testing.assert_close(native, tiny_runner().forward(one_prompt(40)), rtol=1e-4, atol=1e-4)


def test_memory_grows_with_the_step_and_results_stay(backend: HostBackend) -> None:
    runner = tiny_runner()
    short = runner.forward(one_prompt(5)).clone()
    runner.forward(one_prompt(300))
    assert torch.equal(runner.forward(one_prompt(5)), short)


@pytest.mark.parametrize("variant", [variants()[0], "plain"])
def test_joined_operations_give_what_one_thread_gives(variant: str) -> None:
    """Again and again, since chance decides which thread takes which rows."""
    ops.use_backend(HostBackend(1, variant))
    alone = tiny_runner()
    ops.use_backend(HostBackend(3, variant))
    together = tiny_runner()
    for length in (127, 128, 129, 144, 145, 175, 300, 600):
        batch = replace(one_prompt(length), logits_rows=torch.arange(length))
        expected = alone.forward(batch)
        for _ in range(10):
            assert torch.equal(together.forward(batch), expected), length


@pytest.mark.parametrize("length", [129, 143, 144, 300])
def test_joined_quantised_products_give_what_chunks_give(length: int) -> None:
    """Rows that each thread keeps for itself, quantised rows of two widths among them."""
    norm, table = torch.ones(64), DenseWeight(torch.randn(97, 64))
    up, down = (random_blocks(FORMAT_BY_NAME["Q4_1"], *shape) for shape in ((192, 2), (64, 3)))
    coarse = random_blocks(FORMAT_BY_NAME["Q8_0"], 32, 2)

    def step(ids: Tensor, positions: Tensor, metadata: StepMetadata, wanted: Tensor) -> Tensor:
        residual = ops.embedding(ids, table)
        gated = ops.silu_mul(ops.linear(ops.rms_norm(residual, norm, 1e-5), up))
        normed, _ = ops.add_rms_norm(ops.linear(gated, down), residual, norm, 1e-5)
        return ops.take_rows(ops.linear(normed, coarse), wanted)

    def run(num_threads: int, size: int) -> Tensor:
        ops.use_backend(HostBackend(num_threads))
        program, parts = ops.compile_step(step), []
        for ids in ((7 * torch.arange(length)) % 97).split(size):
            rows = torch.arange(len(ids))
            nothing = StepMetadata(rows, torch.zeros(1, 1, dtype=torch.int32), (0, len(ids)), ())
            parts.append(program.run(ids, rows, nothing, rows).clone())
        return torch.cat(parts)

    expected = run(1, 100)
    for num_threads in (1, 2, 3):
        for _ in range(5):
            assert torch.equal(run(num_threads, length), expected), num_threads


@given(st.integers(0, 3000), st.integers(1, 64), st.integers(LEAST_JOINED, MOST_JOINED))
def test_rows_taken_together_fit_a_threads_memory(
    num_tokens: int, num_threads: int, most_joined: int
) -> None:
    size = joined_rows(num_tokens, num_threads, most_joined)
    assert (size == 0) == (num_tokens <= OWN_ROWS)
    if size:
        tiles = (num_tokens + size - 16) // size  # as team.cpp cuts them
        last = num_tokens - (tiles - 1) * size
        assert size <= most_joined
        assert 16 <= last <= OWN_ROWS


def test_programs_of_large_products_are_not_joined(backend: HostBackend) -> None:
    wide = backend.pack(DenseWeight(torch.zeros(4096, 4096)))
    norm = torch.ones(4096)
    table = backend.pack(DenseWeight(torch.ones(8, 4096)))

    def step(ids: Tensor, positions: Tensor, metadata: StepMetadata, wanted: Tensor) -> Tensor:
        rows = ops.linear(ops.rms_norm(ops.embedding(ids, table), norm, 1e-5), wide)
        return ops.take_rows(rows, wanted)

    program = ops.compile_step(step)
    assert program._lowered.most_joined == 0  # type: ignore[attr-defined]
    ids, wanted = torch.zeros(300, dtype=torch.int64), torch.tensor([299])
    empty = StepMetadata(ids, torch.zeros(1, 1, dtype=torch.int32), (0, 300), (300,))
    assert program.run(ids, ids, empty, wanted).shape == (1, 4096)


def test_many_wanted_rows(backend: HostBackend) -> None:
    runner = tiny_runner()
    single = runner.forward(one_prompt(5)).clone()
    items = [BatchItem([0, 7, 14, 21, 28], 0, [s + 1], True) for s in range(50)]
    assert torch.equal(runner.forward(build_batch(items, 16)), single.expand(50, -1))


def test_marks_come_in_order_while_the_step_runs_and_all_before_it_returns(
    backend: HostBackend,
) -> None:
    runner = tiny_runner()
    runner.layers_per_range = 1
    heard: list[tuple[int, int]] = []
    threads: set[int] = set()

    def on_layers(first: int, count: int) -> None:
        heard.append((first, count))
        threads.add(threading.get_ident())

    for length in (3, 200, 1):
        heard.clear()
        runner.forward(one_prompt(length), on_layers)
        assert heard == [(0, 1), (1, 1), (2, 1)]
    assert threading.get_ident() not in threads
    heard.clear()
    runner.forward(one_prompt(3))
    assert heard == []


def test_an_error_of_the_listener_reaches_the_caller(backend: HostBackend) -> None:
    def on_layers(first: int, count: int) -> None:
        raise RuntimeError("nobody there")

    runner = tiny_runner()
    with pytest.raises(RuntimeError, match="nobody there"):
        runner.forward(one_prompt(3), on_layers)
    runner.forward(one_prompt(3))  # and the next step runs


def test_a_result_of_plain_torch_is_refused(backend: HostBackend) -> None:
    weight = backend.pack(DenseWeight(torch.eye(8)))
    norm = torch.ones(8)

    def step(ids: Tensor, positions: Tensor, metadata: StepMetadata, wanted: Tensor) -> Tensor:
        rows = ops.embedding(ids, weight)
        return ops.take_rows(ops.rms_norm(rows + 1, norm, 1e-5), wanted)

    with pytest.raises(ConfigError, match="not given by an operation"):
        ops.compile_step(step)
    assert ops._active is backend
