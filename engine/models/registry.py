"""Which architectures can be served: one row each."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a model's files leave unsaid about one architecture.

    name: the name in config.json's `architectures`.
    has_qkv_bias: whether q, k and v always carry a bias; False leaves it to the config.
    has_qk_norm: whether queries and keys are normalised a head.
    windows_every_layer: whether a configured sliding window holds for all layers (else by layer type).
    """

    name: str
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    windows_every_layer: bool = False


ARCHITECTURES = (
    Architecture("LlamaForCausalLM"),
    Architecture("MistralForCausalLM", windows_every_layer=True),
    Architecture("Qwen2ForCausalLM", has_qkv_bias=True),
    Architecture("Qwen3ForCausalLM", has_qk_norm=True),
)

_BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`general.architecture` of a GGUF file -> architecture."""

GGUF_INTERLEAVED_ROPE = frozenset({"llama", "mistral"})
"""GGUF architectures whose q and k rows are stored so that neighbours rotate together."""


def find_architecture(names: list[str]) -> Architecture:
    """The first of `names` that can be served."""
    for name in names:
        if name in _BY_NAME:
            return _BY_NAME[name]
    known = ", ".join(sorted(_BY_NAME))
    asked = ", ".join(repr(name) for name in names) or "no architecture"
    raise ModelLoadError(f"architecture: {asked} is unknown; known: {known}")


def find_gguf_architecture(name: str) -> Architecture:
    """The architecture that a GGUF file's `general.architecture` names."""
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise ModelLoadError(f"general.architecture: {name!r} is unknown; known: {known}")
    return _BY_NAME[GGUF_ARCHITECTURES[name]]
