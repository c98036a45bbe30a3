"""The Serve streams of a worker: who owns which request, and what waits to be written to whom.

    submitted --AddRequest--> open --last choice finished--> gone
    open --stream lost, AbortRequest--> orphaned --last choice finished--> gone

An engine step becomes at most one frame a stream. A request id belongs to one stream; a second use,
also while the first is ending, is refused, so that an answer never reaches another's stream. Loads
that nobody has read yet are replaced, never queued.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from core.errors import InvalidRequest, ModelNotFound, ServeError, WorkerLostError
from core.ids import RequestId
from core.request import MAX_CHOICES
from core.worker_info import WorkerLoad
from engine.messages import AbortRequest, AddRequest, ChoiceOutput, ToEngine
from services.rpc.codec import decode_request, encode_load
from services.rpc.status import error_kind
from services.rpc.v1 import baton_pb2 as pb
from services.worker.codec import fill_output

_log = logging.getLogger(__name__)


class GatewayStream:
    """What waits to be written to one gateway: frames with outputs in order, then the latest load,
    then the end.
    """

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.request_ids: set[RequestId] = set()
        self._frames: deque[pb.WorkerFrame] = deque()
        self._load: WorkerLoad | None = None
        self._named: tuple[str, ...] = ()
        self._ended = False
        self._error: ServeError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def post_frame(self, frame: pb.WorkerFrame) -> None:
        """Queue one frame with outputs."""
        self._frames.append(frame)
        self._wake()

    def post_load(self, load: WorkerLoad) -> None:
        """Report this load with the next frames, instead of one that has not been written yet."""
        self._load = load
        self._named = load.named_request_ids
        self._wake()

    def post_load_if_named(self, load: WorkerLoad) -> None:
        """Report this load now if it names other requests than the last report did."""
        if load.named_request_ids != self._named:
            self.post_load(load)

    def end(self, error: ServeError | None = None) -> None:
        """End the stream once everything queued is written: cleanly, or with this error."""
        self._ended = True
        self._error = self._error or error
        self._wake()

    async def next_frame(self) -> pb.WorkerFrame | None:
        """The next frame to write; None at a clean end, and the error of the end otherwise. For one
        reader.
        """
        while True:
            if self._frames:
                return self._frames.popleft()
            if self._load is not None:
                load, self._load = self._load, None
                return pb.WorkerFrame(load=encode_load(load))
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class _OpenRequest:
    stream: GatewayStream | None  # None once its stream is lost
    open_choices: set[int]


class GatewayStreams:
    """All Serve streams of this worker and the requests they own.

    send: hands a message to the engine. models: names that requests may use.
    """

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._streams: set[GatewayStream] = set()
        self._requests: dict[RequestId, _OpenRequest] = {}
        self._load = WorkerLoad()
        self._refusal: ServeError | None = None
        self.models: frozenset[str] = frozenset()

    @property
    def num_requests(self) -> int:
        """Requests not yet ended, orphaned ones included."""
        return len(self._requests)

    def names(self) -> Iterable[RequestId]:
        """Ids of the requests not yet ended, in order of their arrival."""
        return self._requests.keys()

    def open(self, gateway_id: str) -> GatewayStream:
        """Begin a stream; its first report is the load as of now."""
        stream = GatewayStream(gateway_id)
        stream.post_load(self._load)
        if self._refusal is not None:
            stream.end(self._refusal)
        self._streams.add(stream)
        return stream

    def lose(self, stream: GatewayStream) -> None:
        """The stream is gone: end its requests. Idempotent."""
        self._streams.discard(stream)
        for request_id in stream.request_ids:
            self._requests[request_id].stream = None
            self._send(
                AbortRequest(request_id, f"the stream of gateway {stream.gateway_id} is lost")
            )
        stream.request_ids.clear()

    def handle(self, stream: GatewayStream, frame: pb.GatewayFrame) -> None:
        """Act on a frame that a gateway sent after its hello."""
        match frame.WhichOneof("frame"):
            case "submit":
                self._submit(stream, frame.submit)
            case "cancel":
                self._cancel(stream, frame.cancel)
            case other:
                _log.warning("gateway %s sent a %s frame; ignored", stream.gateway_id, other)

    def deliver(self, outputs: Iterable[ChoiceOutput]) -> None:
        """Hand each stream its part of an engine step, as one frame."""
        frames: dict[GatewayStream, pb.WorkerFrame] = {}
        for output in outputs:
            stream = self._note_output(output)
            if stream is None:
                continue
            frame = frames.get(stream)
            if frame is None:
                frame = frames[stream] = pb.WorkerFrame()
            fill_output(frame.step.outputs.add(), output)
        for stream, frame in frames.items():
            stream.post_frame(frame)

    def note_load(self, load: WorkerLoad) -> None:
        """Keep the load of a step; it is sent at once where it names other requests than before."""
        self._load = load
        for stream in self._streams:
            stream.post_load_if_named(load)

    def report_load(self) -> None:
        """Send every gateway the latest load, also as a sign of life."""
        for stream in self._streams:
            stream.post_load(self._load)

    def refuse(self, error: ServeError) -> None:
        """From now on refuse new requests with this error; running ones go on."""
        self._refusal = error

    def fail(self, error: ServeError) -> None:
        """End every stream, now and later, with this error: the engine can answer nothing any more."""
        self.refuse(error)
        for stream in self._streams:
            stream.end(error)

    def _submit(self, stream: GatewayStream, submit: pb.Submit) -> None:
        request_id = RequestId(submit.request.id)
        try:
            if self._refusal is not None:
                raise self._refusal
            self._check_new(request_id)
            request = decode_request(submit.request)
            if request.model not in self.models:
                raise ModelNotFound(f"this worker does not serve the model {request.model!r}")
        except ServeError as error:
            refusals = pb.StepOutputs(outputs=_refusals(submit.request, error))
            stream.post_frame(pb.WorkerFrame(step=refusals))
            return
        self._requests[request_id] = _OpenRequest(stream, set(range(request.sampling.n)))
        stream.request_ids.add(request_id)
        candidates = [candidate.control_address for candidate in submit.prefill_candidates]
        self._send(AddRequest(request, candidates))

    def _check_new(self, request_id: RequestId) -> None:
        known = self._requests.get(request_id)
        if known is None:
            return
        if known.stream is None:
            raise WorkerLostError(
                f"request {request_id}: an earlier run of it is still ending here"
            )
        raise InvalidRequest(f"request {request_id}: the id is already in use on this worker")

    def _cancel(self, stream: GatewayStream, cancel: pb.Cancel) -> None:
        request_id = RequestId(cancel.request_id)
        if request_id in stream.request_ids:
            self._send(AbortRequest(request_id, cancel.reason))

    def _note_output(self, output: ChoiceOutput) -> GatewayStream | None:
        """The stream that this output belongs to, if it still exists; forgets a request at its end."""
        request = self._requests.get(output.request_id)
        if request is None or output.choice not in request.open_choices:
            return None
        if output.finish_reason:
            request.open_choices.discard(output.choice)
        if not request.open_choices:
            del self._requests[output.request_id]
            if request.stream is not None:
                request.stream.request_ids.discard(output.request_id)
        return request.stream


def _refusals(request: pb.Request, error: ServeError) -> list[pb.ChoiceOutput]:
    """One error output for each choice that was asked for."""
    num_choices = min(max(request.sampling.n, 1), MAX_CHOICES)
    return [
        pb.ChoiceOutput(
            request_id=request.id,
            choice=choice,
            finish_reason="error",
            error_kind=error_kind(error),
            error_message=error.message,
        )
        for choice in range(num_choices)
    ]
