"""Tiny random models of every architecture: built by transformers, saved as folders, run through our runner."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from core.kv_layout import KVLayout
from engine.kvcache.storage import PoolStorage, allocate_pool
from engine.loading.load import LoadedModel
from engine.runner.forward_batch import BatchItem, build_batch
from engine.runner.model_runner import ModelRunner
from tests.support.poison import POISON_BYTE

BLOCK_SIZE = 16
_CLASSES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough that attention and positions matter
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_model(kind: str, **changes: Any) -> PreTrainedModel:
    """A random fp32 transformers model, biases and norms included; the same one at each call."""
    config_class, model_class = _CLASSES[kind]
    torch.manual_seed(11)
    model: PreTrainedModel = model_class(config_class(**{**_SIZES, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.normal_(1, 0.2)
    return model


def word_tokenizer_json(vocab_size: int) -> dict[str, Any]:
    """A tokenizer of words `w0 w1 ...`: the smallest valid tokenizer.json."""
    vocabulary = {f"w{token_id}": token_id for token_id in range(vocab_size)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }


def save_folder(model: PreTrainedModel, folder: Path, max_shard_size: str = "1GB") -> Path:
    """A Hugging Face folder with a tokenizer; a small shard size makes several shards."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer = word_tokenizer_json(model.config.vocab_size)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


class PagedRun:
    """Sequences that grow through our runner over one pool, blocks handed out in an order of their own."""

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int = 96,
        layers_per_range: int = 0,
        kv_dtype: str = "float32",
    ) -> None:
        layout = KVLayout(BLOCK_SIZE, loaded.config.kv_groups(kv_dtype))
        self.storage: PoolStorage = allocate_pool(layout, num_blocks)
        self.runner = ModelRunner(loaded.model, layout, self.storage, layers_per_range)
        # Descending and interleaved, so that no sequence's blocks lie in order; unwritten slots hold NaN.
        self._free = list(range(1, num_blocks))
        self.storage.tensor.fill_(POISON_BYTE)
        self._blocks: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, parts: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Run (sequence, next tokens) together; logits `[len(parts), vocab]` after each part's last token."""
        items = [self._item(sequence, token_ids) for sequence, token_ids in parts]
        return self.runner.forward(build_batch(items, BLOCK_SIZE))

    def _item(self, sequence: int, token_ids: Sequence[int]) -> BatchItem:
        start = self._lengths.get(sequence, 0)
        blocks = self._blocks.setdefault(sequence, [])
        self._lengths[sequence] = start + len(token_ids)
        while len(blocks) * BLOCK_SIZE < self._lengths[sequence]:
            blocks.append(self._free.pop())
        return BatchItem(token_ids, start, blocks, wants_logits=True)

    def chunked(self, sequence: int, token_ids: Sequence[int], chunk: int) -> Tensor:
        """Prefill in chunks; logits `[1, vocab]` after the last token."""
        logits = torch.empty(0)
        for first in range(0, len(token_ids), chunk):
            logits = self.step([(sequence, token_ids[first : first + chunk])])
        return logits


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """transformers' logits `[len(token_ids), vocab]`, one forward without a cache."""
    result: Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return result


def forced_greedy(
    model: PreTrainedModel, token_ids: Sequence[int], output_ids: Sequence[int]
) -> list[int]:
    """transformers' greedy choice at each position of `output_ids`, given the tokens before it.

    Equal to `output_ids` exactly when those are the greedy continuation, by induction over positions.
    """
    logits = reference_logits(model, [*token_ids, *output_ids])
    choices = logits[len(token_ids) - 1 : -1].argmax(-1)
    return [int(choice) for choice in choices]


def greedy(
    run: PagedRun, sequence: int, token_ids: Sequence[int], num: int, chunk: int
) -> list[int]:
    """Our greedy continuation after a chunked prefill."""
    output = [int(run.chunked(sequence, token_ids, chunk)[0].argmax())]
    while len(output) < num:
        output.append(int(run.step([(sequence, output[-1:])])[0].argmax()))
    return output
