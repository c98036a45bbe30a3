"""P's side of Prefill: one stream a session attempt, between D's front and this worker's engine.

    request --AddPrefill--> queued --AnnouncePrefill--> announced <--> declined
    announced --PrefillGranted--> computing --FirstTokens--> answered
    any --stream ends, for whatever reason--> PrefillEnded, once

The engine decides; this module relays. A session that the engine refuses gets the reason and the
end of its stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

from core.errors import InvalidRequest, ServeError
from core.ids import RequestId, SessionId
from core.worker_info import WorkerInfo
from engine.messages import (
    AnnouncePrefill,
    FirstTokens,
    PrefillDeclined,
    PrefillEnded,
    PrefillGranted,
    PrefillRenewed,
    PrefillRoom,
    RefusePrefill,
    ToEngine,
)
from services.rpc.protocol import check_version
from services.rpc.record_codec import encode_layout
from services.rpc.status import error_kind
from services.rpc.v1 import baton_pb2 as pb
from services.worker.codec import decode_prefill_request, encode_output
from services.worker.tasks import background

FromEngine = AnnouncePrefill | FirstTokens | RefusePrefill
_Key = tuple[SessionId, int]

COMPLETE = "complete"
GIVEN_UP = "the decode worker gave the session up or is lost"
"""Why a session ended. A cancel, a lost connection and a half-close without a word look alike here.
"""


class PrefillSessions:
    """Every open Prefill stream of this worker. send: hands a message to the engine."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._outboxes: dict[_Key, asyncio.Queue[pb.PrefillFrame | None]] = {}
        self._request_ids: dict[_Key, RequestId] = {}

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return len(self._outboxes)

    def names(self) -> Iterable[RequestId]:
        """Ids of the requests whose sessions are open, in order of their arrival."""
        return self._request_ids.values()

    async def serve(
        self, info: WorkerInfo, frames: AsyncIterator[pb.DecodeFrame]
    ) -> AsyncGenerator[pb.PrefillFrame, None]:
        """Run one stream: yields what is to be written; ends when either side has ended the
        session.
        """
        first = await anext(frames, None)
        try:
            key = self._admit(info, first)
        except ServeError as error:
            yield refused_frame(error)
            return
        outbox = self._outboxes[key]
        reasons: list[str] = []
        try:
            yield pb.PrefillFrame(
                accepted=pb.PrefillAccepted(
                    prefill_worker_id=info.id,
                    prefill_worker_epoch=info.epoch,
                    layout=encode_layout(info.layout),
                )
            )
            async with background(self._read(key, frames, outbox, reasons)):
                while (frame := await outbox.get()) is not None:
                    yield frame
        finally:
            self._end(key, reasons[0] if reasons else GIVEN_UP)

    def handle(self, message: FromEngine) -> None:
        """Relay what the engine says of a session; of an ended one it is ignored."""
        outbox = self._outboxes.get((message.session_id, message.attempt))
        if outbox is None:
            return
        outbox.put_nowait(_frame_of(message))
        if isinstance(message, RefusePrefill):
            outbox.put_nowait(None)

    def fail(self, error: ServeError) -> None:
        """End every stream with this error: the engine is gone."""
        for outbox in self._outboxes.values():
            outbox.put_nowait(refused_frame(error))
            outbox.put_nowait(None)

    def _admit(self, info: WorkerInfo, first: pb.DecodeFrame | None) -> _Key:
        if first is None or first.WhichOneof("frame") != "request":
            raise InvalidRequest("the first frame of a Prefill stream must be a request")
        request = first.request
        check_version(request.protocol_version, f"decode worker {request.decode_worker_id!r}")
        if not info.role.serves_prefill:
            raise InvalidRequest(f"worker {info.id!r} has role {info.role.value}: no prefill here")
        add = decode_prefill_request(request)
        key = (add.session_id, add.attempt)
        if key in self._outboxes:
            raise InvalidRequest(f"session {add.session_id} attempt {add.attempt} is already open")
        self._outboxes[key] = asyncio.Queue()
        self._request_ids[key] = add.request.id
        self._send(add)
        return key

    async def _read(
        self,
        key: _Key,
        frames: AsyncIterator[pb.DecodeFrame],
        outbox: asyncio.Queue[pb.PrefillFrame | None],
        reasons: list[str],
    ) -> None:
        try:
            async for frame in frames:
                if frame.WhichOneof("frame") == "complete":
                    reasons.append(COMPLETE)
                    return
                message = _message_of(key, frame)
                if message is not None:
                    self._send(message)
        finally:
            outbox.put_nowait(None)

    def _end(self, key: _Key, reason: str) -> None:
        del self._outboxes[key]
        del self._request_ids[key]
        self._send(PrefillEnded(*key, reason=reason))


def refused_frame(error: ServeError) -> pb.PrefillFrame:
    """The frame that tells D why it gets nothing here."""
    return pb.PrefillFrame(
        refused=pb.PrefillRefused(error_kind=error_kind(error), message=error.message)
    )


def _frame_of(message: FromEngine) -> pb.PrefillFrame:
    match message:
        case AnnouncePrefill():
            announce = pb.PrefillAnnounce(num_cached_tokens=message.num_cached_tokens)
            return pb.PrefillFrame(announce=announce)
        case FirstTokens():
            done = pb.PrefillDone(
                first_outputs=[encode_output(output) for output in message.first_outputs],
                num_cached_tokens=message.num_cached_tokens,
                sends_kv=message.sends_kv,
            )
            return pb.PrefillFrame(done=done)
        case RefusePrefill():
            refused = pb.PrefillRefused(error_kind=message.error_kind, message=message.message)
            return pb.PrefillFrame(refused=refused)


def _message_of(key: _Key, frame: pb.DecodeFrame) -> ToEngine | None:
    match frame.WhichOneof("frame"):
        case "grant":
            return PrefillGranted(*key, list(frame.grant.first_missing_block))
        case "not_now":
            return PrefillDeclined(*key)
        case "room":
            return PrefillRoom(*key)
        case "renew":
            return PrefillRenewed(*key, frame.renew.lease_remaining_ms)
        case _:
            return None  # a frame of a newer peer: fields are only added, so it can be left out
