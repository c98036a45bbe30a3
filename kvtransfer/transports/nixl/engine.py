"""NIXL with its UCX backend as an engine: shared memory, RDMA or tcp, whichever UCX finds between two ends.

Written over the package's bindings, not over its `nixl_agent`: that class lets the thread that answers readers spin on
a core of its own. Here a receiver's end has no thread, since it looks at its reads anyway, and a sender's sleeps until
the network wakes it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

import numpy

from core.errors import ConfigError, TransferError
from kvtransfer.transports.pull.engine import Read, address_of

INSTALL = "pip install --no-deps nixl nixl-cu13"
"""How the package comes without a CUDA build of torch."""

_BACKEND = "UCX"
_LONGEST_SLEEP_US = 10_000
"""After which a sender's thread looks although nothing has woken it."""


class NixlEngine:
    """See pull.engine.Engine. A fresh name for each, so that no peer takes it for one that was here before."""

    def __init__(self, *, is_read: bool) -> None:
        """is_read: whether others read what is registered, so that a thread has to answer them.

        Raises ConfigError where the package or its backend is missing.
        """
        self._api = api = _load()
        config = api.nixlAgentConfig()
        config.useProgThread = is_read
        config.pthrDelay = _LONGEST_SLEEP_US
        self._peers: dict[bytes, _Known] = {}
        self._handles: set[int] = set()
        self._registered: dict[int, Any] = {}
        try:
            self._agent = api.nixlAgent(f"baton-{secrets.token_hex(8)}", config)
            self._backends = [self._agent.createBackend(_BACKEND, {})]
        except Exception as error:
            raise ConfigError(
                f"--kv-transports: nixl cannot use {_BACKEND} here: {error}"
            ) from error

    def register(self, memory: memoryview) -> int:
        """See Engine.register."""
        address = address_of(memory)
        pieces = self._api.nixlRegDList(self._api.DRAM_SEG, [(address, len(memory), 0, "")])
        try:
            self._agent.registerMem(pieces, self._backends)
        except Exception as error:
            raise TransferError(f"nixl cannot register {len(memory)} bytes: {error}") from error
        self._registered[address] = pieces
        return address

    def unregister(self, address: int) -> None:
        """See Engine.unregister."""
        pieces = self._registered.pop(address, None)
        if pieces is not None:
            with contextlib.suppress(Exception):  # it goes with the agent
                self._agent.deregisterMem(pieces, self._backends)

    def describe(self) -> bytes:
        """See Engine.describe."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def meet(self, description: bytes, epoch: bytes) -> _NixlPeer:
        """See Engine.meet. The epoch says nothing more: a description bears a name that is used once."""
        known = self._peers.get(description)
        if known is None:
            try:
                name = self._agent.loadRemoteMD(description)
            except Exception as error:
                raise TransferError(f"nixl: a peer's description is of no use: {error}") from error
            known = self._peers[description] = _Known(name, description)
        known.num_users += 1
        return _NixlPeer(self, known)

    def close(self) -> None:
        """See Engine.close: with its agent everything ends that could still write."""
        for handle in list(self._handles):
            self._release(handle)
        for known in list(self._peers.values()):
            self._forget(known)
        for address in list(self._registered):
            self.unregister(address)
        self._agent = None

    # ---- for peers and reads

    def _begin(self, known: _Known, own: Sequence[Any], theirs: Sequence[Any]) -> int:
        """Begin to read pieces, as (address, bytes, 0); what NIXL knows the read by."""
        api = self._api
        local, remote = (
            api.nixlXferDList(api.DRAM_SEG, numpy.array(pieces, numpy.uint64))
            for pieces in (own, theirs)
        )
        handle: int = self._agent.createXferReq(
            api.NIXL_READ, local, remote, known.name, "", self._backends
        )
        self._handles.add(handle)
        try:
            self._agent.postXferReq(handle, "")
        except BaseException:
            self._release(handle)
            raise
        return handle

    def _is_over(self, handle: int) -> bool:
        is_over: bool = self._agent.getXferStatus(handle) == self._api.NIXL_SUCCESS
        return is_over

    def _release(self, handle: int) -> None:
        """Give a read back; one that is under way is cancelled."""
        self._handles.discard(handle)
        with contextlib.suppress(Exception):  # it says that the read was under way
            self._agent.releaseXferReq(handle)

    def _forget(self, known: _Known) -> None:
        """Break all connections to a peer: after that it writes nothing here."""
        if self._peers.get(known.description) is known:
            del self._peers[known.description]
            with contextlib.suppress(Exception):  # NIXL has forgotten it by itself
                self._agent.invalidateRemoteMD(known.name)


class _Known:
    """A peer's agent that is loaded, and how many connections use it."""

    def __init__(self, name: Any, description: bytes) -> None:
        self.name, self.description = name, description
        self.num_users = 0


class _NixlPeer:
    """See pull.engine.Peer."""

    def __init__(self, engine: NixlEngine, known: _Known) -> None:
        self._engine, self._known = engine, known
        self._is_closed = False

    def read(self, own: Sequence[int], theirs: Sequence[int], num_bytes: Sequence[int]) -> Read:
        """See Peer.read."""
        pieces = [
            [(address, size, 0) for address, size in zip(addresses, num_bytes, strict=True)]
            for addresses in (own, theirs)
        ]
        return _NixlRead(self._engine, self._known, *pieces)

    def close(self) -> None:
        """See Peer.close."""
        if self._is_closed:
            return
        self._is_closed = True
        self._known.num_users -= 1
        if not self._known.num_users:
            self._engine._forget(self._known)


class _NixlRead:
    """See pull.engine.Read. One that fails takes its peer's connections along: some of its pieces may be under way."""

    def __init__(
        self, engine: NixlEngine, known: _Known, own: Sequence[Any], theirs: Sequence[Any]
    ) -> None:
        self._engine, self._known = engine, known
        self._handle: int | None = None
        try:
            self._handle = engine._begin(known, own, theirs)
        except Exception as error:
            raise self._failed(error) from error

    def is_over(self) -> bool:
        """See Read.is_over."""
        if self._handle is None:
            return True
        try:
            is_over = self._engine._is_over(self._handle)
        except Exception as error:
            raise self._failed(error) from error
        if is_over:
            self._engine._release(self._handle)
            self._handle = None
        return is_over

    def _failed(self, error: Exception) -> ConnectionError:
        if self._handle is not None:
            self._engine._release(self._handle)
            self._handle = None
        self._engine._forget(self._known)
        return ConnectionError(f"nixl: a read failed: {error}")


def _load() -> Any:
    try:
        from nixl import _bindings
    except ImportError as error:
        raise ConfigError(f"--kv-transports: nixl is not installed ({error}): {INSTALL}") from error
    return _bindings
