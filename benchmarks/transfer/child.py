"""P in a process of its own. Told on standard input, answers on standard output, a line each.

pool RUN_BYTES CHECKED [KIND ...]  makes a pool and senders, of engines too; "made"
push KIND ADDRESS SESSION SECRET   sends all blocks of the pool; "sent" when D has acknowledged all
drop                               gives pool and senders back; "dropped"
socket PORT RUN_BYTES              sends as many plain bytes to a listener; "sent"
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from benchmarks.transfer import pulls
from benchmarks.transfer.pools import (
    BLOCK_SIZE,
    POOL_BYTES,
    layout_of,
    num_blocks_of,
    settle,
)
from core.ids import BlockId, SessionId
from core.kv_layout import KVLayout
from kvtransfer.config import TransferConfig
from kvtransfer.events import BlocksAcknowledged, MoverEvent, SessionDrained
from kvtransfer.pool_memory import PoolMemory
from kvtransfer.session import SendSession, SourceBlock
from kvtransfer.transports.pull.sender import PullSender
from kvtransfer.transports.shm.sender import ShmSender
from kvtransfer.transports.tcp.sender import TcpSender

PUSH_BLOCKS = 32


class Prefill:
    """A pool and its senders."""

    def __init__(self, run_bytes: int, engines: Sequence[str], *, is_checked: bool) -> None:
        self._layout: KVLayout = layout_of(run_bytes)
        self._num_blocks = num_blocks_of(run_bytes)
        self.memory = PoolMemory(self._num_blocks, run_bytes)
        for block in range(1, self._num_blocks):  # every block another one
            start = block * run_bytes
            self.memory.buffer[start : start + run_bytes] = bytes([block % 251]) * run_bytes
        self._sources = [
            SourceBlock(block - 1, BlockId(block), BLOCK_SIZE)
            for block in range(1, self._num_blocks)
        ]
        config = TransferConfig(shm_checksums=is_checked)
        self._num_acknowledged = 0
        self._is_over = threading.Event()
        self._senders: dict[str, Any] = {
            "tcp": TcpSender(self.memory.buffer, self._layout, self._hear, config),
            "shm": ShmSender(self.memory, self._layout, self._hear, config),
        }
        for kind in engines:
            engine = pulls.engine(kind, is_read=True)
            self._senders[kind] = PullSender(
                kind, engine, self.memory, self._layout, self._hear, config
            )

    def push(self, kind: str, address: str, session: int, secret: bytes) -> None:
        """All blocks; returns when D has them."""
        sender, key = self._senders[kind], (SessionId(session), 0)
        self._num_acknowledged = 0
        self._is_over.clear()
        sender.open(SendSession(*key, secret, address))
        for start in range(0, len(self._sources), PUSH_BLOCKS):
            sender.push(*key, 0, self._sources[start : start + PUSH_BLOCKS], 0, 1)
        self._is_over.wait()
        self._is_over.clear()
        sender.close_session(*key)
        self._is_over.wait()

    def close(self) -> None:
        """Give all back."""
        for sender in self._senders.values():
            sender.close()
        self.memory.close()

    def _hear(self, event: MoverEvent) -> None:
        if isinstance(event, BlocksAcknowledged):
            self._num_acknowledged += len(event.positions)
            if self._num_acknowledged == self._num_blocks - 1:
                self._is_over.set()
        elif isinstance(event, SessionDrained):
            self._is_over.set()
        else:
            print("failed", event, flush=True)


def send_plain(port: int, run_bytes: int) -> None:
    """The raw socket's side of P."""
    data = memoryview(bytearray(b"\1" * POOL_BYTES))  # written, so that reading it reads memory
    with socket.create_connection(("127.0.0.1", port)) as sock:
        for start in range(0, POOL_BYTES // run_bytes * run_bytes, run_bytes):
            sock.sendall(data[start : start + run_bytes])


def main() -> None:
    """Obey until the end of input."""
    settle()
    prefill: Prefill | None = None
    for line in sys.stdin:
        match line.split():
            case ["pool", run_bytes, checked, *engines]:
                prefill = Prefill(int(run_bytes), engines, is_checked=checked == "1")
                print("made", flush=True)
            case ["push", kind, address, session, secret]:
                assert prefill is not None
                prefill.push(kind, address, int(session), bytes.fromhex(secret))
                print("sent", flush=True)
            case ["drop"]:
                assert prefill is not None
                prefill.close()
                prefill = None
                print("dropped", flush=True)
            case ["socket", port, run_bytes]:
                send_plain(int(port), int(run_bytes))
                print("sent", flush=True)
    if prefill is not None:
        prefill.close()


if __name__ == "__main__":
    main()
