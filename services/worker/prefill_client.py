"""D's side of Prefill: the streams that this worker's engine asked for, one a session attempt.

    CallPrefill --connect, PrefillRequest--> calling --accepted, announce--> PrefillAnnounced
    GrantPrefill / DeclinePrefill / RoomForPrefill --> frames to P; a renewal every third of the
    lease
    done --> PrefillAnswered
    EndPrefill(completed) --> PrefillComplete, half-close     EndPrefill(given up) --> cancel
    refused, stream lost, ended early, no answer in time --> PrefillLost, once, unless EndPrefill
    came first

Channels are kept an address. A refused connection fails at once, a silent one after
ACCEPT_TIMEOUT_S, a peer that stops in mid-session with the channel's keepalive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc.aio

from core.errors import RequestError, ServeError, WorkerLostError
from core.ids import SessionId
from core.kv_layout import KVLayout
from core.worker_info import WorkerInfo
from engine.messages import (
    CallPrefill,
    DeclinePrefill,
    EndPrefill,
    GrantPrefill,
    PrefillAnnounced,
    PrefillAnswered,
    PrefillLost,
    RoomForPrefill,
    ToEngine,
    TransportOffer,
)
from services.rpc.channel import open_channel
from services.rpc.record_codec import decode_layout
from services.rpc.status import error_kind, error_of_kind, error_of_status
from services.rpc.v1 import baton_pb2 as pb
from services.rpc.v1 import baton_pb2_grpc as pb_grpc
from services.worker.codec import decode_output, encode_prefill_request

ACCEPT_TIMEOUT_S = 5.0
"""How long P's front may take to accept a session: no work of its engine is in it."""

CLOSE_GRACE_S = 5.0
"""How long P's front may take to end a stream that is complete, before it is cancelled."""

FromEngine = CallPrefill | GrantPrefill | DeclinePrefill | RoomForPrefill | EndPrefill
_Key = tuple[SessionId, int]
_log = logging.getLogger(__name__)


class PrefillCalls:
    """Every Prefill stream that this worker has opened. send: hands a message to the engine."""

    def __init__(
        self,
        send: Callable[[ToEngine], None],
        info: WorkerInfo,
        transports: list[TransportOffer],
    ) -> None:
        self._send = send
        self._info = info
        self._transports = transports
        self._calls: dict[_Key, _PrefillCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return len(self._tasks)

    def handle(self, message: FromEngine) -> None:
        """Act on what the engine says of a session; of an ended one it is ignored."""
        key = (message.session_id, message.attempt)
        if isinstance(message, CallPrefill):
            self._open(key, message)
            return
        call = self._calls.get(key)
        if call is None:
            return
        if isinstance(message, EndPrefill):
            del self._calls[key]
            call.end(message.completed)
        else:
            call.post(_frame_of(message))

    async def close(self) -> None:
        """Cancel every stream and close the channels."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    def _open(self, key: _Key, message: CallPrefill) -> None:
        call = _PrefillCall(key, message.candidate, message.lease_remaining_ms)
        call.post(
            pb.DecodeFrame(request=encode_prefill_request(message, self._info, self._transports))
        )
        self._calls[key] = call
        task = asyncio.create_task(self._run(key, call), name=f"prefill-{key[0]}-{key[1]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, key: _Key, call: _PrefillCall) -> None:
        try:
            await call.run(self._channel(call.candidate), self._send)
            error: ServeError = WorkerLostError(f"{call.candidate}: ended the session early")
        except grpc.aio.AioRpcError as failure:
            error = error_of_status(failure, call.candidate)
        except ServeError as refusal:
            error = refusal
        if self._calls.get(key) is call:
            del self._calls[key]
            retryable = not isinstance(error, RequestError)
            self._send(PrefillLost(*key, error_kind(error), error.message, retryable))

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        return channel


class _PrefillCall:
    """One stream: a writer and a renewer beside the loop that reads."""

    def __init__(self, key: _Key, candidate: str, lease_ms: int) -> None:
        self.candidate = candidate
        self._key = key
        self._lease_ms = lease_ms
        self._frames: asyncio.Queue[pb.DecodeFrame | None] = asyncio.Queue()
        self._given_up = asyncio.Event()

    def post(self, frame: pb.DecodeFrame) -> None:
        """Queue a frame to P."""
        self._frames.put_nowait(frame)

    def end(self, completed: bool) -> None:
        """D needs nothing more: tell P so and half-close, or cancel."""
        if completed:
            self.post(pb.DecodeFrame(complete=pb.PrefillComplete()))
            self._frames.put_nowait(None)
            asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._given_up.set)
        else:
            self._given_up.set()

    async def run(self, channel: grpc.aio.Channel, send: Callable[[ToEngine], None]) -> None:
        """Speak with P until the stream ends; raises what ended it, returns at a clean end.

        A read raises the stream's status when that is not OK.
        """
        stream = pb_grpc.WorkerStub(channel).Prefill()
        helpers = [
            asyncio.create_task(self._write(stream)),
            asyncio.create_task(self._renew()),
            asyncio.create_task(self._cancel_when_given_up(stream)),
        ]
        try:
            layout = await self._await_accepted(stream)
            while (frame := await stream.read()) is not grpc.aio.EOF:
                self._relay(frame, layout, send)
        except asyncio.CancelledError:
            # The stream was cancelled (given up), or this task was: either way nobody waits for more.
            if not self._given_up.is_set():
                raise
        finally:
            for helper in helpers:
                helper.cancel()
            stream.cancel()

    async def _await_accepted(self, stream: grpc.aio.StreamStreamCall) -> KVLayout:
        """P's layout."""
        try:
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                frame = await stream.read()
        except TimeoutError:
            message = f"{self.candidate}: no answer within {ACCEPT_TIMEOUT_S:g} s"
            raise WorkerLostError(message) from None
        if frame is grpc.aio.EOF:
            raise WorkerLostError(f"{self.candidate}: ended the session without a word")
        if frame.WhichOneof("frame") == "refused":
            raise _refusal_of(frame.refused)
        return decode_layout(frame.accepted.layout)

    def _relay(
        self, frame: pb.PrefillFrame, layout: KVLayout, send: Callable[[ToEngine], None]
    ) -> None:
        match frame.WhichOneof("frame"):
            case "announce":
                send(PrefillAnnounced(*self._key, frame.announce.num_cached_tokens, layout))
            case "done":
                outputs = [decode_output(output) for output in frame.done.first_outputs]
                cached, sends_kv = frame.done.num_cached_tokens, frame.done.sends_kv
                send(PrefillAnswered(*self._key, outputs, cached, sends_kv))
            case "refused":
                raise _refusal_of(frame.refused)

    async def _write(self, stream: grpc.aio.StreamStreamCall) -> None:
        # A failed write means that the stream has ended; the reading loop learns why.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (frame := await self._frames.get()) is not None:
                await stream.write(frame)
            await stream.done_writing()

    async def _renew(self) -> None:
        renewal = pb.DecodeFrame(renew=pb.PrefillRenew(lease_remaining_ms=self._lease_ms))
        while True:
            await asyncio.sleep(self._lease_ms / 3000.0)
            self.post(renewal)

    async def _cancel_when_given_up(self, stream: grpc.aio.StreamStreamCall) -> None:
        await self._given_up.wait()
        stream.cancel()


def _frame_of(message: GrantPrefill | DeclinePrefill | RoomForPrefill) -> pb.DecodeFrame:
    match message:
        case GrantPrefill():
            grant = pb.PrefillGrant(first_missing_block=message.first_missing_block)
            return pb.DecodeFrame(grant=grant)
        case DeclinePrefill():
            return pb.DecodeFrame(not_now=pb.PrefillNotNow())
        case RoomForPrefill():
            return pb.DecodeFrame(room=pb.PrefillRoom())


def _refusal_of(refused: pb.PrefillRefused) -> ServeError:
    return error_of_kind(refused.error_kind, refused.message)
