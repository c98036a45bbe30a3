"""Mooncake's transfer engine as an engine: RDMA where it finds a card for it, else tcp.

Its calls for several pieces wait for the last one on a core that they keep busy, and look at a batch only so. So each
piece is a batch of one here, of which can be asked whether it is over. Two things still wait, and hold up the other
connections of the receiver: the first read of a peer (an exchange of descriptions with its engine), and a peer's
address that does not answer.

Over tcp its port lets whoever connects read and write what is registered: for networks where only workers are.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

from core.errors import ConfigError, TransferError
from kvtransfer.transports.pull.engine import Read, address_of

INSTALL = "pip install --no-deps mooncake-transfer-engine-non-cuda, and the system's libibverbs1"
_NO_METADATA_SERVER = "P2PHANDSHAKE"
_OVER, _FAILED, _TIMED_OUT = 1, -1, -2
_NO_BATCH = (1 << 64) - 1

logger = logging.getLogger(__name__)


class MooncakeEngine:
    """See pull.engine.Engine.

    A peer is known by the host and port of its engine, and what was learnt of it is kept there. So one that has come
    back to the same port is met with a fresh engine of ours; the old one goes with the last connection that uses it.
    """

    def __init__(self, host: str) -> None:
        """host: numeric, where others reach this one. Raises ConfigError where the package does not start."""
        self._make = _load()
        self._host = host
        self._registered: dict[int, int] = {}  # address -> bytes
        self._epochs: dict[str, bytes] = {}
        self._all: weakref.WeakSet[_Incarnation] = weakref.WeakSet()
        try:
            self._now = self._start()
        except TransferError as error:
            raise ConfigError(f"--kv-transports: {error.message}") from error

    def _start(self) -> _Incarnation:
        engine = self._make()
        if engine.initialize(self._host, _NO_METADATA_SERVER, "tcp", ""):
            raise TransferError(f"mooncake does not start on {self._host}")
        for address, num_bytes in self._registered.items():
            if engine.register_memory(address, num_bytes):
                raise TransferError(f"mooncake cannot register {num_bytes} bytes again")
        incarnation = _Incarnation(engine)
        self._all.add(incarnation)
        return incarnation

    def register(self, memory: memoryview) -> int:
        """See Engine.register."""
        address = address_of(memory)
        if self._now.engine.register_memory(address, len(memory)):
            raise TransferError(f"mooncake cannot register {len(memory)} bytes")
        self._registered[address] = len(memory)
        return address

    def unregister(self, address: int) -> None:
        """See Engine.unregister."""
        if self._registered.pop(address, None) is not None:
            for incarnation in self._all:
                if incarnation.engine is not None:
                    incarnation.engine.unregister_memory(address)

    def describe(self) -> bytes:
        """See Engine.describe: where its engine is asked."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._now.engine.get_rpc_port()}".encode()

    def meet(self, description: bytes, epoch: bytes) -> _MooncakePeer:
        """See Engine.meet."""
        try:
            name = description.decode("ascii")
        except UnicodeDecodeError as error:
            raise TransferError("mooncake: a peer's description is no address") from error
        if self._now.engine is None or self._epochs.setdefault(name, epoch) != epoch:
            self._epochs = {name: epoch}
            self._now = self._start()
        return _MooncakePeer(self._now, name)

    def close(self) -> None:
        """See Engine.close."""
        for address in list(self._registered):
            self.unregister(address)
        for incarnation in self._all:
            incarnation.engine = None


class _Incarnation:
    """One engine of ours. It ends when this lets go of it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine


class _MooncakePeer:
    """See pull.engine.Peer."""

    def __init__(self, incarnation: _Incarnation, name: str) -> None:
        self._incarnation, self._name = incarnation, name

    def read(self, own: Sequence[int], theirs: Sequence[int], num_bytes: Sequence[int]) -> Read:
        """See Peer.read."""
        pieces = list(zip(own, theirs, num_bytes, strict=True))
        return _MooncakeRead(self._incarnation, self._name, pieces)

    def close(self) -> None:
        """See Peer.close: nothing is kept of it beyond the engine."""


class _MooncakeRead:
    """See pull.engine.Read. A failure is told when every piece has ended."""

    def __init__(
        self, incarnation: _Incarnation, name: str, pieces: Sequence[tuple[int, int, int]]
    ) -> None:
        self._incarnation, self._name = incarnation, name
        self._pending: list[int] = []
        self._has_failed = False
        if incarnation.engine is None:
            raise ConnectionError(f"mooncake: the engine that reads from {name} has ended")
        for own, theirs, num_bytes in pieces:
            try:
                batch = incarnation.engine.batch_transfer_async_read(
                    name, [own], [theirs], [num_bytes]
                )
            except Exception as error:  # noqa: BLE001 - whatever the binding raises
                logger.warning("mooncake cannot read from %s: %s", name, error)
                batch = _NO_BATCH
            if batch in (0, _NO_BATCH):
                self._has_failed = True
                return
            self._pending.append(batch)

    def is_over(self) -> bool:
        """See Read.is_over."""
        self._pending = [batch for batch in self._pending if not self._has_ended(batch)]
        if self._pending:
            return False
        if self._has_failed:
            raise ConnectionError(f"mooncake: a read from {self._name} failed")
        return True

    def _has_ended(self, batch: int) -> bool:
        """Whether a piece has ended; it may be asked once more only when it has not."""
        if self._incarnation.engine is None:
            self._has_failed = True
            return True
        state = self._incarnation.engine.transfer_check_status(batch)
        self._has_failed |= state in (_FAILED, _TIMED_OUT)
        if state == _TIMED_OUT:  # some of it may still be written: not when the engine is gone
            self._incarnation.engine = None
        return state in (_OVER, _FAILED, _TIMED_OUT)


def _load() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise ConfigError(
            f"--kv-transports: mooncake is not installed ({error}): {INSTALL}"
        ) from error
    return TransferEngine
