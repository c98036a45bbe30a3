"""A model from a weight source: which tensors it needs, of which shapes, and how they are fused.

Rows of q, k and v become one matrix, as do those of gate and up: one product reads its input once. A missing tensor,
a wrong shape and a tensor that the model has no place for are each refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from core.errors import ModelLoadError
from engine.loading.weight_source import WeightSource
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderWeights, LayerWeights
from kernels import ops
from kernels.weights import BlockWeight, DenseWeight, Weight, stack_rows

T = TypeVar("T", Tensor, DenseWeight | BlockWeight)

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def assemble_weights(
    config: ModelConfig, source: WeightSource, device: torch.device
) -> DecoderWeights:
    """Every tensor of `config`'s model, taken from `source` exactly once, moved to `device` and packed there."""
    taker = _Taker(config, source, device)
    table = taker.matrix("model.embed_tokens", config.vocab_size, config.hidden_size)
    embedding = ops.pack_rows(table)
    layers = tuple(_layer(taker, number) for number in range(config.num_layers))
    final_norm = taker.vector("model.norm.weight", config.hidden_size)
    # A tied head is packed as well, unless what the embedding became serves products too.
    head: Weight = embedding
    if not config.is_tied:
        head = taker.matrix("lm_head", config.vocab_size, config.hidden_size)
    taker.check_all_taken()
    return DecoderWeights(embedding, layers, final_norm, ops.pack(head))


def _layer(taker: _Taker, number: int) -> LayerWeights:
    config, prefix = taker.config, f"model.layers.{number}"
    hidden, inner = config.hidden_size, config.intermediate_size
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = [
        (f"{prefix}.self_attn.q_proj", query_rows),
        (f"{prefix}.self_attn.k_proj", kv_rows),
        (f"{prefix}.self_attn.v_proj", kv_rows),
    ]
    gate_up = [(f"{prefix}.mlp.gate_proj", inner), (f"{prefix}.mlp.up_proj", inner)]
    output, down = (f"{prefix}.self_attn.o_proj", hidden), (f"{prefix}.mlp.down_proj", hidden)

    def head_norm(name: str) -> Tensor | None:
        full = f"{prefix}.self_attn.{name}.weight"
        return taker.vector(full, config.head_dim) if config.has_qk_norm else None

    return LayerWeights(
        attention_norm=taker.vector(f"{prefix}.input_layernorm.weight", hidden),
        qkv=taker.stacked(qkv, hidden),
        qkv_bias=taker.bias(qkv) if config.has_qkv_bias else None,
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=taker.stacked([output], query_rows),
        output_bias=taker.bias([output]) if config.has_output_bias else None,
        feed_forward_norm=taker.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=taker.stacked(gate_up, hidden),
        gate_up_bias=taker.bias(gate_up) if config.has_mlp_bias else None,
        down=taker.stacked([down], inner),
        down_bias=taker.bias([down]) if config.has_mlp_bias else None,
    )


class _Taker:
    """Takes tensors by name and remembers which are left."""

    def __init__(self, config: ModelConfig, source: WeightSource, device: torch.device) -> None:
        self.config, self._source, self._device = config, source, device
        self._left = {name for name in source.names() if not name.endswith(_IGNORED_SUFFIXES)}
        if config.is_tied:
            self._left.discard("lm_head.weight")  # some files repeat the embedding

    def matrix(self, name: str, num_rows: int, num_columns: int) -> DenseWeight | BlockWeight:
        full = f"{name}.weight"
        return self._take(full, self._source.matrix, (num_rows, num_columns))

    def vector(self, name: str, size: int) -> Tensor:
        return self._take(name, self._source.vector, (size,))

    def stacked(self, parts: list[tuple[str, int]], num_columns: int) -> Weight:
        """Matrices (name, rows) over the same inputs, as one."""
        return ops.pack(stack_rows([self.matrix(name, rows, num_columns) for name, rows in parts]))

    def bias(self, parts: list[tuple[str, int]]) -> Tensor:
        return torch.cat([self.vector(f"{name}.bias", rows) for name, rows in parts])

    def check_all_taken(self) -> None:
        if self._left:
            name = min(self._left)
            raise ModelLoadError(
                f"tensor {name} (one of {len(self._left)}) has no place in {self.config.architecture}"
            )

    def _take(self, name: str, read: Callable[[str], T], shape: tuple[int, ...]) -> T:
        if name not in self._left:
            raise ModelLoadError(f"tensor {name} is missing")
        self._left.discard(name)
        value = read(name)
        if tuple(value.shape) != shape:
            raise ModelLoadError(
                f"tensor {name} has shape {list(value.shape)}, the config asks for {list(shape)}"
            )
        return _placed(value, self._device)


def _placed(value: T, device: torch.device) -> T:
    """The same weight on a device; itself where it lies there already."""
    if isinstance(value, DenseWeight):
        return DenseWeight(value.values.to(device))
    if isinstance(value, BlockWeight):
        return replace(value, raw=value.raw.to(device))
    return value.to(device)
