"""A model that cannot be served refuses to start, with one sentence that says what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.oracle import demo_model_path

pytestmark = pytest.mark.timeout(120)  # no cluster starts, so other tests may run beside these

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def missing_shard(folder: Path) -> Path:
    index = {"weight_map": {"model.embed_tokens.weight": "model-00002-of-00002.safetensors"}}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text(_tokenizer())
    return folder


def unknown_architecture(folder: Path) -> Path:
    odd = {**CONFIG, "architectures": ["FancyForCausalLM"], "model_type": "fancy"}
    (folder / "config.json").write_text(json.dumps(odd))
    (folder / "tokenizer.json").write_text(_tokenizer())
    return folder


def truncated_gguf(folder: Path) -> Path:
    path = folder / "half.gguf"
    data = demo_model_path().read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def no_gguf(folder: Path) -> Path:
    path = folder / "text.gguf"
    path.write_bytes(b"not a model at all" * 10)
    return path


def nothing(folder: Path) -> Path:
    return folder / "does-not-exist.gguf"


def _tokenizer() -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    text: str = Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str()
    return text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (missing_shard, ["model-00002-of-00002.safetensors"]),
        (unknown_architecture, ["FancyForCausalLM", "LlamaForCausalLM"]),
        (truncated_gguf, ["half.gguf", "end"]),
        (no_gguf, ["text.gguf", "GGUF"]),
        (nothing, ["does-not-exist.gguf"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_one_sentence_and_no_cluster(
    make: Callable[[Path], Path], words: list[str], tmp_path: Path
) -> None:
    model = make(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", "serve", str(model), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    reason = done.stderr.strip().splitlines()[-1]
    assert all(word in reason for word in words), reason
