"""Every configuration that can be measured, by name, and how each is started.

A peer appears once for each setting at which it could be best; the report takes the best of all for its ratios.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import install, models
from benchmarks.peers.client import Event
from benchmarks.peers.peer import (
    KV_TOKENS,
    MAX_MODEL_TOKENS,
    MAX_STREAMS,
    NUM_THREADS,
    ChildPeer,
    HttpPeer,
    Peer,
    answers_health,
    free_port,
    get_json,
    log_path,
)
from benchmarks.peers.processes import ServerProcess

HERE = Path(__file__).resolve().parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
VLLM_BLOCK_SIZE = 128
BATON_BLOCK_SIZE = 16
PAUSE_LIMIT_MS = 3_600_000
"""Longer than any pause between two turns: a worker that was held on purpose is not to be taken for dead."""


@dataclass(frozen=True)
class Entry:
    """A configuration: the peer it belongs to, and what starts it with its log in a folder."""

    peer: str
    start: Callable[[str, Path], Peer]


def entries(baton_arguments: Sequence[str] = ()) -> dict[str, Entry]:
    """All configurations; baton_arguments go to `baton up`."""
    found = {"baton": Entry("baton", partial(_baton, list(baton_arguments)))}
    for file_format, flash in (("Q4_1", "on"), ("Q4_0", "on"), ("Q4_0", "off"), ("Q8_0", "on")):
        name = f"llama.cpp {file_format}" + (" no-fa" if flash == "off" else "")
        found[name] = Entry("llama.cpp", partial(_llama_cpp, file_format, flash))
    for file_format, precision in (
        ("Q4_1", "bf16"),
        ("Q4_1", "f32"),
        ("Q8_0", "bf16"),
        ("F16", "bf16"),
    ):
        found[f"openvino {file_format} {precision}"] = Entry(
            "openvino", partial(_openvino, file_format, precision)
        )
    for dtype in ("bfloat16", "float32"):
        found[f"vllm {dtype}"] = Entry("vllm", partial(_vllm, dtype))
        found[f"transformers {dtype}"] = Entry("transformers", partial(_transformers, dtype))
    return found


def chosen(names: str, all_entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries by a list with commas: a peer's name means all its entries."""
    wanted: dict[str, Entry] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        found = {n: e for n, e in all_entries.items() if name in (n, e.peer)}
        if not found:
            raise SystemExit(f"--peers: {name!r} is unknown; known: {', '.join(all_entries)}")
        wanted |= found
    return wanted


# ------------------------------------------------------------------ llama.cpp


def _llama_cpp(file_format: str, flash: str, name: str, logs: Path) -> Peer:
    port = free_port()
    command = [str(install.llama_cpp() / "llama-server"), "-m", str(models.gguf(file_format))]
    command += ["--host", "127.0.0.1", "--port", str(port), "-t", str(NUM_THREADS)]
    command += ["-c", str(KV_TOKENS), "-np", str(MAX_STREAMS), "--kv-unified", "-fa", flash]
    process = ServerProcess(name, command, OFFLINE, log_path(logs, name))
    return HttpPeer(name, process, port, "/completion", _llama_body, _llama_event, answers_health)


def _llama_body(prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "n_predict": max_tokens,
        "ignore_eos": ignore_eos,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "stream": True,
        "return_tokens": True,
        "cache_prompt": True,
    }


def _llama_event(event: Event) -> tuple[int, Sequence[int]]:
    if event.get("stop"):
        return int(event["tokens_predicted"]), ()
    return int(event["tokens_predicted"]), event["tokens"]


# ------------------------------------------------------------------ OpenVINO


def _openvino(file_format: str, precision: str, name: str, logs: Path) -> Peer:
    settings = {
        "model": str(models.gguf(file_format)),
        "num_threads": NUM_THREADS,
        "num_kv_tokens": KV_TOKENS,
        "max_num_seqs": MAX_STREAMS,
        "max_num_batched_tokens": 2048,
        "properties": {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"},
    }
    command = [str(install.openvino()), str(HERE / "openvino_child.py"), json.dumps(settings)]
    return ChildPeer(
        name, ServerProcess(name, command, OFFLINE, log_path(logs, name), has_pipes=True)
    )


# ------------------------------------------------------------------ vLLM


def _vllm(dtype: str, name: str, logs: Path) -> Peer:
    port = free_port()
    python = install.vllm()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(models.hf_folder()), "--served-model-name", "demo"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", str(MAX_MODEL_TOKENS), "--max-num-seqs", str(MAX_STREAMS)]
    command += ["--block-size", str(VLLM_BLOCK_SIZE), "--disable-log-stats"]
    command += ["--num-gpu-blocks-override", str(KV_TOKENS // VLLM_BLOCK_SIZE)]
    environment = {
        **OFFLINE,
        "VLLM_CACHE_ROOT": str(install.PEERS / "cache" / "vllm"),
        # As its documentation advises; with the OpenMP that torch brings, prefill is ten times slower here.
        "LD_PRELOAD": str(python.parents[1] / "lib" / "libiomp5.so"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_THREADS - 1}",
    }
    process = ServerProcess(name, command, environment, log_path(logs, name))
    return HttpPeer(
        name, process, port, "/v1/completions", _openai_body, _openai_event, answers_health
    )


def _openai_body(prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": ignore_eos,
        "stream": True,
        "return_token_ids": True,
    }


def _openai_event(event: Event) -> tuple[int, Sequence[int]]:
    choices = event.get("choices") or [{}]
    return 0, choices[0].get("token_ids") or ()


# ------------------------------------------------------------------ transformers


def _transformers(dtype: str, name: str, logs: Path) -> Peer:
    command = [sys.executable, str(HERE / "transformers_child.py"), str(models.hf_folder())]
    command += [dtype, str(NUM_THREADS)]
    environment = {**OFFLINE, "OMP_NUM_THREADS": str(NUM_THREADS)}
    return ChildPeer(
        name, ServerProcess(name, command, environment, log_path(logs, name), has_pipes=True)
    )


# ------------------------------------------------------------------ Baton


def _baton(arguments: Sequence[str], name: str, logs: Path) -> Peer:
    port = free_port()
    command = [sys.executable, "-m", "services.cli.main", "up", "--port", str(port)]
    command += ["--prefill", "0", "--decode", "0", "--mixed", "1"]
    command += ["--num-threads", str(NUM_THREADS), "--served-model-name", "demo"]
    command += ["--num-gpu-blocks-override", str(KV_TOKENS // BATON_BLOCK_SIZE + 1)]
    for patience in ("index-lease", "engine-silence", "engine-death", "silence-limit"):
        command += [f"--{patience}-ms", str(PAUSE_LIMIT_MS)]
    environment = {**OFFLINE, "OMP_WAIT_POLICY": "PASSIVE"}
    process = ServerProcess(name, [*command, *arguments], environment, log_path(logs, name))
    return HttpPeer(
        name, process, port, "/v1/completions", _openai_body, _openai_event, _baton_is_ready
    )


def _baton_is_ready(port: int) -> bool:
    """Whether the gateway counts its worker among the living; after a pause it has to hear from it first."""
    body = get_json(port, "/health")
    return bool(body and body.get("workers") and all(w["live"] for w in body["workers"]))
