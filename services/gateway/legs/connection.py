"""One Serve stream to one worker: hello, requests out, steps in.

Owns the channel, the stream and the requests on it. Life of a connection:

    CONNECTING --hello checked--> READY --stream lost--> CONNECTING (after a pause)
    any --close--> CLOSED

Promises: a request is delivered outputs in the order the worker sent them; frames go out in the order they were posted,
the next one when the stream has taken the last; the loss of the stream ends every request on it with WorkerLostError,
once. Never retries a request.

Frames are written by a task of the connection's own, which ends with its stream: one that grpc makes for an iterator of
requests outlives a lost stream and complains when it is collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from core.errors import DeadlineExceeded, ServeError, WorkerLostError
from core.ids import Epoch
from core.request import Request
from core.worker_info import WorkerInfo, WorkerLoad
from services.rpc.channel import open_channel
from services.rpc.codec import decode_load, encode_request
from services.rpc.protocol import PROTOCOL_VERSION, check_version
from services.rpc.record_codec import decode_record
from services.rpc.status import error_of_status
from services.rpc.v1 import baton_pb2 as pb
from services.rpc.v1.baton_pb2_grpc import WorkerStub

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_HELLO_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class GatewayIdentity:
    """What a gateway says of itself on every stream."""

    id: str
    epoch: Epoch


class StreamRequest:
    """A request on a worker's stream: the ActiveRequest of the decode-owned driver."""

    __slots__ = (
        "_cancel",
        "_deadline",
        "_error",
        "_num_open",
        "_outputs",
        "_waiter",
        "id",
    )

    def __init__(
        self, request: Request, cancel: Callable[[str, str], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.id = str(request.id)
        self._cancel = cancel
        self._num_open = request.sampling.n
        self._outputs: list[pb.ChoiceOutput] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        if request.deadline_ms is not None:
            self._deadline = loop.call_later(request.deadline_ms / 1000, self._expire)

    async def receive(self) -> Sequence[pb.ChoiceOutput]:
        """See ActiveRequest."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs = self._outputs, []
        return outputs

    def deliver(self, output: pb.ChoiceOutput) -> None:
        """Called by the connection for each output of a step."""
        self._outputs.append(output)
        if output.finish_reason:
            self._num_open -= 1
        self._wake()

    @property
    def is_finished(self) -> bool:
        """Whether the worker ended every choice."""
        return self._num_open <= 0

    def fail(self, error: Exception) -> None:
        """See ActiveRequest. What was delivered before is dropped, so that the error is seen at once."""
        if self._error is None:
            self._error = error
            self._outputs = []
            self.close(type(error).__name__)
            self._wake()

    def close(self, reason: str) -> None:
        """See ActiveRequest."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._cancel(self.id, "" if self.is_finished else reason)

    def _expire(self) -> None:
        self._deadline = None
        self.fail(DeadlineExceeded("the request did not end within its time limit"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class WorkerConnection:
    """Keeps one stream to `address` open and runs requests on it."""

    def __init__(
        self,
        address: str,
        identity: GatewayIdentity,
        on_change: Callable[[WorkerConnection], None],
    ) -> None:
        self.address = address
        self.info: WorkerInfo | None = None
        self.load: WorkerLoad | None = None
        self.heard_at = 0.0
        self._lost_at = time.monotonic()
        self._identity = identity
        self._on_change = on_change
        self._outgoing: asyncio.Queue[pb.GatewayFrame] | None = None
        self._requests: dict[str, StreamRequest] = {}
        self._task = asyncio.create_task(self._keep_open(), name=f"worker {address}")

    @property
    def is_ready(self) -> bool:
        """Whether requests can be submitted now."""
        return self._outgoing is not None

    def down_s(self) -> float:
        """Seconds without a stream; 0 while there is one."""
        return 0.0 if self.is_ready else time.monotonic() - self._lost_at

    @property
    def num_requests(self) -> int:
        """Requests submitted and not yet ended or closed."""
        return len(self._requests)

    def submit(self, request: Request, prefill: Sequence[WorkerInfo]) -> StreamRequest:
        """Send a request; WorkerLostError when there is no stream."""
        if self._outgoing is None:
            raise WorkerLostError(f"worker at {self.address} is not connected")
        active = StreamRequest(request, self._end, asyncio.get_running_loop())
        self._requests[active.id] = active
        candidates = [
            pb.PrefillCandidate(worker_id=info.id, control_address=info.control_address)
            for info in prefill
        ]
        submit = pb.Submit(request=encode_request(request), prefill_candidates=candidates)
        self._outgoing.put_nowait(pb.GatewayFrame(submit=submit))
        return active

    def fail_requests(self, reason: str) -> None:
        """End every request: the worker fell silent, and another one may go on with them."""
        for active in list(self._requests.values()):
            active.fail(WorkerLostError(f"worker at {self.address}: {reason}"))

    async def close(self) -> None:
        """End stream and requests for good. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _end(self, request_id: str, cancel_reason: str) -> None:
        if self._requests.pop(request_id, None) is None or not cancel_reason:
            return
        if self._outgoing is not None:
            cancel = pb.Cancel(request_id=request_id, reason=cancel_reason)
            self._outgoing.put_nowait(pb.GatewayFrame(cancel=cancel))

    async def _keep_open(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            reason = "the worker ended the stream"
            try:
                async with open_channel(self.address) as channel:
                    await self._serve(channel)
            except grpc.aio.AioRpcError as error:
                reason = str(error_of_status(error, self.address))
            except (ServeError, TimeoutError) as error:
                reason = str(error) or "no hello in time"
            except asyncio.CancelledError:
                if self._task.cancelling():
                    raise
                reason = "a frame could not be written"  # the writer has cancelled the stream
            finally:
                was_ready = self._lost()
            logger.log(logging.INFO if was_ready else logging.DEBUG, "%s: %s", self.address, reason)
            pause_s = _FIRST_PAUSE_S if was_ready else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        """Run one stream to its end."""
        outgoing: asyncio.Queue[pb.GatewayFrame] = asyncio.Queue()
        call = WorkerStub(channel).Serve()
        writing = asyncio.create_task(self._write(call, outgoing), name=f"to {self.address}")
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                frame = await call.read()
            self._accept_hello(frame)
            self._outgoing = outgoing
            self._on_change(self)
            while (frame := await call.read()) is not grpc.aio.EOF:
                self._take(frame)
        finally:
            call.cancel()
            writing.cancel()
            await asyncio.wait([writing])

    async def _write(
        self, call: grpc.aio.StreamStreamCall, outgoing: asyncio.Queue[pb.GatewayFrame]
    ) -> None:
        """Write the hello and then what is posted, until the stream ends; a stream that cannot be written to ends."""
        hello = pb.GatewayHello(
            protocol_version=PROTOCOL_VERSION,
            gateway_id=self._identity.id,
            gateway_epoch=self._identity.epoch,
        )
        try:
            # A write that fails because the stream has ended is no news: the reading loop learns why.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                frame = pb.GatewayFrame(hello=hello)
                while True:
                    await call.write(frame)
                    frame = await outgoing.get()
        except Exception:
            logger.exception("%s: a frame could not be written", self.address)
        finally:
            call.cancel()

    def _accept_hello(self, frame: pb.WorkerFrame) -> None:
        if frame is grpc.aio.EOF or frame.WhichOneof("frame") != "hello":
            raise WorkerLostError(f"worker at {self.address} does not begin with a hello")
        check_version(frame.hello.protocol_version, f"worker at {self.address}")
        self.info = decode_record(frame.hello.record)
        self.load = None
        self.heard_at = time.monotonic()

    def _take(self, frame: pb.WorkerFrame) -> None:
        self.heard_at = time.monotonic()
        if frame.HasField("step"):
            requests = self._requests
            for output in frame.step.outputs:
                active = requests.get(output.request_id)
                if active is not None:
                    active.deliver(output)
        elif frame.HasField("load"):
            self.load = decode_load(frame.load)

    def _lost(self) -> bool:
        """The stream is gone, and with it every request on it. Returns whether there was one."""
        was_ready, self._outgoing = self.is_ready, None
        for active in list(self._requests.values()):
            active.fail(WorkerLostError(f"worker at {self.address} is gone"))
        self._requests.clear()
        if was_ready:
            self._lost_at = time.monotonic()
            self._on_change(self)
        return was_ready
