"""A decoder with random weights, small enough that a step takes a millisecond."""

from __future__ import annotations

import torch

from engine.models.config import ModelConfig
from engine.models.decoder import DecoderModel, DecoderWeights, LayerWeights
from engine.models.rope import RopeConfig
from kernels.weights import DenseWeight

VOCAB_SIZE = 97


def tiny_config(*, num_layers: int = 3, max_position: int = 512) -> ModelConfig:
    """Grouped-query attention, tied head, no end token."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        max_position=max_position,
        norm_epsilon=1e-5,
        rope=RopeConfig(theta=10000.0),
        is_tied=True,
        layer_windows=(None,) * num_layers,
    )


def tiny_model(seed: int = 0) -> DecoderModel:
    """The same model for the same seed."""
    config = tiny_config()
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> DenseWeight:
        return DenseWeight(torch.randn(rows, columns, generator=generator) / columns**0.5)

    hidden, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
    layers = tuple(
        LayerWeights(
            attention_norm=torch.ones(hidden),
            qkv=weight(heads * config.head_dim, hidden),
            qkv_bias=None,
            query_norm=None,
            key_norm=None,
            output=weight(hidden, config.num_heads * config.head_dim),
            output_bias=None,
            feed_forward_norm=torch.ones(hidden),
            gate_up=weight(2 * config.intermediate_size, hidden),
            gate_up_bias=None,
            down=weight(hidden, config.intermediate_size),
            down_bias=None,
        )
        for _ in range(config.num_layers)
    )
    # An embedding of large rows makes greedy answers differ from token to token instead of repeating one.
    embedding = DenseWeight(torch.randn(config.vocab_size, hidden, generator=generator))
    return DecoderModel(
        config, DecoderWeights(embedding, layers, torch.ones(hidden), embedding), torch.float32
    )
