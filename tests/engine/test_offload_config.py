"""What is said of the tiers is right before anything is allocated."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from engine.config import EngineConfig
from engine.offload_config import POLICIES, OffloadConfig
from kvtransfer.tiers import policies


def test_the_policies_are_those_that_tiers_know() -> None:
    assert set(POLICIES) == set(policies.POLICIES)
    assert POLICIES[0] == policies.DEFAULT_POLICY


def test_no_tier_by_default() -> None:
    assert not OffloadConfig().is_on
    assert not EngineConfig("model").offload.is_on


@pytest.mark.parametrize(
    "values", [{"size": 0.5}, {"disk_dir": "kv"}, {"remote_url": "redis://127.0.0.1:6379/0"}]
)
def test_one_of_them_is_enough(values: dict[str, object]) -> None:
    assert OffloadConfig(**values).is_on  # type: ignore[arg-type]


def test_sizes_are_in_gib() -> None:
    config = OffloadConfig(
        size=1.5, disk_dir="kv", disk_size=0.25, remote_url="redis://h:1", remote_size=2
    )
    assert (config.host_bytes, config.disk_bytes, config.remote_bytes) == (
        3 << 29,
        1 << 28,
        2 << 30,
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"size": -1.0}, "--kv-offloading-size: -1.0 must be at least 0"),
        ({"disk_size": 0.0}, "--kv-offloading-disk-size: 0.0 must be above 0"),
        ({"disk_size": 8.0}, "--kv-offloading-disk-size: 8.0 needs --kv-offloading-disk-dir"),
        ({"disk_threshold": 0}, "--kv-offloading-disk-threshold: 0 needs --kv-offloading-disk-dir"),
        ({"remote_size": 8.0}, "--kv-offloading-remote-size: 8.0 needs --kv-offloading-remote-url"),
        ({"backend": "vllm"}, "--kv-offloading-backend: 'vllm' is unknown; known: native, lmcache"),
        ({"policy": "fifo"}, "--kv-offloading-policy: 'fifo' is unknown; known: arc, lru"),
        ({"store": "never"}, "--kv-offloading-store: 'never' is unknown; known: eager, lazy"),
        ({"store_threshold": -1}, "--kv-offloading-store-threshold: -1 must be at least 0"),
        ({"backend": "lmcache"}, "'lmcache' needs --kv-offloading-remote-url lm://host:port"),
        (
            {"backend": "lmcache", "remote_url": "redis://h:1"},
            "'redis://h:1' must begin with lm:// for backend 'lmcache'",
        ),
        ({"remote_url": "lm://h:1"}, "must begin with redis:// or rediss:// or unix:// for"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(**values)  # type: ignore[arg-type]
    assert words in caught.value.message


def test_tiers_need_prefix_caching() -> None:
    with pytest.raises(ConfigError, match="--enable-prefix-caching must be on"):
        EngineConfig("model", enable_prefix_caching=False, offload=OffloadConfig(size=1.0))
