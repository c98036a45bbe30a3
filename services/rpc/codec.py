"""Core values as protocol messages and back: requests and loads here, worker records in
`record_codec`.

Every decoder validates, because core values do on construction: a bad field raises an error of the
tree. Outputs (`ChoiceOutput`) have no core value: gateways read the message itself, workers convert
in services/worker/codec.py.
"""

from __future__ import annotations

from core.ids import RequestId
from core.request import Request, SamplingParams
from core.worker_info import WorkerLoad
from services.rpc.v1 import baton_pb2 as pb


def encode_request(request: Request) -> pb.Request:
    """The message of a request."""
    message = pb.Request(
        id=request.id,
        model=request.model,
        prompt_token_ids=request.prompt_token_ids,
        sampling=encode_sampling(request.sampling),
        output_token_ids=[pb.TokenList(token_ids=ids) for ids in request.output_token_ids],
        priority=request.priority,
        cache_salt=request.cache_salt,
        trace_parent=request.trace_parent,
    )
    if request.deadline_ms is not None:
        message.deadline_remaining_ms = request.deadline_ms
    return message


def decode_request(message: pb.Request) -> Request:
    """The request of a message; InvalidRequest names a field that cannot be served."""
    has_deadline = message.HasField("deadline_remaining_ms")
    return Request(
        id=RequestId(message.id),
        model=message.model,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=decode_sampling(message.sampling),
        output_token_ids=tuple(tuple(ids.token_ids) for ids in message.output_token_ids),
        deadline_ms=message.deadline_remaining_ms if has_deadline else None,
        priority=message.priority,
        cache_salt=message.cache_salt,
        trace_parent=message.trace_parent,
    )


def encode_sampling(sampling: SamplingParams) -> pb.SamplingParams:
    """The message of sampling parameters."""
    return pb.SamplingParams(
        seed=sampling.seed,
        n=sampling.n,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        logit_bias=[pb.LogitBias(token_id=t, bias=b) for t, b in sampling.logit_bias],
    )


def decode_sampling(message: pb.SamplingParams) -> SamplingParams:
    """The sampling parameters of a message."""
    return SamplingParams(
        seed=message.seed,
        n=message.n,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
    )


def encode_load(load: WorkerLoad) -> pb.LoadReport:
    """The message of a worker's load."""
    return pb.LoadReport(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        named_request_ids=load.named_request_ids,
    )


def decode_load(message: pb.LoadReport) -> WorkerLoad:
    """The load of a message."""
    return WorkerLoad(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_free_blocks=message.num_free_blocks,
        waiting_prefill_tokens=message.waiting_prefill_tokens,
        named_request_ids=tuple(message.named_request_ids),
    )
