"""Configs as they come out: defaults, derived values, and what refuses to start."""

import argparse

import pytest

from core.errors import ConfigError
from core.worker_info import Role
from services.config import build
from services.config.sources import add_flags, collect

MODEL = {"model": "m"}


def test_a_worker_gets_its_role_and_fields_of_every_depth() -> None:
    found = {**MODEL, "link-rate": 5e6, "redis-url": "redis://r", "port": 5, "num-threads": 3}
    config = build.build_worker(found, Role.PREFILL)
    assert config.engine.role is Role.PREFILL
    assert (config.engine.link_rate_bytes_s, config.engine.num_threads) == (5e6, 3)
    assert (config.index.redis_url, config.port) == ("redis://r", 5)


def test_transports_are_named_best_first() -> None:
    """As `--kv-transports nixl,shm,tcp` is parsed."""
    assert build.build_worker(MODEL, Role.DECODE).engine.kv_transports == ("shm", "tcp")
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    add_flags(parser, build.worker_settings())
    given = parser.parse_args(["--kv-transports", "nixl,shm,tcp", "a.gguf"])
    assert given.model == "a.gguf", "the flag takes one word"
    found = collect(build.worker_settings(), given, {})
    assert build.build_worker(found, Role.DECODE).engine.kv_transports == ("nixl", "shm", "tcp")
    with pytest.raises(ConfigError, match="--kv-transports: 'rdma' is unknown"):
        build.build_worker({**MODEL, "kv-transports": ("rdma",)}, Role.DECODE)


def test_threads_follow_who_shares_the_machine() -> None:
    cores = build.num_cores()
    assert build.build_worker(MODEL, Role.DECODE).engine.num_threads == 0, "by the core ledger"
    assert build.build_worker(MODEL, Role.MIXED).engine.num_threads == cores
    alone = build.build_cluster({**MODEL, "mixed": 1}, {})
    assert alone.worker.engine.num_threads == cores
    assert build.build_cluster({**MODEL, "mixed": 2}, {}).worker.engine.num_threads == 0
    assert build.build_cluster(MODEL, {}).worker.engine.num_threads == 0
    named = build.build_cluster({**MODEL, "core-ledger": "none", "num-threads": 1}, {})
    assert (named.worker.engine.core_ledger, named.worker.engine.num_threads) == ("none", 1)


def test_a_cluster_is_one_of_each_unless_counts_are_named() -> None:
    config = build.build_cluster(MODEL, {})
    assert (config.num_prefill, config.num_decode, config.num_mixed) == (1, 1, 0)
    config = build.build_cluster({**MODEL, "prefill": 2, "mixed": 1}, {})
    assert (config.num_prefill, config.num_decode, config.num_mixed) == (2, 0, 1)
    with pytest.raises(ConfigError, match="at least one decode or mixed worker"):
        build.build_cluster({**MODEL, "prefill": 1}, {})
    with pytest.raises(ConfigError, match=r"--mixed: 65 must be in \[0, 64\]"):
        build.build_cluster({**MODEL, "mixed": 65}, {})


def test_one_setting_reaches_every_process_of_a_cluster() -> None:
    config = build.build_cluster({**MODEL, "redis-url": "redis://r", "log-level": "debug"}, {})
    assert config.worker.index.redis_url == config.gateway.index.redis_url == "redis://r"
    assert config.worker.log_level == config.gateway.log_level == "debug"


def test_workers_of_every_role_and_of_a_cluster_are_told_their_device() -> None:
    found = {**MODEL, "device": "cuda", "kernel-backend": "triton"}
    engines = [build.build_worker(found, role).engine for role in Role]
    engines.append(build.build_cluster(found, {}).worker.engine)
    assert {(e.device, e.kernel_backend) for e in engines} == {("cuda", "triton")}
    assert build.build_worker(MODEL, Role.DECODE).engine.device == "auto"


def test_the_port_of_a_cluster_may_come_from_the_host() -> None:
    assert build.build_cluster(MODEL, {}).gateway.port == 8000
    assert build.build_cluster(MODEL, {"PORT": "9000"}).gateway.port == 9000
    assert build.build_cluster({**MODEL, "port": 1}, {"PORT": "9000"}).gateway.port == 1
    with pytest.raises(ConfigError, match="PORT: 'http' is not a port"):
        build.build_cluster(MODEL, {"PORT": "http"})


def test_what_cannot_start_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="--model: name a GGUF file"):
        build.build_worker({}, Role.DECODE)
    with pytest.raises(ConfigError, match="--redis-url: name an index, or workers with --seed"):
        build.build_gateway({})
    assert build.build_gateway({"seed": ("w:1",)}).seeds == ("w:1",)


def test_limits_are_the_dataclasses_own() -> None:
    with pytest.raises(ConfigError, match="--block-size: 17 must be a positive multiple of 16"):
        build.build_worker({**MODEL, "block-size": 17}, Role.MIXED)


def test_a_cluster_s_workers_hold_kv_as_they_are_told() -> None:
    config = build.build_cluster({**MODEL, "kv-cache-dtype": "fp8"}, {})
    assert config.worker.engine.kv_dtype == "fp8_e4m3"
    assert build.build_cluster(MODEL, {}).worker.engine.kv_dtype == "float32"
    with pytest.raises(ConfigError, match="--kv-cache-dtype: 'int4' is unknown"):
        build.build_worker({**MODEL, "kv-cache-dtype": "int4"}, Role.DECODE)
