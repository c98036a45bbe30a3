"""The operations of `kernels.ops` for GPUs, in Triton.

Importing this package imports neither triton nor torch: an operation's module is loaded when the operation is first
used. What is missing is then named with the extra that brings it. No module is named like an operation: importing
it would take the operation's place here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from core.errors import ConfigError

_MODULES = {
    "activation": ("gelu_mul", "silu_mul"),
    "adjustments": ("add_bias", "allow_only", "ban", "penalise_frequency", "penalise_repetition"),
    "largest": ("argmax",),
    "attention": ("paged_attention",),
    "blocks": ("copy_blocks", "gather_blocks", "scatter_blocks"),
    "kv_conversion": ("convert_kv",),
    "drawing": ("draw",),
    "logprobs": ("token_logprobs",),
    "merging": ("merge_partials",),
    "norms": ("add_rms_norm", "rms_norm"),
    "philox": ("uniforms",),
    "products": ("embedding", "linear", "pack", "pack_rows"),
    "rotary": ("rope",),
    "rows": ("rope_angles", "take_rows"),
    "settings": ("use_batch_invariance",),
    "kv_writes": ("write_kv",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
OPERATIONS = tuple(sorted(_MODULE_OF))
"""Everything that this package answers to, none of it loaded yet."""


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError(
            "kernel backend: 'triton' needs the package triton; install baton[triton]"
        ) from error
    globals()[name] = value
    return value


def load() -> None:
    """Load every operation and look for the card; ConfigError where this process cannot run them."""
    for name in OPERATIONS:
        __getattr__(name)
    from kernels.triton.launch import current_card

    current_card()
