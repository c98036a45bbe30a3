"""Peers made of plain sockets, that a test can let say and do anything."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from crc32c import crc32c

from kvtransfer.events import SessionComplete
from kvtransfer.session import SendSession, SessionKey
from kvtransfer.transports.links import wire
from kvtransfer.transports.runs import RunHeader
from tests.kvtransfer.harness import Pair, Transfer, pair

HELLO = wire.pack_hello(wire.Hello(wire.PROTOCOL_VERSION, "test"))


def endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


class RawPeer:
    """A sender made of bytes, so that it can say anything."""

    def __init__(self, p: Pair) -> None:
        self.sock = socket.create_connection(endpoint(p.receiver.addresses[0]), timeout=10)
        self.number = 0

    def say(self, *parts: bytes) -> None:
        self.sock.sendall(b"".join(parts))

    def read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            piece = self.sock.recv(num_bytes - len(data))
            if not piece:
                break
            data += piece
        return data

    def answer(self) -> wire.Answer:
        return wire.parse_answers(memoryview(self.read(wire.ANSWER_BYTES)))[0]

    def greet(self) -> None:
        self.say(HELLO)
        assert wire.parse_hello(self.read(wire.FRAME_BYTES)).version == wire.PROTOCOL_VERSION

    def open(self, transfer: Transfer) -> None:
        self.greet()
        self.say(wire.pack_open(transfer.key, transfer.secret))
        assert self.answer().is_accepted

    def is_closed(self) -> bool:
        try:
            return self.sock.recv(1 << 16) == b""
        except ConnectionResetError:
            return True

    def run(self, p: Pair, transfer: Transfer, at: int = 0, **changes: Any) -> bytes:
        """A right RUN frame and payload of group 0, all layers; changes: what to falsify."""
        source = next(s for s in transfer.sources[0] if s.position == at)
        place = p.layout.layer_run(0, 0, len(p.layout.groups[0].layers))
        start = source.block * p.layout.block_bytes
        payload = bytes(p.source[start : start + place.num_bytes])
        self.number += 1
        header = RunHeader(
            *transfer.key, 0, 0, at, 0, 3, source.valid_slots, len(payload),
            crc32c(payload), self.number,
        )  # fmt: skip
        return wire.pack_run(header._replace(**changes)) + payload


@contextmanager
def raw_peer(p: Pair) -> Iterator[RawPeer]:
    peer = RawPeer(p)
    with closing(peer.sock):
        yield peer


@contextmanager
def tcp_pair(**options: object) -> Iterator[Pair]:
    with pair("tcp", **options) as p:
        yield p


def finish(p: Pair, *transfers: Transfer) -> None:
    p.until(lambda: all(SessionComplete(*t.key) in p.received for t in transfers))


class CuttingProxy:
    """Forwards connections to an address, each until its budget of bytes is used up.

    Answers to what was forwarded have a moment to come back before the cut.
    """

    PAUSE_S = 0.03

    def __init__(self, target: str, budgets_bytes: list[int | None]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self._target = target
        self._budgets_bytes = budgets_bytes
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        for budget in self._budgets_bytes:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(endpoint(self._target))
            self._socks += [near, far]
            for source, sink, limit in ((near, far, budget), (far, near, None)):
                thread = threading.Thread(target=self._forward, args=(source, sink, limit))
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        left = limit if limit is not None else 1 << 60
        try:
            while left and (data := source.recv(min(left, 1 << 16))):
                sink.sendall(data)
                left -= len(data)
            time.sleep(CuttingProxy.PAUSE_S if limit else 0)
        except OSError:
            pass
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for sock in self._socks:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join()
        for sock in self._socks:
            sock.close()


def open_through(p: Pair, proxy: CuttingProxy, transfer: Transfer) -> None:
    p.sender.open(SendSession(*transfer.key, transfer.secret, proxy.address))


class StubbornReceiver:
    """A D that greets, lets a session in, and then reads only what it is told to."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.sock: socket.socket | None = None

    def greet(self) -> socket.socket:
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(20)
        self.read(wire.FRAME_BYTES)
        self.sock.sendall(HELLO)
        return self.sock

    def accept(self, key: SessionKey) -> None:
        assert self.sock is not None
        self.sock.sendall(wire.pack_answer(wire.Answer(wire.FrameKind.OPEN, True, key, 0)))

    def let_in(self) -> None:
        self.greet()
        key, _ = wire.parse_open(self.read(wire.FRAME_BYTES))
        self.accept(key)

    def read(self, num_bytes: int) -> bytes:
        assert self.sock is not None
        data = bytearray()
        while len(data) < num_bytes:
            piece = self.sock.recv(num_bytes - len(data))
            assert piece, "closed"
            data += piece
        return bytes(data)

    def read_run(self) -> tuple[RunHeader, bytes]:
        frame = self.read(wire.FRAME_BYTES)
        assert frame[0] == wire.FrameKind.RUN
        header = wire.parse_run(frame)
        return header, self.read(header.num_bytes)

    def close(self) -> None:
        self.listener.close()
        if self.sock is not None:
            self.sock.close()
