"""The front's end of the two queues: owns the engine process, from its start to its last exit
status.

    STARTING --EngineReady--> READY --stop()--> STOPPING --> ENDED
    STARTING --EngineFailed or end of file--> ENDED          wait_ready raises what was wrong
    READY    --end of file--> ENDED                          the engine is dead: `ended` names
    EngineDeadError

A frame is a little-endian uint32 length and that many bytes of msgpack. Nothing here blocks the
event loop. The engine ends when its inbound pipe ends, so it never outlives its front.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import sys
from collections.abc import Callable, Sequence

import msgspec

from core.errors import EngineDeadError, ServeError
from engine.config import EngineConfig
from engine.messages import (
    EngineFailed,
    EngineReady,
    EngineStopped,
    Shutdown,
    ToEngine,
    ToFront,
)
from services.rpc.status import error_of_kind

ENGINE_COMMAND = (sys.executable, "-m", "engine.process")
STOP_GRACE_S = 3.0
"""How long an engine may take to leave after its queue has ended, before it is killed."""
LOADING_GRACE_S = 0.5
"""The same for an engine that is still loading."""

_LENGTH = struct.Struct("<I")
_log = logging.getLogger(__name__)


def encode_frame(message: ToEngine | ToFront) -> bytes:
    """One message as it lies in a pipe."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader(asyncio.Protocol):
    """Cuts a byte stream into frames; calls on_frame for each and on_end once."""

    def __init__(self, on_frame: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        """Deliver every frame that is complete now."""
        if not self._buffer and _is_one_frame(data):  # nearly always: a step is written at once
            self._on_frame(data[_LENGTH.size :])
            return
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(self._buffer, start)[0]
            if end > len(self._buffer):
                break
            self._on_frame(bytes(self._buffer[begin:end]))
            start = end
        del self._buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone; a frame that was cut short is dropped."""
        self._on_end()


def _is_one_frame(data: bytes) -> bool:
    size = _LENGTH.size
    return len(data) >= size and size + _LENGTH.unpack_from(data)[0] == len(data)


class EngineClient:
    """Starts an engine, speaks with it, and knows when it is gone.

    on_message is called for every message from the engine, in order, on the event loop's thread.
    command: what to start instead of the real engine, with the same arguments; for tests.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[ToFront], None],
        *,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self._config = config
        self._on_message = on_message
        self._command = command
        self._decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineReady] = loop.create_future()
        self.ended: asyncio.Future[ServeError | None] = loop.create_future()
        """Done when the engine is gone: with its error, or None when it was asked to stop."""
        self._failure: ServeError | None = None
        self._stopping = False
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._reader: asyncio.ReadTransport | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None before it was started."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process and begin to read."""
        to_engine_read, to_engine_write = os.pipe()
        to_front_read, to_front_write = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--config-json", msgspec.json.encode(self._config).decode()),
                *("--in-fd", str(to_engine_read), "--out-fd", str(to_front_write)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(to_engine_read, to_front_write),
                env=engine_environment(self._config),
            )
        finally:
            os.close(to_engine_read)
            os.close(to_front_write)
        loop = asyncio.get_running_loop()
        self._writer, _ = await loop.connect_write_pipe(
            asyncio.BaseProtocol, os.fdopen(to_engine_write, "wb", buffering=0)
        )
        self._reader, _ = await loop.connect_read_pipe(
            lambda: FrameReader(self._on_frame, self._on_end),
            os.fdopen(to_front_read, "rb", buffering=0),
        )

    async def wait_ready(self) -> EngineReady:
        """What the loaded engine is; raises the error that it refused to start with."""
        return await asyncio.shield(self._ready)

    def send(self, message: ToEngine) -> None:
        """Tell the engine; a message to an engine that is gone is dropped, `ended` tells of it."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    async def stop(self, drain_ms: int = 0) -> None:
        """Ask the engine to stop, and make sure that it is gone when this returns. Bounded;
        idempotent.
        """
        self._stopping = True
        if self._process is None:
            return
        is_loading = not self._ready.done()
        self.send(Shutdown(drain_ms))
        if is_loading or not await self._leaves_within(drain_ms / 1000.0 + STOP_GRACE_S):
            # The end of its queue ends an engine at once; one that still loads holds nothing yet.
            self._close_writer()
            if not await self._leaves_within(LOADING_GRACE_S if is_loading else STOP_GRACE_S):
                _log.warning("engine %d did not stop when asked; it is killed", self._process.pid)
                self.kill()
        await self._process.wait()
        self._close_writer()
        if self._reader is not None:
            self._reader.close()

    def kill(self) -> None:
        """End the engine process at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _leaves_within(self, seconds: float) -> bool:
        assert self._process is not None
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _on_frame(self, body: bytes) -> None:
        message = self._decoder.decode(body)
        if isinstance(message, EngineReady) and not self._ready.done():
            self._ready.set_result(message)
        elif isinstance(message, EngineFailed):
            self._failure = error_of_kind(message.error_kind, message.message)
        elif isinstance(message, EngineStopped):
            self._stopping = True
        self._on_message(message)

    def _on_end(self) -> None:
        error = self._failure or EngineDeadError("the engine process ended without a word")
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # read here: nobody may be waiting
        if not self.ended.done():
            self.ended.set_result(None if self._stopping and self._failure is None else error)


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """The environment of an engine: as many threads as it was given, and none that spins while it
    waits.
    """
    threads = str(config.num_threads or 1)
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
