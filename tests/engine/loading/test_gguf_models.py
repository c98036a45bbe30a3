"""GGUF files of every architecture give the logits of the transformers model they were written from."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.errors import ModelLoadError
from engine.loading.load import LoadedModel, load_model
from engine.loading.sources import resolve_source
from tests.support.tiny_gguf import VOCAB_SIZE, write_gguf
from tests.support.tiny_models import PagedRun, reference_logits, tiny_model

# Row lengths of whole blocks of 32, so that quantised formats fit.
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 96, "intermediate_size": 128, "head_dim": 16}


def load(path: Path, weight_mode: str = "expanded") -> LoadedModel:
    return load_model(resolve_source(str(path)), "float32", weight_mode)


def prompt(num_tokens: int) -> list[int]:
    return random.Random(1).choices(range(4, VOCAB_SIZE), k=num_tokens)


@pytest.mark.parametrize(
    ("architecture", "kind", "changes"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("llama", "mistral", {"sliding_window": None, "num_key_value_heads": 6}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {"head_dim": 32}),
    ],
)
def test_logits_equal_transformers(
    architecture: str, kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(kind, **{**SIZES, **changes})
    loaded = load(write_gguf(model, tmp_path / "m.gguf", architecture))
    ids = prompt(60)
    logits = PagedRun(loaded).chunked(0, ids, 25)[0]
    torch.testing.assert_close(logits, reference_logits(model, ids)[-1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_expanded_and_quantised_weights_agree(quantization: str, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama", **SIZES), tmp_path / "m.gguf", quantization=quantization)
    expanded, kept = load(path), load(path, "quantized")
    assert (expanded.weight_format, kept.weight_format) == ("float32", "gguf")
    assert expanded.model_digest == kept.model_digest
    ids = prompt(40)
    first = PagedRun(expanded).chunked(0, ids, 40)
    torch.testing.assert_close(first, PagedRun(kept).chunked(0, ids, 40), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        ({"rope_type": "linear", "factor": 2.0}, {"{arch}.rope.scaling.type": "linear"}),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
            {
                "{arch}.rope.scaling.type": "yarn",
                "{arch}.rope.scaling.original_context_length": 64,
            },
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.5 * (0.1 * math.log(2.0) + 1.0),
                "beta_fast": 8.0,
                "beta_slow": 2.0,
            },
            {
                "{arch}.rope.scaling.type": "yarn",
                "{arch}.rope.scaling.original_context_length": 64,
                "{arch}.rope.scaling.attn_factor": 1.5,
                "{arch}.rope.scaling.yarn_beta_fast": 8.0,
                "{arch}.rope.scaling.yarn_beta_slow": 2.0,
            },
        ),
    ],
)
def test_rope_scaling_from_metadata(
    rope: dict[str, Any], metadata: dict[str, Any], tmp_path: Path
) -> None:
    parameters = {"rope_theta": 10000.0, **rope}
    model = tiny_model("llama", **SIZES, max_position_embeddings=128, rope_parameters=parameters)
    metadata = {**metadata, "{arch}.rope.scaling.factor": 2.0}
    loaded = load(write_gguf(model, tmp_path / "m.gguf", metadata=metadata))
    ids = prompt(120)
    logits = PagedRun(loaded).chunked(0, ids, 50)[0]
    torch.testing.assert_close(logits, reference_logits(model, ids)[-1], atol=2e-4, rtol=1e-4)


@pytest.mark.public_case("B46")
def test_rope_factors_as_a_tensor(tmp_path: Path) -> None:
    """How llama3 scaling reaches GGUF: frequencies are divided by the factors of one extra tensor."""
    rope = {
        "rope_theta": 10000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = tiny_model("llama", **SIZES, rope_parameters=rope)
    base = 1.0 / 10000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    factors = (base / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 7
    path = write_gguf(model, tmp_path / "m.gguf", extra_tensors={"rope_freqs.weight": factors})
    ids = prompt(128)
    logits = PagedRun(load(path)).chunked(0, ids, 50)[0]
    torch.testing.assert_close(logits, reference_logits(model, ids)[-1], atol=2e-4, rtol=1e-4)


def test_rows_left_in_file_order_would_answer_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the tests above: the order of q and k rows matters to these models."""
    model = tiny_model("llama", **SIZES)
    path = write_gguf(model, tmp_path / "m.gguf")
    monkeypatch.setattr("engine.loading.load.GGUF_INTERLEAVED_ROPE", frozenset())
    ids = prompt(60)
    logits = PagedRun(load(path)).chunked(0, ids, 60)[0]
    assert float((logits - reference_logits(model, ids)[-1]).abs().max()) > 0.05


def test_windows_from_metadata(tmp_path: Path) -> None:
    model = tiny_model("mistral", **SIZES, sliding_window=20)
    metadata = {"{arch}.attention.sliding_window": 20}
    loaded = load(write_gguf(model, tmp_path / "m.gguf", metadata=metadata))
    assert loaded.config.common_window == 20
    ids = prompt(60)
    logits = PagedRun(loaded).chunked(0, ids, 25)[0]
    torch.testing.assert_close(logits, reference_logits(model, ids)[-1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"{arch}.block_count": None}, "metadata lacks llama.block_count"),
        ({"{arch}.block_count": "three"}, "llama.block_count must be a whole number, got 'three'"),
        ({"{arch}.block_count": 4}, "tensor model.layers.3.input_layernorm.weight is missing"),
        ({"{arch}.block_count": 2}, "model.layers.2."),
        ({"{arch}.embedding_length": 64}, "shape"),
        (
            {"{arch}.rope.scaling.type": "spiral"},
            "rope scaling: 'spiral' is unknown; known: default",
        ),
        (
            {"{arch}.rope.dimension_count": 8},
            "llama.rope.dimension_count: 8 differs from the head size",
        ),
        ({"split.count": 3}, "one of 3 parts of a split model"),
        ({"{arch}.expert_count": 8}, "mixture-of-experts"),
        ({"tokenizer.ggml.tokens": None}, "the file has no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is unknown; known: gpt2, llama"),
        ({"tokenizer.ggml.pre": "mystery"}, "tokenizer.ggml.pre: 'mystery' is unknown; known: "),
        ({"tokenizer.ggml.eos_token_id": 9999}, "9999 is not in a vocabulary of"),
        ({"tokenizer.ggml.merges": ["h x"]}, "'h x' is not a merge of tokens"),
    ],
)
def test_unusable_metadata_is_refused_in_one_sentence(
    metadata: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write_gguf(tiny_model("llama", **SIZES), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    assert sentence in caught.value.message
    assert caught.value.message.startswith(str(path))
    assert "\n" not in caught.value.message


def test_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama", **SIZES), tmp_path / "m.gguf", "mamba")
    with pytest.raises(ModelLoadError, match=r"'mamba' is unknown; known: llama, mistral, qwen2"):
        load(path)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, dtype=np.float32)}
    path = write_gguf(tiny_model("llama", **SIZES), tmp_path / "m.gguf", extra_tensors=extra)
    with pytest.raises(ModelLoadError, match=r"blk.0.attn_sinks.weight belongs to no known part"):
        load(path)
