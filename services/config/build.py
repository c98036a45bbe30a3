"""The configs of this project's processes, built from what `sources` found.

One builder a process: gateway, worker of a role, local cluster. A builder fills nested dataclasses
by field path; the dataclasses check their own values.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from core.errors import ConfigError
from core.worker_info import Role
from engine.config import EngineConfig
from engine.offload_config import OffloadConfig
from kvindex.config import IndexConfig
from services.cluster.config import ClusterConfig
from services.config import values
from services.config.settings import FieldPath, Setting, Spelling, Spellings, settings_of
from services.gateway.config import GatewayConfig, RoutingConfig
from services.worker.config import WorkerConfig

_Config = TypeVar("_Config")

_SPELLINGS: Spellings = (
    {
        (EngineConfig, "num_blocks"): Spelling("num-gpu-blocks-override"),
        (EngineConfig, "link_rate_bytes_s"): Spelling("link-rate", values.parse_rate),
        (EngineConfig, "kv_transports"): Spelling(is_one_word=True),
        (EngineConfig, "transfer_window_bytes"): Spelling("transfer-window", values.parse_bytes),
        (EngineConfig, "max_model_len"): Spelling(parse=values.parse_count),
        (EngineConfig, "max_num_batched_tokens"): Spelling(parse=values.parse_count),
        (EngineConfig, "kv_cache_memory_bytes"): Spelling(parse=values.parse_bytes),
        (WorkerConfig, "served_model_names"): Spelling("served-model-name"),
        (GatewayConfig, "seeds"): Spelling("seed"),
        (GatewayConfig, "request_timeout_s"): Spelling("request-timeout"),
        (GatewayConfig, "body_timeout_s"): Spelling("body-timeout"),
        (GatewayConfig, "drain_timeout_s"): Spelling("drain-timeout"),
        (GatewayConfig, "max_body_bytes"): Spelling(parse=values.parse_bytes),
        (RoutingConfig, "decode_weights"): Spelling("decode-scorer-weights"),
        (RoutingConfig, "prefill_weights"): Spelling("prefill-scorer-weights"),
        (ClusterConfig, "num_prefill"): Spelling("prefill"),
        (ClusterConfig, "num_decode"): Spelling("decode"),
        (ClusterConfig, "num_mixed"): Spelling("mixed"),
    }
    | {
        (OffloadConfig, field.name): Spelling("kv-offloading-" + field.name.replace("_", "-"))
        for field in dataclasses.fields(OffloadConfig)
    }
    | {
        (OffloadConfig, "load_rate"): Spelling("kv-offloading-load-rate", values.parse_rate),
    }
    | {
        (IndexConfig, field.name): Spelling("index-" + field.name.replace("_", "-"))
        for field in dataclasses.fields(IndexConfig)
        if field.name not in ("redis_url", "index_shards")
    }
)
_ROLE: FieldPath = ("engine", "role")
_COUNTS = ("prefill", "decode", "mixed")
_LOCAL_DEFAULTS = {"drain-timeout": 1.0}
"""What holds for a cluster on one machine unless said otherwise: who presses Ctrl-C wants it gone, not drained."""
_LAUNCHER_SETS: tuple[FieldPath, ...] = (
    ("worker", *_ROLE),
    ("worker", "worker_id"),
    ("worker", "host"),
    ("worker", "port"),
    ("worker", "advertise_host"),
    ("worker", "metrics_port"),
    ("worker", "engine", "data_host"),
    ("gateway", "seeds"),
)


@functools.cache
def worker_settings() -> tuple[Setting, ...]:
    """What `baton prefill`, `decode` and `mixed` take."""
    return tuple(settings_of(WorkerConfig, _SPELLINGS, [_ROLE]))


@functools.cache
def gateway_settings() -> tuple[Setting, ...]:
    """What `baton gateway` takes."""
    return tuple(settings_of(GatewayConfig, _SPELLINGS))


@functools.cache
def cluster_settings() -> tuple[Setting, ...]:
    """What `baton up` and `baton serve` take: what workers and gateway take, and the counts."""
    return tuple(
        replace(setting, default=_LOCAL_DEFAULTS.get(setting.name, setting.default))
        for setting in settings_of(ClusterConfig, _SPELLINGS, _LAUNCHER_SETS)
    )


def all_setting_names() -> frozenset[str]:
    """Names that any process of the project knows, so that they can share an environment and a
    file.
    """
    groups = (worker_settings(), gateway_settings(), cluster_settings())
    return frozenset(setting.name for group in groups for setting in group)


def build_worker(found: Mapping[str, Any], role: Role) -> WorkerConfig:
    """A worker of this role. A mixed one is taken to have the machine to itself: as many threads as
    cores, also where the kernels cannot share them.
    """
    if role is Role.MIXED:
        found = {"num-threads": num_cores(), **found}
    if not found.get("model"):
        raise ConfigError("--model: name a GGUF file, a model folder or a Hub id")
    fields = _by_path(worker_settings(), found) | {_ROLE: role}
    return _construct(WorkerConfig, fields)


def build_gateway(found: Mapping[str, Any]) -> GatewayConfig:
    """A gateway."""
    config = _construct(GatewayConfig, _by_path(gateway_settings(), found))
    if not config.seeds and not config.index.redis_url:
        raise ConfigError("--redis-url: name an index, or workers with --seed host:port")
    return config


def build_cluster(found: Mapping[str, Any], environment: Mapping[str, str]) -> ClusterConfig:
    """A cluster on this machine. PORT is read as well, as hosts set it; `--port` and BATON_PORT go
    before it.
    """
    found = _cluster_defaults(environment) | dict(found)
    if not found.get("model"):
        raise ConfigError("--model: name a GGUF file, a model folder or a Hub id")
    if any(name in found for name in _COUNTS):
        found = {**dict.fromkeys(_COUNTS, 0), **found}
    config = _construct(ClusterConfig, _by_path(cluster_settings(), found))
    if "num-threads" in found or config.num_workers > 1:
        return config
    engine = replace(config.worker.engine, num_threads=num_cores())
    return replace(config, worker=replace(config.worker, engine=engine))


def _cluster_defaults(environment: Mapping[str, str]) -> dict[str, Any]:
    """What holds for a cluster on one machine where nobody says otherwise."""
    defaults: dict[str, Any] = dict(_LOCAL_DEFAULTS)
    port = environment.get("PORT")
    if port:
        defaults["port"] = _port(port)
    return defaults


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _port(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"PORT: {text!r} is not a port number") from None


def _by_path(settings: Iterable[Setting], found: Mapping[str, Any]) -> dict[FieldPath, Any]:
    return {
        path: found[setting.name]
        for setting in settings
        if setting.name in found
        for path in setting.paths
    }


def _construct(
    config: type[_Config], fields: Mapping[FieldPath, Any], prefix: FieldPath = ()
) -> _Config:
    """The dataclass with these fields set and all others at their defaults."""
    hints = typing.get_type_hints(config)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        path = (*prefix, field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _construct(hints[field.name], fields, path)
        elif path in fields:
            arguments[field.name] = fields[path]
    return config(**arguments)
