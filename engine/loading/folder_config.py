"""ModelConfig from a Hugging Face config.json, in the spelling of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError
from engine.loading.folder import read_json
from engine.models.config import ModelConfig
from engine.models.registry import Architecture, find_architecture
from engine.models.rope import RopeConfig, reach


class ConfigReader:
    """Typed look-ups in a JSON object; errors name the file and the key."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self._where, self._values = where, values

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "a boolean")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers, empty when the key is not there."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, (int, float)) for v in value):
            raise self._wrong(key, value, "a list of numbers")
        return tuple(float(v) for v in value)

    def texts(self, key: str) -> list[str]:
        """A list of strings, empty when the key is not there."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self._wrong(key, value, "a list of strings")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them, empty when the key is not there."""
        value = self._values.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) for v in values):
            raise self._wrong(key, value, "a token id or a list of them")
        return tuple(values)

    def section(self, key: str) -> ConfigReader | None:
        """A nested object, None when the key is not there."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return ConfigReader(f"{self._where}: {key}", value)

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self._where}: {key} is missing")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> ModelLoadError:
        return ModelLoadError(f"{self._where}: {key} must be {wanted}, got {value!r}")


def read_folder_config(folder: Path) -> ModelConfig:
    """What config.json says, completed by what its architecture implies."""
    path = folder / "config.json"
    config = ConfigReader(str(path), read_json(path))
    try:
        architecture = find_architecture(config.texts("architectures"))
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error.message}") from None
    _refuse_what_cannot_be_served(config, path)
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
        eos_token_ids=_eos_token_ids(config, folder),
    )


def _refuse_what_cannot_be_served(config: ConfigReader, path: Path) -> None:
    section = config.section("quantization_config")
    if section is not None:
        method = section.text("quant_method", "?")
        raise ModelLoadError(f"{path}: weights quantised by {method!r} cannot be loaded")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"{path}: hidden_act: {activation!r} is unknown; known: silu")
    rotated = config.number("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise ModelLoadError(f"{path}: partial_rotary_factor: {rotated} is not served; only 1.0 is")


def _layer_windows(
    config: ConfigReader, architecture: Architecture, num_layers: int
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


def _read_rope(config: ConfigReader, max_position: int) -> RopeConfig:
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


def _scaling_factor(section: ConfigReader, kind: str, stretch: float) -> float:
    """Named by the config; yarn and longrope fall back on how far the model was stretched."""
    if kind == "default":
        return 1.0
    return section.number("factor", stretch if kind in ("yarn", "longrope") else None)


def _eos_token_ids(config: ConfigReader, folder: Path) -> tuple[int, ...]:
    """generation_config.json decides; config.json where it is silent."""
    path = folder / "generation_config.json"
    if path.is_file():
        ids = ConfigReader(str(path), read_json(path)).token_ids("eos_token_id")
        if ids:
            return ids
    return config.token_ids("eos_token_id")
