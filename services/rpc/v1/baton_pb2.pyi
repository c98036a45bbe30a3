from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("seed", "n", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs", "logit_bias")
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    def __init__(self, seed: _Optional[int] = ..., n: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TokenList(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "model", "prompt_token_ids", "sampling", "output_token_ids", "deadline_remaining_ms", "priority", "cache_salt", "trace_parent")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    output_token_ids: _containers.RepeatedCompositeFieldContainer[TokenList]
    deadline_remaining_ms: int
    priority: int
    cache_salt: str
    trace_parent: str
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., output_token_ids: _Optional[_Iterable[_Union[TokenList, _Mapping]]] = ..., deadline_remaining_ms: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., trace_parent: _Optional[str] = ...) -> None: ...

class GatewayFrame(_message.Message):
    __slots__ = ("hello", "submit", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: GatewayHello
    submit: Submit
    cancel: Cancel
    def __init__(self, hello: _Optional[_Union[GatewayHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class GatewayHello(_message.Message):
    __slots__ = ("protocol_version", "gateway_id", "gateway_epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    gateway_id: str
    gateway_epoch: int
    def __init__(self, protocol_version: _Optional[int] = ..., gateway_id: _Optional[str] = ..., gateway_epoch: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request", "prefill_candidates")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    request: Request
    prefill_candidates: _containers.RepeatedCompositeFieldContainer[PrefillCandidate]
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., prefill_candidates: _Optional[_Iterable[_Union[PrefillCandidate, _Mapping]]] = ...) -> None: ...

class PrefillCandidate(_message.Message):
    __slots__ = ("worker_id", "control_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    control_address: str
    def __init__(self, worker_id: _Optional[str] = ..., control_address: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("hello", "step", "load")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    step: StepOutputs
    load: LoadReport
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., step: _Optional[_Union[StepOutputs, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("protocol_version", "record")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    record: WorkerRecord
    def __init__(self, protocol_version: _Optional[int] = ..., record: _Optional[_Union[WorkerRecord, _Mapping]] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[ChoiceOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[ChoiceOutput, _Mapping]]] = ...) -> None: ...

class ChoiceOutput(_message.Message):
    __slots__ = ("request_id", "choice", "token_ids", "logprobs", "finish_reason", "stop_token_id", "error_kind", "error_message", "num_cached_tokens", "timestamps_ms")
    class TimestampsMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_KIND_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: str
    stop_token_id: int
    error_kind: str
    error_message: str
    num_cached_tokens: int
    timestamps_ms: _containers.ScalarMap[str, float]
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., error_kind: _Optional[str] = ..., error_message: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., timestamps_ms: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "rank", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_free_blocks", "waiting_prefill_tokens", "named_request_ids")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    waiting_prefill_tokens: int
    named_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ..., named_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerRecord(_message.Message):
    __slots__ = ("schema_version", "id", "epoch", "role", "control_address", "data_addresses", "models", "model_bundle_digest", "max_model_len", "identity", "layout", "hash_root", "num_blocks", "adapters", "prefill_tokens_per_s", "decode_step_ms", "load_tokens_per_s")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MODEL_BUNDLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HASH_ROOT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    id: str
    epoch: int
    role: str
    control_address: str
    data_addresses: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedScalarFieldContainer[str]
    model_bundle_digest: str
    max_model_len: int
    identity: KVIdentity
    layout: KVLayout
    hash_root: HashRoot
    num_blocks: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    prefill_tokens_per_s: float
    decode_step_ms: float
    load_tokens_per_s: float
    def __init__(self, schema_version: _Optional[int] = ..., id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[str] = ..., control_address: _Optional[str] = ..., data_addresses: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[str]] = ..., model_bundle_digest: _Optional[str] = ..., max_model_len: _Optional[int] = ..., identity: _Optional[_Union[KVIdentity, _Mapping]] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., hash_root: _Optional[_Union[HashRoot, _Mapping]] = ..., num_blocks: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_ms: _Optional[float] = ..., load_tokens_per_s: _Optional[float] = ...) -> None: ...

class KVIdentity(_message.Message):
    __slots__ = ("model_digest", "weight_format", "activation_dtype", "adapter_digest", "group_shapes")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GROUP_SHAPES_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    weight_format: str
    activation_dtype: str
    adapter_digest: str
    group_shapes: _containers.RepeatedCompositeFieldContainer[GroupShape]
    def __init__(self, model_digest: _Optional[str] = ..., weight_format: _Optional[str] = ..., activation_dtype: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., group_shapes: _Optional[_Iterable[_Union[GroupShape, _Mapping]]] = ...) -> None: ...

class GroupShape(_message.Message):
    __slots__ = ("kind", "num_layers", "num_kv_heads", "head_dim", "window")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    kind: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int
    def __init__(self, kind: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class KVLayout(_message.Message):
    __slots__ = ("block_size", "order", "groups", "tensor_ranks", "pipeline_ranks", "wire_dtype")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_RANKS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_RANKS_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    order: str
    groups: _containers.RepeatedCompositeFieldContainer[KVGroup]
    tensor_ranks: int
    pipeline_ranks: int
    wire_dtype: str
    def __init__(self, block_size: _Optional[int] = ..., order: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[KVGroup, _Mapping]]] = ..., tensor_ranks: _Optional[int] = ..., pipeline_ranks: _Optional[int] = ..., wire_dtype: _Optional[str] = ...) -> None: ...

class KVGroup(_message.Message):
    __slots__ = ("kind", "layers", "num_kv_heads", "slot_format", "dtype", "head_dim", "window")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    kind: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    num_kv_heads: int
    slot_format: str
    dtype: str
    head_dim: int
    window: int
    def __init__(self, kind: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., num_kv_heads: _Optional[int] = ..., slot_format: _Optional[str] = ..., dtype: _Optional[str] = ..., head_dim: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class HashRoot(_message.Message):
    __slots__ = ("algorithm", "block_size", "seed")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    block_size: int
    seed: bytes
    def __init__(self, algorithm: _Optional[str] = ..., block_size: _Optional[int] = ..., seed: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("protocol_version", "with_bundle")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WITH_BUNDLE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    with_bundle: bool
    def __init__(self, protocol_version: _Optional[int] = ..., with_bundle: bool = ...) -> None: ...

class DescribeFrame(_message.Message):
    __slots__ = ("record", "piece")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    record: WorkerRecord
    piece: BundlePiece
    def __init__(self, record: _Optional[_Union[WorkerRecord, _Mapping]] = ..., piece: _Optional[_Union[BundlePiece, _Mapping]] = ...) -> None: ...

class BundlePiece(_message.Message):
    __slots__ = ("file_name", "data", "last")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    data: bytes
    last: bool
    def __init__(self, file_name: _Optional[str] = ..., data: _Optional[bytes] = ..., last: bool = ...) -> None: ...

class DecodeFrame(_message.Message):
    __slots__ = ("request", "grant", "not_now", "room", "renew", "complete")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    NOT_NOW_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    request: PrefillRequest
    grant: PrefillGrant
    not_now: PrefillNotNow
    room: PrefillRoom
    renew: PrefillRenew
    complete: PrefillComplete
    def __init__(self, request: _Optional[_Union[PrefillRequest, _Mapping]] = ..., grant: _Optional[_Union[PrefillGrant, _Mapping]] = ..., not_now: _Optional[_Union[PrefillNotNow, _Mapping]] = ..., room: _Optional[_Union[PrefillRoom, _Mapping]] = ..., renew: _Optional[_Union[PrefillRenew, _Mapping]] = ..., complete: _Optional[_Union[PrefillComplete, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("protocol_version", "session_id", "attempt", "request", "num_held_tokens", "identity", "layout", "transports", "session_secret", "lease_remaining_ms", "decode_worker_id", "decode_worker_epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_SECRET_FIELD_NUMBER: _ClassVar[int]
    LEASE_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    session_id: int
    attempt: int
    request: Request
    num_held_tokens: int
    identity: KVIdentity
    layout: KVLayout
    transports: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    session_secret: bytes
    lease_remaining_ms: int
    decode_worker_id: str
    decode_worker_epoch: int
    def __init__(self, protocol_version: _Optional[int] = ..., session_id: _Optional[int] = ..., attempt: _Optional[int] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., num_held_tokens: _Optional[int] = ..., identity: _Optional[_Union[KVIdentity, _Mapping]] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ..., session_secret: _Optional[bytes] = ..., lease_remaining_ms: _Optional[int] = ..., decode_worker_id: _Optional[str] = ..., decode_worker_epoch: _Optional[int] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("kind", "addresses", "host_id")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    kind: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    def __init__(self, kind: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ...) -> None: ...

class PrefillGrant(_message.Message):
    __slots__ = ("first_missing_block",)
    FIRST_MISSING_BLOCK_FIELD_NUMBER: _ClassVar[int]
    first_missing_block: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_missing_block: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillNotNow(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillRoom(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillRenew(_message.Message):
    __slots__ = ("lease_remaining_ms",)
    LEASE_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    lease_remaining_ms: int
    def __init__(self, lease_remaining_ms: _Optional[int] = ...) -> None: ...

class PrefillComplete(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillFrame(_message.Message):
    __slots__ = ("accepted", "announce", "done", "refused")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    announce: PrefillAnnounce
    done: PrefillDone
    refused: PrefillRefused
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., announce: _Optional[_Union[PrefillAnnounce, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ..., refused: _Optional[_Union[PrefillRefused, _Mapping]] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("prefill_worker_id", "prefill_worker_epoch", "layout")
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    prefill_worker_id: str
    prefill_worker_epoch: int
    layout: KVLayout
    def __init__(self, prefill_worker_id: _Optional[str] = ..., prefill_worker_epoch: _Optional[int] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ...) -> None: ...

class PrefillAnnounce(_message.Message):
    __slots__ = ("num_cached_tokens",)
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    def __init__(self, num_cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("first_outputs", "num_cached_tokens", "sends_kv", "auxiliary", "timestamps_ms")
    class TimestampsMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    FIRST_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENDS_KV_FIELD_NUMBER: _ClassVar[int]
    AUXILIARY_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_MS_FIELD_NUMBER: _ClassVar[int]
    first_outputs: _containers.RepeatedCompositeFieldContainer[ChoiceOutput]
    num_cached_tokens: int
    sends_kv: bool
    auxiliary: _containers.RepeatedCompositeFieldContainer[AuxiliaryTensor]
    timestamps_ms: _containers.ScalarMap[str, float]
    def __init__(self, first_outputs: _Optional[_Iterable[_Union[ChoiceOutput, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., sends_kv: bool = ..., auxiliary: _Optional[_Iterable[_Union[AuxiliaryTensor, _Mapping]]] = ..., timestamps_ms: _Optional[_Mapping[str, float]] = ...) -> None: ...

class AuxiliaryTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillRefused(_message.Message):
    __slots__ = ("error_kind", "message")
    ERROR_KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    error_kind: str
    message: str
    def __init__(self, error_kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class SnapshotFrame(_message.Message):
    __slots__ = ("epoch", "sequence_number", "tier", "hashes", "last")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence_number: int
    tier: str
    hashes: bytes
    last: bool
    def __init__(self, epoch: _Optional[int] = ..., sequence_number: _Optional[int] = ..., tier: _Optional[str] = ..., hashes: _Optional[bytes] = ..., last: bool = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheAnswer(_message.Message):
    __slots__ = ("epoch", "num_kept_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    num_kept_blocks: int
    def __init__(self, epoch: _Optional[int] = ..., num_kept_blocks: _Optional[int] = ...) -> None: ...
