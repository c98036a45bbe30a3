"""From an address to a remote tier."""

from __future__ import annotations

import os
import sys

import pytest

from core.errors import ConfigError
from kvtransfer.tiers.remote.open import RemoteConfig, open_remote_tier, open_store
from kvtransfer.tiers.remote.redis_store import RedisStore
from kvtransfer.tiers.remote.value import HEADER_BYTES
from tests.kvtransfer.tiers.harness import BLOCK_BYTES, FINGERPRINT, chain, load, store, valkey
from tests.support.valkey import flush

VALUE_BYTES = HEADER_BYTES + BLOCK_BYTES


def test_a_redis_by_its_address() -> None:
    flush(valkey())
    config = RemoteConfig(valkey().url, 3 * VALUE_BYTES, "lru")
    tier = open_remote_tier(config, BLOCK_BYTES, FINGERPRINT)
    assert isinstance(tier.store, RedisStore)
    assert (tier.num_slots, tier.block_bytes, tier.is_shared) == (3, BLOCK_BYTES, True)
    store(tier, 1)
    assert None not in load(tier, chain(1))
    tier.close()


def test_a_store_that_is_away_at_the_start_is_said_and_is_no_error(
    held_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = RemoteConfig(f"redis://127.0.0.1:{held_port}", VALUE_BYTES)
    tier = open_remote_tier(config, BLOCK_BYTES, FINGERPRINT)
    assert (tier.store.is_away, tier.lookup(chain(1))) == (True, 0)
    assert f"redis at 127.0.0.1:{held_port} is away" in caplog.text
    tier.close()


def test_what_holds_no_block_is_refused() -> None:
    config = RemoteConfig(valkey().url, VALUE_BYTES - 1)
    with pytest.raises(ConfigError, match="remote tier: 1055 bytes hold no block of 1000 bytes"):
        open_remote_tier(config, BLOCK_BYTES, FINGERPRINT)


@pytest.mark.parametrize("url", ["", "host:1", "http://host", "memcached://u:p@host"])
def test_an_unknown_kind_of_store_is_refused_by_its_flag(url: str) -> None:
    with pytest.raises(ConfigError, match="--kv-offloading-remote-url") as caught:
        open_store(url)
    assert "u:p" not in caught.value.message


# ---------------------------------------------------------------- an LMCache server


def test_lmcache_that_is_not_installed_is_said_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LMCACHE_TRACK_USAGE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "lmcache.v1.protocol", None)
    with pytest.raises(ConfigError, match="'lmcache' needs the extra `lmcache`"):
        open_store("lm://127.0.0.1:1")
    asked = os.environ["LMCACHE_TRACK_USAGE"], os.environ["HF_HUB_OFFLINE"]
    assert asked == ("false", "1"), "nothing of it may call home"


@pytest.mark.parametrize(
    "url",
    [
        "lm://",
        "lm://host",
        "lm://host:port",
        "lm://host:1/path",
        "lm://me@host:1",
        "lm://:1",
        "lm://host:99999",
    ],
)
def test_an_address_that_is_no_lmcache_server_is_refused_by_its_flag(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-offloading-remote-url: .* is not lm://host:port"):
        open_store(url)
