"""Blocks in a Redis (7 or newer, Valkey), which may serve others too.

    baton:kv:1:NAME -> value, expires EXPIRY_MS after it was written, read, or meant to be written again

redis-py brings addresses, TLS, logins and connections. What a block costs is our own: its bytes are sent from where
they are and received where they belong (redis_replies.py), without a copy on the way. A block is sent only where
there is none, so that a prompt which several workers computed is stored once and is one worker's to delete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.connection import Connection, parse_url
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from core.errors import ConfigError
from kvtransfer.tiers.remote.reached_store import ReachedStore
from kvtransfer.tiers.remote.redis_replies import RedisReplies
from kvtransfer.tiers.remote.store import (
    ANSWER_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    Fetch,
    StoreAway,
    StoreRefused,
    num_bytes,
)

PREFIX = "baton:kv:1:"
EXPIRY_MS = 24 * 3600 * 1000
"""So long after its last use a block goes, whatever became of the worker that stored it."""


class RedisStore(ReachedStore):
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
        _RedisConversation(options, expiry_ms)  # what an address asks for in vain is refused now
        super().__init__(
            _place(options), lambda: _RedisConversation(options, expiry_ms).open(), clock_s
        )


class _RedisConversation:
    """One connection of redis-py's, with a limit of time on each call and errors that say whose fault it is."""

    def __init__(self, options: dict[str, Any], expiry_ms: int) -> None:
        self._expiry_ms = expiry_ms
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

    def open(self) -> _RedisConversation:
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

    def exist(self, names: Sequence[str]) -> list[bool]:
        """See Conversation.exist."""
        commands = [("EXISTS", _key(name)) for name in names]
        replies = self._call(self._connection.pack_commands(commands), len(names))
        return [reply == 1 for reply in replies]

    def add(self, name: str, parts: Sequence[memoryview]) -> bool:
        """See BlockStore.put. Where there is a value it lives on."""
        key = _key(name)
        [is_there] = self._call(self._connection.pack_command("PEXPIRE", key, self._expiry_ms))
        if is_there:
            return False
        head = b"*6\r\n%b%b$%d\r\n" % (_bulk(b"SET"), _bulk(key), num_bytes(parts))
        expiry = b"%d" % self._expiry_ms
        tail = b"\r\n%b%b%b" % (_bulk(b"PX"), _bulk(expiry), _bulk(b"NX"))
        [reply] = self._call([head + parts[0], *parts[1:], tail])
        return reply is not None

    def get_into(self, name: str, parts: Sequence[memoryview]) -> Fetch:
        """See BlockStore.get_into. The value lives on."""
        command = self._connection.pack_command("GETEX", _key(name), "PX", self._expiry_ms)
        [reply] = self._call(command, into=parts)
        if reply is None:
            return Fetch.ABSENT
        if reply != num_bytes(parts):
            self.close()  # its bytes are still on their way
            return Fetch.WRONG
        return Fetch.WHOLE

    def delete(self, names: Sequence[str]) -> None:
        """See BlockStore.delete. The server lets go of the bytes when it has time."""
        self._call(self._connection.pack_command("UNLINK", *map(_key, names)))

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
