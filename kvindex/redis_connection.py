"""One process's way to Redis: a bounded pool, a time limit on every call, one kind of failure.

Promises that a call either returns what the server said or raises IndexUnavailable within `command_timeout_ms`,
whatever happened (refused, hung, restarted, full, failed over), and that the next call after `retry_interval_ms` finds
its own way back. In between calls fail at once: a hung server must not cost every request its time limit. An abandoned
call closes its connection, so that its late reply cannot become another call's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from core.errors import ConfigError
from kvindex.base import IndexCounters, IndexUnavailable
from kvindex.config import IndexConfig
from kvindex.scripts import Script, load_script

Argument = bytes | str | int


class RedisConnection:
    """Runs scripts. `is_up`: whether the last call succeeded, None before the first."""

    def __init__(self, config: IndexConfig, counters: IndexCounters) -> None:
        self._timeout_s = config.command_timeout_ms / 1000
        self._retry_interval_s = config.retry_interval_ms / 1000
        self._counters = counters
        self._down_until_s = 0.0
        self._last_failure = ""
        self.is_up: bool | None = None
        self._client = _make_client(config)

    async def run(self, name: str, registry_key: str, arguments: Sequence[Argument]) -> Any:
        """Run the script `name` on the shard of `registry_key`."""
        script = load_script(name)
        return await self._guarded(lambda: self._evaluate(script, registry_key, arguments))

    async def ping(self) -> None:
        """Return when the server answers; tries it even where other calls would fail at once."""
        self._down_until_s = 0.0
        await self._guarded(lambda: cast(Awaitable[Any], self._client.ping()))

    async def close(self) -> None:
        """Close all connections."""
        with contextlib.suppress(TimeoutError, RedisError, OSError):
            async with asyncio.timeout(self._timeout_s):
                await self._client.aclose()
        await asyncio.sleep(0)  # connections of abandoned calls end in the loop's next round

    async def _evaluate(
        self, script: Script, registry_key: str, arguments: Sequence[Argument]
    ) -> Any:
        try:
            return await self._client.evalsha(script.digest, 1, registry_key, *arguments)
        except NoScriptError:
            return await self._client.eval(script.text, 1, registry_key, *arguments)

    async def _guarded(self, call: Callable[[], Awaitable[Any]]) -> Any:
        now_s = time.monotonic()
        if now_s < self._down_until_s:
            raise IndexUnavailable(f"index: not asked, it failed just now ({self._last_failure})")
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await call()
        except TimeoutError:
            limit_ms = round(self._timeout_s * 1000)
            raise self._failed(f"no answer within {limit_ms} ms") from None
        except ResponseError as error:
            # The server is well and refuses this one call (it is full, say): others may go through.
            self._counters.failures_total += 1
            raise IndexUnavailable(f"index: refused: {type(error).__name__}: {error}") from error
        except (RedisError, OSError) as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error
        self.is_up, self._down_until_s = True, 0.0
        return answer

    def _failed(self, reason: str) -> IndexUnavailable:
        self.is_up, self._last_failure = False, reason
        self._down_until_s = time.monotonic() + self._retry_interval_s
        self._counters.failures_total += 1
        return IndexUnavailable(f"index: {reason}")


def _make_client(config: IndexConfig) -> Redis:
    try:
        pool = BlockingConnectionPool.from_url(
            config.redis_url,
            max_connections=config.max_connections,
            # The call's own limit covers all of these. (With a socket timeout redis-py sends through wait_for, which
            # before Python 3.12 can lose a cancellation.)
            timeout=None,
            socket_timeout=None,
            socket_connect_timeout=None,
            # A connection that died while idle shows only when used: one more try takes a fresh one. All scripts may
            # run twice.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        )
    except ValueError as error:
        raise ConfigError(f"redis_url: {config.redis_url!r} is not usable: {error}") from error
    return Redis.from_pool(pool)
