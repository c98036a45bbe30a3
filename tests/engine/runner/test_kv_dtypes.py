"""A tiny model over pools of every KV dtype: close to the exact model, and not a matter of how a prompt was cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from core.kv_layout import KV_DTYPES
from engine.loading.load import LoadedModel, load_model
from engine.loading.sources import resolve_source
from tests.support.tiny_models import PagedRun, reference_logits, save_folder, tiny_model

PROMPT = [5 + 7 * i % 113 for i in range(70)]

PRICE = {
    "float32": 1e-5,
    "float16": 2e-3,
    "bfloat16": 1.5e-2,
    "int8_per_token_head": 4e-2,
    "fp8_per_token_head": 0.2,
    "fp8_e4m3": 0.25,
    "fp8_e5m2": 0.4,
}
"""Root mean square of the error of logits over that of the logits: what a KV dtype costs this (steep) model."""

every_kv_dtype = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean squares."""
    error = (actual - expected).square().mean().sqrt()
    return float(error / expected.square().mean().sqrt())


@pytest.fixture(scope="module")
def exact() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def loaded(exact: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = save_folder(exact, tmp_path_factory.mktemp("model"))
    return load_model(resolve_source(str(folder)), "float32", "expanded")


@every_kv_dtype
def test_logits_are_close_to_the_exact_model(
    kv_dtype: str, loaded: LoadedModel, exact: PreTrainedModel
) -> None:
    run = PagedRun(loaded, kv_dtype=kv_dtype)
    rows = [run.chunked(0, PROMPT[:40], 40)]
    rows += [run.step([(0, [token])]) for token in PROMPT[40:]]
    expected = reference_logits(exact, PROMPT)[39:]
    assert relative_error(torch.cat(rows), expected) < PRICE[kv_dtype]


@every_kv_dtype
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_of_a_prompt_see_what_the_whole_sees(
    kv_dtype: str, chunk: int, loaded: LoadedModel
) -> None:
    """A row attends to its own chunk through the pool too, so rounding is the same wherever a prompt is cut.

    All that is left is the order of float32 sums, which may tip a number over to the next one that the pool can hold.
    """
    whole = PagedRun(loaded, kv_dtype=kv_dtype).chunked(0, PROMPT, len(PROMPT))
    cut = PagedRun(loaded, kv_dtype=kv_dtype).chunked(0, PROMPT, chunk)
    assert relative_error(cut, whole) < PRICE[kv_dtype] / 4


@every_kv_dtype
def test_measuring_the_rate_leaves_the_pool_alone(kv_dtype: str, loaded: LoadedModel) -> None:
    run = PagedRun(loaded, kv_dtype=kv_dtype)
    run.storage.tensor[0].zero_()  # the null block is never poisoned in a real pool
    before = run.storage.tensor.clone()
    assert run.runner.measure_prefill_rate(0.1) > 0
    assert torch.equal(run.storage.tensor, before)
