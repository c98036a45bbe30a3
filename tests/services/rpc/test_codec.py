"""Core values survive the wire: every value equals itself after encoding, serialising, parsing and
decoding.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import HashAlgorithm, HashRoot
from core.errors import InvalidRequest, ProtocolMismatch
from core.ids import Epoch, RequestId, WorkerId
from core.kv_identity import GroupShape, KVIdentity
from core.kv_layout import KV_DTYPES, GroupKind, KVGroup, KVLayout, SlotFormat
from core.request import Request, SamplingParams
from core.worker_info import Role, WorkerInfo, WorkerLoad, WorkerRates
from services.rpc import codec, record_codec
from services.rpc.v1 import baton_pb2 as pb

uint32 = st.integers(0, 2**32 - 1)
small = st.integers(1, 64)
text = st.text(max_size=12)
share = st.floats(0.01, 1.0)
tokens = st.lists(uint32, min_size=1, max_size=8).map(tuple)
names = st.lists(text, max_size=3).map(tuple)

samplings = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    n=st.integers(1, 128),
    temperature=st.floats(0.0, 2.0),
    top_k=uint32,
    top_p=share,
    min_p=st.floats(0.0, 1.0),
    presence_penalty=st.floats(-2.0, 2.0),
    frequency_penalty=st.floats(-2.0, 2.0),
    repetition_penalty=share,
    max_tokens=st.integers(8, 2**31),
    min_tokens=st.integers(0, 8),
    stop_token_ids=tokens,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.lists(st.tuples(uint32, st.floats(-100, 100)), max_size=3).map(tuple),
)
requests = st.builds(
    Request,
    id=text.map(RequestId),
    model=text,
    prompt_token_ids=tokens,
    sampling=samplings,
    output_token_ids=st.lists(tokens | st.just(()), max_size=3).map(tuple),
    deadline_ms=st.none() | st.integers(0, 2**40),
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=text,
    trace_parent=text,
)
slots = st.builds(SlotFormat.of, st.sampled_from(sorted(KV_DTYPES)), small)
layers = st.lists(st.integers(0, 200), min_size=1, max_size=4, unique=True).map(sorted).map(tuple)
groups = st.one_of(
    st.builds(KVGroup, st.just(GroupKind.FULL_ATTENTION), layers, small, slots),
    st.builds(KVGroup, st.just(GroupKind.SLIDING_WINDOW), layers, small, slots, window=small),
)
layouts = st.builds(
    KVLayout, small, st.lists(groups, min_size=1, max_size=3).map(tuple), tensor_ranks=small
)
shapes = st.builds(GroupShape, text, small, small, small, st.integers(0, 4096))
identities = st.builds(KVIdentity, text, text, text, text, st.lists(shapes, max_size=2).map(tuple))
roots = st.builds(
    HashRoot, st.sampled_from(HashAlgorithm), small, st.binary(min_size=16, max_size=16)
)
records = st.builds(
    WorkerInfo,
    id=text.map(WorkerId),
    epoch=st.integers(0, 2**63 - 1).map(Epoch),
    role=st.sampled_from(Role),
    control_address=text,
    data_addresses=names,
    models=names,
    model_bundle_digest=text,
    max_model_len=uint32,
    identity=identities,
    layout=layouts,
    hash_root=roots,
    num_blocks=uint32,
    adapters=names,
    rates=st.builds(WorkerRates, st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6)),
)
loads = st.builds(WorkerLoad, uint32, uint32, uint32, st.integers(0, 2**63), names)


@given(requests)
def test_a_request_survives(request: Request) -> None:
    data = codec.encode_request(request).SerializeToString()
    decoded = codec.decode_request(pb.Request.FromString(data))
    assert decoded == request
    assert decoded.trace_parent == request.trace_parent


@given(records)
def test_a_record_survives(info: WorkerInfo) -> None:
    data = record_codec.encode_record(info).SerializeToString()
    assert record_codec.decode_record(pb.WorkerRecord.FromString(data)) == info


def test_a_record_of_a_worker_that_knows_no_load_rate_reads_as_none() -> None:
    layout = KVLayout(
        16, (KVGroup(GroupKind.FULL_ATTENTION, (0,), 1, SlotFormat("plain", "float32", 8)),)
    )
    older = pb.WorkerRecord(
        schema_version=1,
        role="mixed",
        layout=record_codec.encode_layout(layout),
        hash_root=pb.HashRoot(algorithm="sha256", block_size=16, seed=bytes(16)),
        prefill_tokens_per_s=1000.0,
        decode_step_ms=5.0,
    )
    info = record_codec.decode_record(pb.WorkerRecord.FromString(older.SerializeToString()))
    assert info.rates == WorkerRates(1000.0, 5.0, 0.0)
    field = pb.WorkerRecord.DESCRIPTOR.fields_by_name["load_tokens_per_s"]
    assert field.number == 17


@given(loads)
def test_a_load_survives(load: WorkerLoad) -> None:
    data = codec.encode_load(load).SerializeToString()
    assert codec.decode_load(pb.LoadReport.FromString(data)) == load


def test_a_bad_field_is_named() -> None:
    message = pb.Request(id="r", prompt_token_ids=[1], sampling=pb.SamplingParams(n=1, top_p=2.0))
    message.sampling.repetition_penalty = 1.0
    message.sampling.max_tokens = 1
    with pytest.raises(InvalidRequest, match="top_p must be in") as caught:
        codec.decode_request(message)
    assert caught.value.param == "top_p"
    with pytest.raises(InvalidRequest, match="at least one token"):
        codec.decode_request(pb.Request(sampling=codec.encode_sampling(SamplingParams(seed=1))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "record schema 2 is unknown"),
        ({"role": "oracle"}, "role: 'oracle' is unknown"),
        ({"hash_root": pb.HashRoot(algorithm="md5")}, "hash algorithm: 'md5'"),
    ],
)
def test_what_a_newer_peer_says_is_refused_by_name(change: dict[str, object], message: str) -> None:
    layout = KVLayout(
        16, (KVGroup(GroupKind.FULL_ATTENTION, (0,), 1, SlotFormat("plain", "float32", 8)),)
    )
    record = pb.WorkerRecord(
        schema_version=1,
        role="mixed",
        layout=record_codec.encode_layout(layout),
        hash_root=pb.HashRoot(algorithm="sha256", block_size=16, seed=bytes(16)),
    )
    record_codec.decode_record(record)
    record.MergeFrom(pb.WorkerRecord(**change))  # type: ignore[arg-type]
    with pytest.raises(ProtocolMismatch, match=message):
        record_codec.decode_record(record)
