"""Blocks in a Redis (7 or newer, Valkey), which may serve others too.

    baton:kv:1:NAME -> value, expires EXPIRY_MS after it was written, read, or meant to be written again

redis-py brings addresses, TLS, logins and connections. What a block costs is our own: its bytes are sent from where
they are and received where they belong (redis_replies.py), without a copy on the way. A block is sent only where
there is none, so that a prompt which several workers computed is stored once and is one worker's to delete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from redis.connection import Connection, parse_url
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from core.errors import ConfigError
from kvtransfer.tiers.remote.reach import Reach
from kvtransfer.tiers.remote.redis_replies import RedisReplies
from kvtransfer.tiers.remote.store import (
    ANSWER_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    NAMES_AT_ONCE,
    BlockStore,
    Fetch,
    StoreAway,
    StoreRefused,
    num_bytes,
)

PREFIX = "baton:kv:1:"
EXPIRY_MS = 24 * 3600 * 1000
"""So long after its last use a block goes, whatever became of the worker that stored it."""


class RedisStore(BlockStore):
    """The store at a `redis://`, `rediss://` or `unix://` address. Raises ConfigError where that is not one.

    expiry_ms, clock_s: for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        expiry_ms: int = EXPIRY_MS,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        options = _options(url)
        self.place = _place(options)
        self._expiry_ms = expiry_ms
        _RedisConnection(
            options
        )  # an option that there is none of is refused now, not at the first block
        self._reach = Reach(self.place, lambda: _RedisConnection(options).open(), clock_s)
        self.counters = self._reach.counters

    @property
    def is_away(self) -> bool:
        """See BlockStore.is_away."""
        return self._reach.is_away

    @property
    def is_full(self) -> bool:
        """See BlockStore.is_full."""
        return self._reach.is_full

    def count_leading(self, names: Sequence[str]) -> int:
        """See BlockStore.count_leading."""
        num_found = 0
        try:
            for batch in _batches(names):
                there = self._reach.ask(partial(_RedisConnection.exist, keys=batch))
                num_there = there.index(0) if 0 in there else len(there)
                num_found += num_there
                if num_there < len(batch):
                    break
        except OSError:
            pass  # what is known of the head is still right
        return num_found

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """See BlockStore.put."""
        key = _key(name)
        return self._reach.add(lambda redis: redis.add(key, parts, self._expiry_ms))

    def get_into(self, name: str, parts: Sequence[memoryview]) -> Fetch:
        """See BlockStore.get_into."""
        key = _key(name)
        try:
            return self._reach.ask(lambda redis: redis.get_into(key, parts, self._expiry_ms))
        except OSError:
            return Fetch.AWAY

    def delete(self, names: Sequence[str]) -> None:
        """See BlockStore.delete."""
        for batch in _batches(names):
            self._reach.ask(partial(_RedisConnection.delete, keys=batch))

    def close(self) -> None:
        """See BlockStore.close."""
        self._reach.close()


class _RedisConnection:
    """One connection of redis-py's, with a limit of time on each call and errors that say whose fault it is."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._replies = RedisReplies()
        options = {"connection_class": Connection, **options}
        make = options.pop("connection_class")
        try:
            # parser_class: what redis-py calls for a parser; there is one connection to this one
            self._connection = make(
                **options, protocol=2, parser_class=lambda **_: self._replies,
                socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=ANSWER_TIMEOUT_S,
            )  # fmt: skip
        except TypeError as error:
            raise ConfigError(f"--kv-offloading-remote-url: {error}") from error

    def open(self) -> _RedisConnection:
        """Connect and log in. Raises OSError."""
        self._said(self._connection.connect)
        return self

    @property
    def is_open(self) -> bool:
        """See Connection.is_open."""
        return self._replies.is_connected

    def close(self) -> None:
        """See Connection.close."""
        self._connection.disconnect()

    def exist(self, keys: Sequence[bytes]) -> list[int]:
        """For each key 1 or 0, in one round trip."""
        commands = [("EXISTS", key) for key in keys]
        return self._call(self._connection.pack_commands(commands), len(keys))

    def add(self, key: bytes, parts: Sequence[memoryview], expiry_ms: int) -> bool:
        """Store a value where there is none; where there is one it lives on."""
        [is_there] = self._call(self._connection.pack_command("PEXPIRE", key, expiry_ms))
        if is_there:
            return False
        head = b"*6\r\n$3\r\nSET\r\n%b$%d\r\n" % (_bulk(key), num_bytes(parts))
        tail = b"\r\n%b%b%b" % (_bulk(b"PX"), _bulk(b"%d" % expiry_ms), _bulk(b"NX"))
        [reply] = self._call([head + parts[0], *parts[1:], tail])
        return reply is not None

    def get_into(self, key: bytes, parts: Sequence[memoryview], expiry_ms: int) -> Fetch:
        """Receive a value where it belongs, and let it live on."""
        command = self._connection.pack_command("GETEX", key, "PX", expiry_ms)
        [reply] = self._call(command, into=parts)
        if reply is None:
            return Fetch.ABSENT
        if reply != num_bytes(parts):
            self.close()  # its bytes are still on their way
            return Fetch.WRONG
        return Fetch.WHOLE

    def delete(self, keys: Sequence[bytes]) -> None:
        """Let the server drop values when it has time."""
        self._call(self._connection.pack_command("UNLINK", *keys))

    def _call(
        self,
        chunks: Sequence[bytes | memoryview],
        num_replies: int = 1,
        into: Sequence[memoryview] = (),
    ) -> list[Any]:
        replies: list[Any] = self._said(lambda: self._exchange(chunks, num_replies, into))
        return replies

    def _exchange(
        self, chunks: Sequence[bytes | memoryview], num_replies: int, into: Sequence[memoryview]
    ) -> list[Any]:
        self._replies.begin(ANSWER_TIMEOUT_S, into)
        self._connection.send_packed_command(chunks, check_health=False)
        self._replies.begin(ANSWER_TIMEOUT_S, into)
        return [self._connection.read_response() for _ in range(num_replies)]

    def _said(self, call: Callable[[], Any]) -> Any:
        """What a call of redis-py's says, with its errors as the ones of a store."""
        try:
            return call()
        except ResponseError as error:
            self.close()  # of a batch, other replies may be on their way
            raise StoreRefused(str(error)) from error
        except (RedisTimeoutError, TimeoutError) as error:
            raise TimeoutError(str(error) or "no answer in time") from error
        except RedisError as error:
            raise StoreAway(str(error)) from error


def _batches(names: Sequence[str]) -> Iterator[list[bytes]]:
    for start in range(0, len(names), NAMES_AT_ONCE):
        yield [_key(name) for name in names[start : start + NAMES_AT_ONCE]]


def _key(name: str) -> bytes:
    return f"{PREFIX}{name}".encode()


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _options(url: str) -> dict[str, Any]:
    """What redis-py makes of an address, checked where it would guess."""
    shown = f"--kv-offloading-remote-url: {_masked(url)!r}"
    try:
        options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError as error:
        # What the standard library says of an address may repeat a password of it.
        reason = str(error) if str(error).startswith("Invalid value for") else "is no address"
        raise ConfigError(f"{shown}: {reason}") from None
    needed = "path" if url.startswith("unix:") else "host"
    if needed not in options:
        raise ConfigError(f"{shown}: names no {needed}")
    database = url.partition("://")[2].partition("?")[0].partition("/")[2]
    if needed == "host" and database and not database.isdigit():
        raise ConfigError(f"{shown}: {database!r} is no number of a database")
    options.pop("protocol", None)
    return options


def _masked(url: str) -> str:
    """An address without what logs in."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2].partition('?')[0]}"


def _place(options: dict[str, Any]) -> str:
    if "path" in options:
        return f"redis at {options['path']}"
    return f"redis at {options['host']}:{options.get('port', 6379)}"
