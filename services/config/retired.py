"""Flags of popular guides that Baton does not have: each is answered with what to write instead.

Three kinds: names that were replaced, names of what this version cannot do, and names that need no
setting here (which are accepted with the value that says what is the case anyway).
"""

from __future__ import annotations

from core.errors import ConfigError

_SPECULATION = "this version has no speculative decoding"
_ONE_TOKEN_BUDGET = (
    "any number of prompts may be in progress at once; --max-num-batched-tokens is the only limit"
)
_ONE_RANK = "this version runs a worker on one rank; add workers instead"
_NO_QUANTISATION = (
    "a GGUF file brings its own quantisation; --weight-format says how its weights are held"
)

REPLACED = {
    "speculative-model": "speculative-config",
    "speculative-method": "speculative-config",
    "num-speculative-tokens": "speculative-config",
    "ngram-prompt-lookup-max": "speculative-config",
    "ngram-prompt-lookup-min": "speculative-config",
    "quantization-fp8-dynamic": "quantization",
    "swap-space": "kv-offloading-size",
    "gpu-memory-utilization": "kv-cache-memory-bytes",
    "gpu-memory-utilisation": "kv-cache-memory-bytes",
    "max-seq-len": "max-model-len",
    "max-context-len": "max-model-len",
    "num-blocks": "num-gpu-blocks-override",
}
"""Old name -> the name of today, which may itself be one that this version lacks."""

UNAVAILABLE = {
    "speculative-config": _SPECULATION,
    "spec-method": _SPECULATION,
    "spec-model": _SPECULATION,
    "spec-tokens": _SPECULATION,
    "quantization": _NO_QUANTISATION,
    "kv-transfer-config": "roles are commands here: baton prefill, baton decode, baton mixed",
    "long-prefill-token-threshold": _ONE_TOKEN_BUDGET,
    "tensor-parallel-size": _ONE_RANK,
    "pipeline-parallel-size": _ONE_RANK,
    "data-parallel-size": _ONE_RANK,
    "prefill-context-parallel-size": _ONE_RANK,
    "decode-context-parallel-size": _ONE_RANK,
    "max-num-partial-prefills": _ONE_TOKEN_BUDGET,
    "max-long-partial-prefills": _ONE_TOKEN_BUDGET,
    "preemption-mode": "a preempted sequence is computed again, or read back from a tier where there is one",
    "cpu-offload-gb": "weights stay where the model runs; --kv-offloading-size moves KV",
    "num-scheduler-steps": "a step is planned while the last one runs; there is nothing to set",
    "enable-lora": "this version serves no adapters",
    "no-enable-chunked-prefill": "prompts are always computed in chunks of the token budget",
}
"""Name -> why it is not here, and what to do instead."""

NEEDLESS = {
    "enable-chunked-prefill": {"", "true"},
    "enforce-eager": {"", "true"},
    "use-v2-block-manager": {"", "true"},
    "disable-log-requests": {"", "true"},
    "disable-log-stats": {"", "true"},
    "max-num-partial-prefills": {"1"},
    "max-long-partial-prefills": {"1"},
    "tensor-parallel-size": {"1"},
    "pipeline-parallel-size": {"1"},
    "data-parallel-size": {"1"},
    "preemption-mode": {"recompute"},
}
"""Name -> values that say what is the case anyway; such a setting is dropped."""

SHORT_NAMES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-sc": "--speculative-config",
    "-q": "--quantization",
}


def is_needless(name: str, value: str) -> bool:
    """Whether a setting of this name and value asks for what is the case anyway."""
    return value.lower() in NEEDLESS.get(name, ())


def is_retired(name: str) -> bool:
    """Whether the name belongs to one of the tables."""
    return name in REPLACED or name in UNAVAILABLE or name in NEEDLESS


def refuse(name: str, where: str) -> ConfigError:
    """The answer to a retired name. where: as the user wrote it."""
    if name in REPLACED:
        today = REPLACED[name]
        answer = f"{where} is an old name; write --{today} instead"
        return ConfigError(
            f"{answer} (but {UNAVAILABLE[today]})" if today in UNAVAILABLE else answer
        )
    if name in UNAVAILABLE:
        return ConfigError(f"{where}: {UNAVAILABLE[name]}")
    allowed = ", ".join(sorted(value for value in NEEDLESS[name] if value))
    return ConfigError(f"{where}: only {allowed} is possible here")
