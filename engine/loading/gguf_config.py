"""ModelConfig from the metadata of a GGUF file."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from core.errors import ModelLoadError
from engine.loading.gguf_file import GgufFile, MetadataValue
from engine.loading.gguf_weights import ROPE_FACTORS
from engine.models.config import ModelConfig
from engine.models.registry import find_gguf_architecture
from engine.models.rope import RopeConfig, reach
from kernels.reference.gguf_blocks import dequantize


class GgufMetadata:
    """Typed look-ups in a file's metadata; `{arch}` in a key stands for the file's architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = "?"
        self.architecture = self.text("general.architecture")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self._get(key, default)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]  # one entry a layer, all equal
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._wrong(key, value, "a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "a boolean")
        return value

    def has(self, key: str) -> bool:
        """Whether the file gives the key."""
        return self._full(key) in self._file.metadata

    def list_of(self, key: str, kind: type) -> list[MetadataValue]:
        """An array whose entries are all of `kind`; empty when the file lacks it."""
        value = self._file.metadata.get(self._full(key), [])
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise self._wrong(key, type(value).__name__, f"an array of {kind.__name__}")
        return value

    def _full(self, key: str) -> str:
        return key.replace("{arch}", self.architecture)

    def _get(self, key: str, default: MetadataValue | None) -> MetadataValue:
        full = self._full(key)
        if full in self._file.metadata:
            return self._file.metadata[full]
        if default is None:
            raise ModelLoadError(f"{self._file.path}: metadata lacks {full}")
        return default

    def _wrong(self, key: str, value: object, wanted: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self._file.path}: metadata {self._full(key)} must be {wanted}, got {value!r}"
        )


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Numbers from metadata; which biases and norms exist, and whether the head is tied, from the tensor table."""
    metadata = GgufMetadata(file)
    architecture = find_gguf_architecture(metadata.architecture)
    num_parts = metadata.integer("split.count", 1)
    if num_parts > 1:
        raise ModelLoadError(f"one of {num_parts} parts of a split model: merge them into one file")
    num_layers = metadata.integer("{arch}.block_count")
    num_heads = metadata.integer("{arch}.attention.head_count")
    hidden_size = metadata.integer("{arch}.embedding_length")
    head_dim = metadata.integer("{arch}.attention.key_length", hidden_size // max(num_heads, 1))
    _refuse_other_head_sizes(metadata, head_dim)
    max_position = metadata.integer("{arch}.context_length")
    rope = _read_rope(metadata, file)
    window = metadata.integer("{arch}.attention.sliding_window", 0)
    return ModelConfig(
        architecture=architecture.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=metadata.integer("{arch}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=metadata.integer("{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(file),
        max_position=reach(rope, max_position),
        norm_epsilon=metadata.number("{arch}.attention.layer_norm_rms_epsilon"),
        rope=replace(rope, original_max_position=rope.original_max_position or max_position),
        is_tied="output.weight" not in file.tensors,
        layer_windows=(window or None,) * num_layers,
        has_qkv_bias="blk.0.attn_q.bias" in file.tensors,
        has_output_bias="blk.0.attn_output.bias" in file.tensors,
        has_mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        has_qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )


def _refuse_other_head_sizes(metadata: GgufMetadata, head_dim: int) -> None:
    for key in ("{arch}.attention.value_length", "{arch}.rope.dimension_count"):
        size = metadata.integer(key, head_dim)
        if size != head_dim:
            name = key.replace("{arch}", metadata.architecture)
            raise ModelLoadError(f"{name}: {size} differs from the head size {head_dim}")
    if metadata.integer("{arch}.expert_count", 0):
        raise ModelLoadError("mixture-of-experts models are not among the known architectures")


def _vocab_size(file: GgufFile) -> int:
    entry = file.tensors.get("token_embd.weight")
    if entry is None:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing")
    return entry.shape[0]


def _read_rope(metadata: GgufMetadata, file: GgufFile) -> RopeConfig:
    kind = metadata.text("{arch}.rope.scaling.type", "none")
    factor = metadata.number("{arch}.rope.scaling.factor", 1.0)
    divisors: tuple[float, ...] = ()
    if ROPE_FACTORS in file.tensors:
        entry = file.tensors[ROPE_FACTORS]
        values = dequantize(file.raw(ROPE_FACTORS), entry.block_format, torch.float32)
        divisors = tuple(values.flatten().tolist())
    return RopeConfig(
        theta=metadata.number("{arch}.rope.freq_base", 10000.0),
        kind="default" if kind == "none" else kind,
        factor=factor,
        original_max_position=metadata.integer("{arch}.rope.scaling.original_context_length", 0),
        attention_factor=_attention_factor(metadata, factor),
        beta_fast=metadata.number("{arch}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.number("{arch}.rope.scaling.yarn_beta_slow", 1.0),
        divisors=divisors,
    )


def _attention_factor(metadata: GgufMetadata, factor: float) -> float | None:
    """GGUF's value multiplies what the scaling itself implies; None when the file names none."""
    key = "{arch}.rope.scaling.attn_factor"
    if not metadata.has(key):
        return None
    implied = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return metadata.number(key) * implied
