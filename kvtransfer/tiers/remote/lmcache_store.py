"""Blocks in an LMCache server (`lmcache_server HOST PORT cpu` of the package lmcache 0.5.6).

    key of a value = CacheEngineKey("baton:kv:1:SPACE", 1, 0, HEX, uint8)    bytes, or none once it is deleted
    key of a mark  = CacheEngineKey("baton:kv:1:SPACE", 1, 1, HEX, uint8)    1 byte, or none once it is deleted

The package brings keys and messages, and no more: its connector waits without a limit and needs LMCache's engine
beside it. Keys are made of our own block hashes, never of its token hashes, which may be Python's `hash()` and differ
in every process.

What the server lacks is made up for here. It answers no PUT: a question after it tells that it is done. It stores a
PUT that breaks off as well: a value counts only with its mark, which is put after it. It deletes nothing: a mark
without its byte says that there is no value, and the value's bytes are replaced by none. So two empty entries are left
of a deleted block; and nothing there expires.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from core.errors import ConfigError
from kvtransfer.tiers.remote.inlet import Ended, Inlet
from kvtransfer.tiers.remote.reached_store import ReachedStore
from kvtransfer.tiers.remote.store import (
    ANSWER_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    Fetch,
    StoreAway,
    num_bytes,
)

PREFIX = "baton:kv:1:"
_THERE = b"\1"
_VALUE, _MARK = 0, 1
_LONGEST_MARK_BYTES = 64


class LMCacheStore(ReachedStore):
    """The store at an `lm://host:port` address. Raises ConfigError where that is not one, or lmcache is missing.

    prefix, clock_s: for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = PREFIX,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        host, port = _address(url)
        api = _load()
        super().__init__(
            f"LMCache server at {host}:{port}",
            lambda: _LMCacheConversation(api, host, port, prefix),
            clock_s,
        )


class _LMCacheConversation:
    """One connection to the server, which answers one message after the other."""

    def __init__(self, api: _Api, host: str, port: int, prefix: str) -> None:
        self._api = api
        self._prefix = prefix
        self._socket = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._inlet = Inlet(self._socket, acknowledges_at_once=True)
        self.is_open = True

    def close(self) -> None:
        """See Connection.close."""
        self.is_open = False
        self._socket.close()

    def exist(self, names: Sequence[str]) -> list[bool]:
        """See Conversation.exist."""
        get = self._api.protocol.ClientCommand.GET
        self._send(*(self._message(get, name, _MARK) for name in names))
        return [self._take_mark() for _ in names]

    def add(self, name: str, parts: Sequence[memoryview]) -> bool:
        """See BlockStore.put."""
        if self.exist([name])[0]:
            return False
        self._send(self._put(name, _VALUE, num_bytes(parts)), *parts)
        self._send(self._put(name, _MARK, len(_THERE)), _THERE)
        self._wait()
        return True

    def get_into(self, name: str, parts: Sequence[memoryview]) -> Fetch:
        """See BlockStore.get_into."""
        self._send(self._message(self._api.protocol.ClientCommand.GET, name, _VALUE))
        length = self._take_length()
        if not length:
            return Fetch.ABSENT
        if length != num_bytes(parts):
            self.close()  # its bytes are still on their way
            return Fetch.WRONG
        try:
            for part in parts:
                self._inlet.fill(part)
        except Ended as ended:
            if part is parts[0] and not ended.num_filled:
                self.close()
                return Fetch.WRONG  # so the server ends where the value's PUT broke off
            raise
        return Fetch.WHOLE

    def delete(self, names: Sequence[str]) -> None:
        """See BlockStore.delete."""
        there = [name for name, is_there in zip(names, self.exist(names), strict=True) if is_there]
        if there:
            marks = [self._put(name, _MARK, 0) for name in there]
            self._send(*marks, *(self._put(name, _VALUE, 0) for name in there))
            self._wait()

    # ---- messages

    def _message(self, command: Any, name: str, kind: int, length: int = 0) -> bytes:
        api = self._api
        space, _, digits = name.rpartition(":")
        key = api.CacheEngineKey(self._prefix + space, 1, kind, int(digits, 16), api.torch.uint8)
        shape = api.torch.Size([length, 0, 0, 0])
        message = api.protocol.ClientMetaMessage(
            command, key, length, api.protocol.MemoryFormat.BINARY, api.torch.uint8, shape
        )
        packed: bytes = message.serialize()
        return packed

    def _put(self, name: str, kind: int, length: int) -> bytes:
        return self._message(self._api.protocol.ClientCommand.PUT, name, kind, length)

    def _send(self, *parts: bytes | memoryview) -> None:
        """Small parts together, large ones from where they are."""
        self._inlet.begin(ANSWER_TIMEOUT_S)
        small = bytearray()
        for part in parts:
            if len(part) < 4096:
                small += part
                continue
            if small:
                self._socket.sendall(small)
                small.clear()
            self._socket.sendall(part)
        self._socket.sendall(small)
        self._inlet.begin(ANSWER_TIMEOUT_S)

    def _wait(self) -> None:
        """Until the server has done all that it was sent."""
        self._send(self._message(self._api.protocol.ClientCommand.HEALTH, "0:0", _MARK))
        self._take_length()

    def _take_length(self) -> int:
        """A reply's head; how many bytes follow, 0 where there is nothing."""
        reply_type = self._api.protocol.ServerMetaMessage
        reply = self._inlet.take(reply_type.packlength())
        try:
            head = reply_type.deserialize(reply)
        except (KeyError, ValueError) as error:
            raise StoreAway(f"what answers is no LMCache server: {error}") from error
        is_there = head.code == self._api.protocol.ServerReturnCode.SUCCESS
        return int(head.length) if is_there else 0

    def _take_mark(self) -> bool:
        length = self._take_length()
        if length > _LONGEST_MARK_BYTES:
            raise StoreAway(f"a mark of {length} bytes is none")
        return self._inlet.take(length) == _THERE


class _Api(NamedTuple):
    """What is used of the package."""

    protocol: ModuleType
    CacheEngineKey: Any
    torch: ModuleType


def _load() -> _Api:
    """The package, without its reports of usage and without a look at a model hub. Raises ConfigError."""
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    try:
        return _Api(
            import_module("lmcache.v1.protocol"),
            import_module("lmcache.utils").CacheEngineKey,
            import_module("torch"),
        )
    except ImportError as error:
        raise ConfigError(
            f"--kv-offloading-backend: 'lmcache' needs the extra `lmcache`, which cannot be imported ({error})"
        ) from error


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or url.removeprefix("lm://") != parts.netloc or "@" in parts.netloc:
        raise ConfigError(f"--kv-offloading-remote-url: {url!r} is not lm://host:port")
    return host, port
