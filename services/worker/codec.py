"""Engine messages as protocol messages and back: outputs, transport offers, sessions' requests.

The only module that knows both; gateways never import it.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.ids import RequestId, SessionId
from core.worker_info import WorkerInfo
from engine.messages import AddPrefill, CallPrefill, ChoiceOutput, TokenLogprobs, TransportOffer
from services.rpc.codec import decode_request, encode_request
from services.rpc.protocol import PROTOCOL_VERSION
from services.rpc.record_codec import (
    decode_identity,
    decode_layout,
    encode_identity,
    encode_layout,
)
from services.rpc.v1 import baton_pb2 as pb


def encode_output(output: ChoiceOutput) -> pb.ChoiceOutput:
    """The message of one choice's step."""
    message = pb.ChoiceOutput()
    fill_output(message, output)
    return message


def fill_output(message: pb.ChoiceOutput, output: ChoiceOutput) -> None:
    """Say one choice's step in an empty message, which may stand in a frame already.

    Nearly every step says no more than a token, so what is empty or unset is not touched.
    """
    message.request_id = output.request_id
    if output.choice:
        message.choice = output.choice
    message.token_ids.extend(output.token_ids)
    for entry in output.logprobs:
        message.logprobs.append(_encode_logprobs(entry))
    if output.finish_reason:
        message.finish_reason = output.finish_reason
    if output.stop_token_id is not None:
        message.stop_token_id = output.stop_token_id
    if output.error_kind:
        message.error_kind = output.error_kind
    if output.error_message:
        message.error_message = output.error_message
    if output.num_cached_tokens is not None:
        message.num_cached_tokens = output.num_cached_tokens
    if output.timestamps_ms:
        message.timestamps_ms.update(output.timestamps_ms)


def decode_output(message: pb.ChoiceOutput) -> ChoiceOutput:
    """One choice's step, as another worker's engine said it."""
    return ChoiceOutput(
        request_id=RequestId(message.request_id),
        choice=message.choice,
        token_ids=list(message.token_ids),
        logprobs=[_decode_logprobs(entry) for entry in message.logprobs],
        finish_reason=message.finish_reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        error_kind=message.error_kind,
        error_message=message.error_message,
        num_cached_tokens=(
            message.num_cached_tokens if message.HasField("num_cached_tokens") else None
        ),
        timestamps_ms=dict(message.timestamps_ms),
    )


def encode_prefill_request(
    call: CallPrefill, info: WorkerInfo, transports: Iterable[TransportOffer]
) -> pb.PrefillRequest:
    """D: the first frame of a session's stream."""
    return pb.PrefillRequest(
        protocol_version=PROTOCOL_VERSION,
        session_id=call.session_id,
        attempt=call.attempt,
        request=encode_request(call.request),
        num_held_tokens=call.num_held_tokens,
        identity=encode_identity(info.identity),
        layout=encode_layout(info.layout),
        transports=[
            pb.TransportOffer(kind=offer.kind, addresses=offer.addresses) for offer in transports
        ],
        session_secret=call.session_secret,
        lease_remaining_ms=call.lease_remaining_ms,
        decode_worker_id=info.id,
        decode_worker_epoch=info.epoch,
    )


def decode_prefill_request(message: pb.PrefillRequest) -> AddPrefill:
    """P: what the engine is asked to compute; raises what a bad field raises."""
    return AddPrefill(
        session_id=SessionId(message.session_id),
        attempt=message.attempt,
        request=decode_request(message.request),
        num_held_tokens=message.num_held_tokens,
        identity=decode_identity(message.identity),
        layout=decode_layout(message.layout),
        transports=[
            TransportOffer(kind=offer.kind, addresses=list(offer.addresses))
            for offer in message.transports
        ],
        session_secret=message.session_secret,
        lease_remaining_ms=message.lease_remaining_ms,
    )


def _encode_logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


def _decode_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=message.logprob,
        rank=message.rank,
        top_token_ids=list(message.top_token_ids),
        top_logprobs=list(message.top_logprobs),
    )
