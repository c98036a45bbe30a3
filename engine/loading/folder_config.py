"""ModelConfig from a Hugging Face config.json, in the spelling of transformers 4 and 5."""

from __future__ import annotations

from core.errors import ModelLoadError
from engine.loading.json_reader import JsonReader
from engine.models.config import ModelConfig
from engine.models.registry import Architecture, find_architecture
from engine.models.rope import RopeConfig, reach


def read_folder_config(config: JsonReader) -> ModelConfig:
    """What config.json says, completed by what its architecture implies."""
    architecture = find_architecture(config.texts("architectures"))
    _refuse_what_cannot_be_served(config)
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    num_layers = config.integer("num_hidden_layers")
    max_position = config.integer("max_position_embeddings")
    rope = _read_rope(config, max_position)
    has_attention_bias = config.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=config.integer("head_dim", hidden_size // max(num_heads, 1)),
        vocab_size=config.integer("vocab_size"),
        max_position=reach(rope, max_position),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        is_tied=config.flag("tie_word_embeddings", False),
        layer_windows=_layer_windows(config, architecture, num_layers),
        has_qkv_bias=architecture.has_qkv_bias or has_attention_bias,
        has_output_bias=has_attention_bias and not architecture.has_qkv_bias,
        has_mlp_bias=config.flag("mlp_bias", False),
        has_qk_norm=architecture.has_qk_norm,
    )


def _refuse_what_cannot_be_served(config: JsonReader) -> None:
    section = config.section("quantization_config")
    if section is not None:
        method = section.text("quant_method", "?")
        raise ModelLoadError(f"weights quantised by {method!r} cannot be loaded")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"hidden_act: {activation!r} is unknown; known: silu")
    rotated = config.number("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise ModelLoadError(f"partial_rotary_factor: {rotated} is not served; only 1.0 is")


def _layer_windows(
    config: JsonReader, architecture: Architecture, num_layers: int
) -> tuple[int | None, ...]:
    """A window for each layer: for all, by `layer_types`, or for those past `max_window_layers`."""
    window = config.integer("sliding_window", 0) or None
    if architecture.windows_every_layer:
        return (window,) * num_layers
    if window is None or not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    kinds = config.texts("layer_types")
    if kinds:
        if len(kinds) != num_layers:
            raise ModelLoadError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.integer("max_window_layers", num_layers)
    return tuple(window if number >= first else None for number in range(num_layers))


def _read_rope(config: JsonReader, max_position: int) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (4)."""
    section = config.section("rope_parameters") or config.section("rope_scaling")
    theta = config.number("rope_theta", 10000.0)
    if section is None:
        return RopeConfig(theta=theta)
    kind = section.text("rope_type", section.text("type", "default"))
    original = section.integer("original_max_position_embeddings", max_position)
    original = config.integer("original_max_position_embeddings", original)
    attention = section.number("attention_factor") if section.has("attention_factor") else None
    return RopeConfig(
        theta=section.number("rope_theta", theta),
        kind=kind,
        factor=_scaling_factor(section, kind, max_position / max(original, 1)),
        original_max_position=original,
        low_freq_factor=section.number("low_freq_factor", 1.0),
        high_freq_factor=section.number("high_freq_factor", 4.0),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        mscale=section.number("mscale", 0.0),
        mscale_all_dim=section.number("mscale_all_dim", 0.0),
        attention_factor=attention,
        truncate=section.flag("truncate", True),
        short_factors=section.numbers("short_factor"),
        long_factors=section.numbers("long_factor"),
    )


def _scaling_factor(section: JsonReader, kind: str, stretch: float) -> float:
    """Named by the config; yarn and longrope fall back on how far the model was stretched."""
    defaults = {
        "linear": None,
        "dynamic": None,
        "llama3": None,
        "yarn": stretch,
        "longrope": stretch,
    }
    return section.number("factor", defaults.get(kind, 1.0))
