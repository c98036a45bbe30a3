"""The two queues between front and engine, engine side: framed msgpack over two inherited pipes.

A frame is a little-endian uint32 length and that many bytes of msgpack. Whatever reaches the engine, from its front
or from its movers, goes through one `Inbox`, so that one thread decides everything.
"""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import threading
import time
from collections.abc import Callable

import msgspec

from engine.messages import ToEngine, ToFront
from kvtransfer.events import MoverEvent
from kvtransfer.tiers.mover import TierEvent

_LENGTH = struct.Struct("<I")
_PIPE_BYTES = 1 << 20

InboxItem = ToEngine | MoverEvent | TierEvent


class Inbox:
    """Everything the engine thread has yet to hear, in order of arrival. Any thread may post."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()

    def post(self, item: InboxItem) -> None:
        """Add one item; never blocks."""
        self._queue.put(item)

    def drain(self, wait_s: float = 0.0) -> list[InboxItem]:
        """All items there are; when there are none, waits up to wait_s seconds for the first."""
        items: list[InboxItem] = []
        try:
            if wait_s > 0:
                items.append(self._queue.get(timeout=wait_s))
            while True:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            return items


class FrontWriter:
    """Sends messages to the front. A full pipe blocks: a front that does not read stops its engine."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._encoder = msgspec.msgpack.Encoder()
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def send(self, message: ToFront) -> None:
        """Write one frame whole."""
        body = self._encoder.encode(message)
        data = memoryview(_LENGTH.pack(len(body)) + body)
        while data:
            data = data[os.write(self._fd, data) :]


class FrontReader:
    """A thread that reads the front's messages into the inbox, and calls `on_end` once when the front is gone."""

    def __init__(self, fd: int, inbox: Inbox, on_end: Callable[[], None]) -> None:
        self._file = os.fdopen(fd, "rb", buffering=_PIPE_BYTES)
        self._inbox = inbox
        self._on_end = on_end
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._thread = threading.Thread(target=self._run, name="front-reader", daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def _run(self) -> None:
        try:
            while len(head := self._file.read(_LENGTH.size)) == _LENGTH.size:
                self._inbox.post(self._decoder.decode(self._file.read(_LENGTH.unpack(head)[0])))
        finally:
            self._on_end()  # also after a message that cannot be read: an engine must not run on deaf


def monotonic_ms() -> float:
    """The engine's clock, milliseconds. Never leaves the process: what crosses is remaining time."""
    return time.monotonic() * 1000.0
