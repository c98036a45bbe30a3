"""The operations of `kernels.ops` for GPUs, in Triton.

Importing this package imports neither triton nor torch: an operation's module is loaded when the operation is first
used. What is missing is then named with the extra that brings it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from core.errors import ConfigError

_MODULES = {
    "activation": ("gelu_mul", "silu_mul"),
    "adjustments": ("add_bias", "allow_only", "ban", "penalise_frequency", "penalise_repetition"),
    "argmax": ("argmax",),
    "attention": ("paged_attention",),
    "blocks": ("copy_blocks", "gather_blocks", "scatter_blocks"),
    "convert_kv": ("convert_kv",),
    "draw": ("draw", "log_normalisers"),
    "logprobs": ("row_logprobs",),
    "merge": ("merge_partials",),
    "norms": ("add_rms_norm", "rms_norm"),
    "philox": ("uniforms",),
    "products": ("embedding", "linear", "pack", "pack_rows"),
    "rope": ("rope",),
    "settings": ("use_batch_invariance",),
    "write_kv": ("write_kv",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


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
