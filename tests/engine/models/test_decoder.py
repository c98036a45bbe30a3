"""Every architecture against transformers: logits through the paged pool, in ragged chunks, for tiny random models."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading.load import LoadedModel, load_model
from engine.loading.sources import resolve_source
from tests.support.tiny_models import (
    PagedRun,
    forced_greedy,
    greedy,
    reference_logits,
    save_folder,
    tiny_model,
)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-own-head-dim": ("llama", {"head_dim": 24}),
    "llama-every-head-its-own-kv": ("llama", {"num_key_value_heads": 6}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-mixed-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "head_dim": 32}),
}


def load(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(resolve_source(str(folder)), dtype, "expanded")


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=num_tokens)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_over_ragged_steps(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    model = tiny_model(kind, **changes)
    run = PagedRun(load(save_folder(model, tmp_path)))
    tokens = [prompt(90, seed=1), prompt(40, seed=2), prompt(70, seed=3)]
    expected = [reference_logits(model, ids) for ids in tokens]
    # (sequence, first, end): chunks of any size and single rows share steps
    steps = [
        [(0, 0, 33), (1, 0, 1)],
        [(1, 1, 2), (0, 33, 34), (2, 0, 17)],
        [(2, 17, 18), (0, 34, 80), (1, 2, 39)],
        [(0, 80, 81), (1, 39, 40), (2, 18, 19)],
        [(0, 81, 90), (2, 19, 70)],
    ]
    for step in steps:
        logits = run.step([(s, tokens[s][first:end]) for s, first, end in step])
        wanted = torch.stack([expected[s][end - 1] for s, _, end in step])
        torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
            "truncate": False,
            "beta_fast": 16,
            "beta_slow": 2,
        },
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + 0.25 * i for i in range(8)],
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: f"{rope['rope_type']}-{len(rope)}",
)
def test_rope_scaling_equals_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(
        "llama", max_position_embeddings=160, rope_parameters={"rope_theta": 10000.0, **rope}
    )
    loaded = load(save_folder(model, tmp_path))
    tokens = prompt(150)
    expected = reference_logits(model, tokens)
    for length in (11, 63, 64, 65, 128, 150):
        logits = PagedRun(loaded).chunked(0, tokens[:length], 48)[0]
        # longrope's choice of factors depends on a prompt's length in transformers, never here
        wanted = (
            expected
            if rope["rope_type"] == "longrope"
            else reference_logits(model, tokens[:length])
        )
        torch.testing.assert_close(logits, wanted[length - 1], atol=2e-4, rtol=1e-4)


def test_rope_kinds_differ_from_each_other(tmp_path: Path) -> None:
    """Guards the test above against a model whose logits do not feel positions."""
    tokens = prompt(120)
    plain = reference_logits(tiny_model("llama"), tokens)[-1]
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    scaled = reference_logits(tiny_model("llama", rope_parameters=rope), tokens)[-1]
    assert float((plain - scaled).abs().max()) > 0.05


@pytest.mark.parametrize("length", [30, 31, 32, 33, 34, 64, 97])
@pytest.mark.parametrize("chunk", [8, 32, 200])
def test_sliding_window_edges_give_transformers_tokens(
    length: int, chunk: int, window_model: tuple[Any, LoadedModel]
) -> None:
    model, loaded = window_model
    ids = prompt(length, seed=length)
    output = greedy(PagedRun(loaded), 0, ids, 40, chunk)
    assert output == forced_greedy(model, ids, output)


@pytest.fixture(scope="module")
def window_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    model = tiny_model("mistral", sliding_window=32)
    return model, load(save_folder(model, tmp_path_factory.mktemp("window")))


def test_a_window_changes_the_answer(tmp_path: Path) -> None:
    ids = prompt(60)
    windowed = reference_logits(tiny_model("mistral", sliding_window=20), ids)[-1]
    full = reference_logits(tiny_model("mistral", sliding_window=None), ids)[-1]
    assert float((windowed - full).abs().max()) > 0.05


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = save_folder(model, tmp_path)
    ids = prompt(50)
    half = PagedRun(load(folder, "bfloat16")).chunked(0, ids, 20)[0]
    expected = reference_logits(model, ids)[-1]
    assert half.dtype == torch.float32
    assert float((half - expected).abs().max()) < 0.1 * float(expected.abs().max())
