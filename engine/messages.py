"""The plain messages between a worker's front and its engine: the only thing the two processes share.

Two queues, one each way, of msgpack bytes. `ToEngine` lists what the front may say, `ToFront` what the engine may. The
engine never sees gRPC, the front never sees the pool.

Life of a split request, seen from D's engine (left) and P's engine (right), the fronts and the wire in between:

    AddRequest      ->
    CallPrefill     <-  ......................  -> AddPrefill
                                                <- AnnouncePrefill
    PrefillAnnounced->
    GrantPrefill    <-  ......................  -> PrefillGranted      (or DeclinePrefill / PrefillDeclined,
                                                                        later RoomForPrefill / PrefillRoom)
                          KV over the data connection
                                                <- FirstTokens
    PrefillAnswered ->
    EndPrefill      <-  ......................  -> PrefillEnded
    StepDone        <-
"""

from __future__ import annotations

import msgspec

from core.block_hash import BlockHash, HashRoot
from core.events import CacheEvent, Tier
from core.ids import Epoch, RequestId, SessionId
from core.kv_identity import KVIdentity
from core.kv_layout import KVLayout
from core.request import Request
from core.worker_info import WorkerLoad, WorkerRates
from engine.stats import EngineStats


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one output position: the chosen token's, its rank (1 is best), and the best ones."""

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


class ChoiceOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step added to one choice of one request.

    finish_reason: empty while the choice runs; `stop`, `length`, `abort` or `error` at its end.
    stop_token_id: the stop token that ended the choice when it was not the model's own end token.
    num_cached_tokens: prompt tokens whose KV was found, not computed; with a choice's first token.
    timestamps_ms: named moments, milliseconds since the worker got the request; with a choice's end.
    """

    request_id: RequestId
    choice: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: str = ""
    stop_token_id: int | None = None
    error_kind: str = ""
    error_message: str = ""
    num_cached_tokens: int | None = None
    timestamps_ms: dict[str, float] = {}


# ---------------------------------------------------------------- front -> engine


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Own this request to its last token. prefill_candidates: control addresses to ask, best first; empty: run here."""

    request: Request
    prefill_candidates: list[str] = []


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """End this request now; every open choice answers with finish reason `abort`. Unknown ids are ignored."""

    request_id: RequestId
    reason: str = ""


class PrefillAnnounced(msgspec.Struct, frozen=True, tag=True):
    """D: P holds blocks for the whole prompt, in its layout. Answered with GrantPrefill or DeclinePrefill."""

    session_id: SessionId
    attempt: int
    num_cached_tokens: int
    layout: KVLayout


class PrefillAnswered(msgspec.Struct, frozen=True, tag=True):
    """D: P's first token of each choice; sends_kv tells whether coverage has to be waited for."""

    session_id: SessionId
    attempt: int
    first_outputs: list[ChoiceOutput]
    num_cached_tokens: int
    sends_kv: bool


class PrefillLost(msgspec.Struct, frozen=True, tag=True):
    """D: this attempt can yield nothing any more: P is gone or refused. retryable: another candidate may do better."""

    session_id: SessionId
    attempt: int
    error_kind: str
    message: str
    retryable: bool = True


class TransportOffer(msgspec.Struct, frozen=True):
    """One way KV can be pushed to D: the transport's kind and one address a rank."""

    kind: str
    addresses: list[str]


class AddPrefill(msgspec.Struct, frozen=True, tag=True):
    """P: compute this prompt for D's session. num_held_tokens: what D holds, a hint."""

    session_id: SessionId
    attempt: int
    request: Request
    num_held_tokens: int
    identity: KVIdentity
    layout: KVLayout
    transports: list[TransportOffer]
    session_secret: bytes
    lease_remaining_ms: int


class PrefillGranted(msgspec.Struct, frozen=True, tag=True):
    """P: D reserved its blocks. first_missing_block: for each group, the first position to send."""

    session_id: SessionId
    attempt: int
    first_missing_block: list[int]


class PrefillDeclined(msgspec.Struct, frozen=True, tag=True):
    """P: D has no room now; free the blocks and wait for PrefillRoom."""

    session_id: SessionId
    attempt: int


class PrefillRoom(msgspec.Struct, frozen=True, tag=True):
    """P: D has room again; announce once more."""

    session_id: SessionId
    attempt: int


class PrefillRenewed(msgspec.Struct, frozen=True, tag=True):
    """P: D still wants the session for this long."""

    session_id: SessionId
    attempt: int
    lease_remaining_ms: int


class PrefillEnded(msgspec.Struct, frozen=True, tag=True):
    """P: D needs nothing more from this attempt: complete, given up, or its stream is lost. Idempotent."""

    session_id: SessionId
    attempt: int
    reason: str


class TakeSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Answer with SnapshotTaken: every published block."""

    query_id: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Drop every cached block that is not in use and publish the removals."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Refuse new work, finish what runs for at most drain_ms, then exit."""

    drain_ms: int = 0


ToEngine = (
    AddRequest
    | AbortRequest
    | PrefillAnnounced
    | PrefillAnswered
    | PrefillLost
    | AddPrefill
    | PrefillGranted
    | PrefillDeclined
    | PrefillRoom
    | PrefillRenewed
    | PrefillEnded
    | TakeSnapshot
    | ResetPrefixCache
    | Shutdown
)

# ---------------------------------------------------------------- engine -> front


class EngineProgress(msgspec.Struct, frozen=True, tag=True):
    """One line on how far loading has come."""

    message: str


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and the pool allocated.

    bundle: file name -> content, for gateways. kernels: one phrase on the code that runs the model, for people.
    """

    epoch: Epoch
    identity: KVIdentity
    layout: KVLayout
    hash_root: HashRoot
    num_blocks: int
    max_model_len: int
    transports: list[TransportOffer]
    bundle: dict[str, bytes]
    rates: WorkerRates
    kernels: str = ""


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; error_kind is a class name of core.errors, message one sentence."""

    error_kind: str
    message: str


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """What one engine step brought, for all requests at once.

    first_event_number: sequence number of events[0]; events of an epoch are numbered from 1 without gaps.
    """

    outputs: list[ChoiceOutput]
    events: list[CacheEvent]
    first_event_number: int
    load: WorkerLoad
    stats: EngineStats


class CallPrefill(msgspec.Struct, frozen=True, tag=True):
    """D: open a Prefill stream to this candidate."""

    session_id: SessionId
    attempt: int
    candidate: str
    request: Request
    num_held_tokens: int
    session_secret: bytes
    lease_remaining_ms: int


class GrantPrefill(msgspec.Struct, frozen=True, tag=True):
    """D: pinned what it holds, reserved the rest."""

    session_id: SessionId
    attempt: int
    first_missing_block: list[int]


class DeclinePrefill(msgspec.Struct, frozen=True, tag=True):
    """D: not now."""

    session_id: SessionId
    attempt: int


class RoomForPrefill(msgspec.Struct, frozen=True, tag=True):
    """D: a session that was declined may be announced again."""

    session_id: SessionId
    attempt: int


class EndPrefill(msgspec.Struct, frozen=True, tag=True):
    """D: close this attempt's stream; completed tells P that everything arrived."""

    session_id: SessionId
    attempt: int
    completed: bool


class AnnouncePrefill(msgspec.Struct, frozen=True, tag=True):
    """P: holds blocks for the whole prompt."""

    session_id: SessionId
    attempt: int
    num_cached_tokens: int


class FirstTokens(msgspec.Struct, frozen=True, tag=True):
    """P: the prompt is computed."""

    session_id: SessionId
    attempt: int
    first_outputs: list[ChoiceOutput]
    num_cached_tokens: int
    sends_kv: bool


class RefusePrefill(msgspec.Struct, frozen=True, tag=True):
    """P: this session is refused or has failed here; its stream ends with the reason."""

    session_id: SessionId
    attempt: int
    error_kind: str
    message: str


class SnapshotTaken(msgspec.Struct, frozen=True, tag=True):
    """Every published block a tier, as of event number `sequence_number`."""

    query_id: int
    sequence_number: int
    hashes: dict[Tier, list[BlockHash]]


class EngineStopped(msgspec.Struct, frozen=True, tag=True):
    """The engine ends by request; nothing is held any more."""


ToFront = (
    EngineProgress
    | EngineReady
    | EngineFailed
    | StepDone
    | CallPrefill
    | GrantPrefill
    | DeclinePrefill
    | RoomForPrefill
    | EndPrefill
    | AnnouncePrefill
    | FirstTokens
    | RefusePrefill
    | SnapshotTaken
    | EngineStopped
)
