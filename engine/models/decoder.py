"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share, over `kernels.ops`.

It knows tensors only: no block ids, ranks, quantisation or scheduling. What differs between the architectures is in
the weights that are present (biases, norms on queries and keys) and in the config (windows, tied head).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.rope import rope_frequencies
from kernels import ops
from kernels.kv_view import KVView
from kernels.step import StepMetadata
from kernels.weights import Weight


class Model(Protocol):
    """What the runner needs of a model."""

    config: ModelConfig
    dtype: torch.dtype

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layer_views: Sequence[KVView],
        metadata: StepMetadata,
    ) -> Tensor:
        """Hidden rows `[T, H]` of `token_ids [T]` at `positions [T]`; writes each layer's KV and marks it."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[R, vocab]` float32 of hidden rows `[R, H]`."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Fused: qkv holds the rows of q, k and v, gate_up those of gate and up. None: the model has none."""

    attention_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Weight
    output_bias: Tensor | None
    feed_forward_norm: Tensor
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model. head is the embedding itself where the two are tied."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Weight


class DecoderModel:
    """Pre-norm decoder: attention with rotary positions, then a gated feed-forward part, both on a residual."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.weights = weights
        frequencies, self._rope_factor = rope_frequencies(
            config.rope, config.head_dim, config.max_position
        )
        self._frequencies = frequencies.to(weights.final_norm.device)  # [head_dim / 2]
        self._scale = config.head_dim**-0.5

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layer_views: Sequence[KVView],
        metadata: StepMetadata,
    ) -> Tensor:
        """See Model.forward."""
        epsilon = self.config.norm_epsilon
        cos, sin = ops.rope_angles(
            positions, self._frequencies, self._rope_factor, self.dtype
        )  # [T, head_dim / 2] each
        residual = ops.embedding(token_ids, self.weights.embedding)  # [T, H]
        normed = ops.rms_norm(residual, self.weights.layers[0].attention_norm, epsilon)
        for number, layer in enumerate(self.weights.layers):
            mixed = self._attention(number, layer, normed, cos, sin, layer_views[number], metadata)
            ops.mark(number)
            normed, residual = ops.add_rms_norm(mixed, residual, layer.feed_forward_norm, epsilon)
            gated = ops.silu_mul(ops.linear(normed, layer.gate_up, layer.gate_up_bias))
            mixed = ops.linear(gated, layer.down, layer.down_bias)
            normed, residual = ops.add_rms_norm(mixed, residual, self._norm_after(number), epsilon)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model.logits."""
        return ops.linear(hidden, self.weights.head).float()  # itself, where it is float32 already

    def _norm_after(self, number: int) -> Tensor:
        """The norm that follows layer `number`: the next layer's, or the final one."""
        layers = self.weights.layers
        return (
            layers[number + 1].attention_norm
            if number + 1 < len(layers)
            else self.weights.final_norm
        )

    def _attention(
        self,
        number: int,
        layer: LayerWeights,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer_view: KVView,
        metadata: StepMetadata,
    ) -> Tensor:
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = ops.linear(normed, layer.qkv, layer.qkv_bias)
        qkv = qkv.view(-1, heads + 2 * kv_heads, head_dim)  # [T, Hq + 2 * Hkv, D]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = ops.rms_norm(qkv[:, :heads], layer.query_norm, config.norm_epsilon)
            key = ops.rms_norm(
                qkv[:, heads : heads + kv_heads], layer.key_norm, config.norm_epsilon
            )
            query, key = ops.rope(query, cos, sin), ops.rope(key, cos, sin)
        else:
            rotated = ops.rope(qkv[:, : heads + kv_heads], cos, sin)
            query, key = rotated[:, :heads], rotated[:, heads:]
        ops.write_kv(key, qkv[:, heads + kv_heads :], layer_view, metadata)
        window = config.layer_windows[number]
        mixed = ops.paged_attention(query, layer_view, metadata, self._scale, window)
        return ops.linear(mixed.view(-1, heads * head_dim), layer.output, layer.output_bias)
