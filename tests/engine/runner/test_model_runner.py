"""The runner: layer ranges during the forward, wanted logits only, copies, a measured rate that touches no KV."""

import time
from pathlib import Path

import pytest
import torch

from engine.loading.load import LoadedModel, load_model
from engine.loading.sources import resolve_source
from engine.runner.forward_batch import BatchItem, ForwardBatch, build_batch
from kernels.program import progress
from tests.support.tiny_models import PagedRun, save_folder, tiny_model

NUM_LAYERS = 5
PROMPT = list(range(3, 23))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    save_folder(tiny_model("llama", num_hidden_layers=NUM_LAYERS), folder)
    return load_model(resolve_source(str(folder)), "float32", "expanded")


def prompt_batch(wants_logits: bool = True) -> ForwardBatch:
    return build_batch([BatchItem(PROMPT, 0, [4, 2], wants_logits)], block_size=16)


def ranges(run: PagedRun) -> list[tuple[int, int]]:
    heard: list[tuple[int, int]] = []
    run.runner.forward(prompt_batch(), lambda first, count: heard.append((first, count)))
    return heard


@pytest.mark.parametrize(
    ("layers_per_range", "expected"),
    [
        (0, [(0, 2), (2, 2), (4, 1)]),
        (1, [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]),
        (3, [(0, 3), (3, 2)]),
        (5, [(0, 5)]),
        (99, [(0, 5)]),
    ],
)
def test_ranges_cover_every_layer_once_in_order(
    loaded: LoadedModel, layers_per_range: int, expected: list[tuple[int, int]]
) -> None:
    assert ranges(PagedRun(loaded, layers_per_range=layers_per_range)) == expected


def test_a_range_is_in_the_pool_when_it_is_announced_and_later_ones_are_not(
    loaded: LoadedModel,
) -> None:
    run = PagedRun(loaded, layers_per_range=1)
    views = run.storage.layer_views(0)

    def is_written(layer: int) -> bool:
        values = views[layer].values
        first, second = values[4], values[2, :, :, : len(PROMPT) - 16]
        return not bool(first.isnan().any() or second.isnan().any())

    heard: list[list[bool]] = []
    run.runner.forward(
        prompt_batch(),
        lambda first, count: heard.append([is_written(i) for i in range(NUM_LAYERS)]),
    )
    assert heard == [[i <= layer for i in range(NUM_LAYERS)] for layer in range(NUM_LAYERS)]


def test_nobody_hears_marks_after_the_step(loaded: LoadedModel) -> None:
    run = PagedRun(loaded)
    ranges(run)
    assert progress.on_mark is None
    run.runner.forward(prompt_batch())  # a step without a listener runs as well


def test_a_listener_that_fails_leaves_no_listener(loaded: LoadedModel) -> None:
    def fail(first: int, count: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        PagedRun(loaded).runner.forward(prompt_batch(), fail)
    assert progress.on_mark is None


def test_logits_of_wanted_rows_only(loaded: LoadedModel) -> None:
    run = PagedRun(loaded)
    items = [
        BatchItem(PROMPT, 0, [4, 2], wants_logits=False),
        BatchItem([5, 6], 0, [7], wants_logits=True),
    ]
    together = run.runner.forward(build_batch(items, 16))
    alone = PagedRun(loaded).runner.forward(build_batch(items[1:], 16))
    assert together.shape == (1, loaded.config.vocab_size)
    assert together.dtype == torch.float32
    torch.testing.assert_close(together, alone)
    assert run.runner.forward(prompt_batch(wants_logits=False)).shape[0] == 0


def test_copied_blocks_serve_as_the_originals(loaded: LoadedModel) -> None:
    run = PagedRun(loaded)
    run.runner.forward(prompt_batch())

    def next_logits(blocks: list[int]) -> torch.Tensor:
        item = BatchItem([30], len(PROMPT), blocks, wants_logits=True)
        return run.runner.forward(build_batch([item], 16))

    run.runner.copy_blocks([(2, 9)])
    assert torch.equal(next_logits([4, 9]), next_logits([4, 2]))


def test_shared_prefix_blocks_give_the_same_logits(loaded: LoadedModel) -> None:
    """A second sequence over the first one's full block, computing only its own tail."""
    run = PagedRun(loaded)
    whole = run.runner.forward(prompt_batch())
    tail = BatchItem(PROMPT[16:], 16, [4, 11], wants_logits=True)
    torch.testing.assert_close(run.runner.forward(build_batch([tail], 16)), whole)


def test_measuring_the_rate_leaves_the_pool_alone(loaded: LoadedModel) -> None:
    run = PagedRun(loaded)
    run.storage.tensor[0].zero_()  # the null block is never poisoned in a real pool
    before = run.storage.tensor.clone()
    rate = run.runner.measure_prefill_rate(0.1)
    assert rate > 0
    assert torch.equal(run.storage.tensor, before)


def test_the_rate_of_a_model_shorter_than_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder(tiny_model("llama", max_position_embeddings=32), tmp_path)
    run = PagedRun(load_model(resolve_source(str(folder)), "float32", "expanded"))
    seconds = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    assert run.runner.measure_prefill_rate(0.1) == 32.0  # tokens of a step that takes one second


def test_the_rate_is_measured_in_steps_of_the_length_asked_for(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 64 tokens in half a second leads to one of 256 in two."""
    runner = PagedRun(loaded).runner
    sizes: list[int] = []

    def timed(num_tokens: int) -> float:
        sizes.append(num_tokens)
        return num_tokens / 128.0

    monkeypatch.setattr(runner, "_timed_step", timed)
    assert runner.measure_prefill_rate(2.0) == 128.0
    assert sizes == [64, 64, 256, 256, 256]
