"""What a worker is, as protocol messages and back: record, KVIdentity, KVLayout, HashRoot.

A value of an enumeration that this process does not know (a newer peer's) raises ProtocolMismatch
by name, so that such a worker is left out rather than misread.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from core.block_hash import HashAlgorithm, HashRoot
from core.errors import ProtocolMismatch
from core.ids import Epoch, WorkerId
from core.kv_identity import GroupShape, KVIdentity
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from core.worker_info import Role, WorkerInfo, WorkerRates
from services.rpc.protocol import RECORD_SCHEMA_VERSION
from services.rpc.v1 import baton_pb2 as pb

_Enum = TypeVar("_Enum", bound=StrEnum)


def encode_record(info: WorkerInfo) -> pb.WorkerRecord:
    """The message of a worker's record."""
    return pb.WorkerRecord(
        schema_version=RECORD_SCHEMA_VERSION,
        id=info.id,
        epoch=info.epoch,
        role=info.role.value,
        control_address=info.control_address,
        data_addresses=info.data_addresses,
        models=info.models,
        model_bundle_digest=info.model_bundle_digest,
        max_model_len=info.max_model_len,
        identity=encode_identity(info.identity),
        layout=encode_layout(info.layout),
        hash_root=encode_root(info.hash_root),
        num_blocks=info.num_blocks,
        adapters=info.adapters,
        prefill_tokens_per_s=info.rates.prefill_tokens_per_s,
        decode_step_ms=info.rates.decode_step_ms,
        load_tokens_per_s=info.rates.load_tokens_per_s,
    )


def decode_record(message: pb.WorkerRecord) -> WorkerInfo:
    """The record of a message; ProtocolMismatch for a schema that this process does not know."""
    if message.schema_version != RECORD_SCHEMA_VERSION:
        raise ProtocolMismatch(
            f"worker {message.id!r}: record schema {message.schema_version} is unknown; "
            f"this process knows {RECORD_SCHEMA_VERSION}"
        )
    return WorkerInfo(
        id=WorkerId(message.id),
        epoch=Epoch(message.epoch),
        role=_member(Role, "role", message.role),
        control_address=message.control_address,
        data_addresses=tuple(message.data_addresses),
        models=tuple(message.models),
        model_bundle_digest=message.model_bundle_digest,
        max_model_len=message.max_model_len,
        identity=decode_identity(message.identity),
        layout=decode_layout(message.layout),
        hash_root=decode_root(message.hash_root),
        num_blocks=message.num_blocks,
        adapters=tuple(message.adapters),
        rates=WorkerRates(
            message.prefill_tokens_per_s, message.decode_step_ms, message.load_tokens_per_s
        ),
    )


def encode_identity(identity: KVIdentity) -> pb.KVIdentity:
    """The message of a KVIdentity."""
    shapes = [
        pb.GroupShape(
            kind=shape.kind,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
        )
        for shape in identity.group_shapes
    ]
    return pb.KVIdentity(
        model_digest=identity.model_digest,
        weight_format=identity.weight_format,
        activation_dtype=identity.activation_dtype,
        adapter_digest=identity.adapter_digest,
        group_shapes=shapes,
    )


def decode_identity(message: pb.KVIdentity) -> KVIdentity:
    """The KVIdentity of a message."""
    shapes = tuple(
        GroupShape(s.kind, s.num_layers, s.num_kv_heads, s.head_dim, s.window)
        for s in message.group_shapes
    )
    return KVIdentity(
        model_digest=message.model_digest,
        weight_format=message.weight_format,
        activation_dtype=message.activation_dtype,
        adapter_digest=message.adapter_digest,
        group_shapes=shapes,
    )


def encode_layout(layout: KVLayout) -> pb.KVLayout:
    """The message of a KVLayout."""
    return pb.KVLayout(
        block_size=layout.block_size,
        order=layout.order,
        groups=[_encode_group(group) for group in layout.groups],
        tensor_ranks=layout.tensor_ranks,
        pipeline_ranks=layout.pipeline_ranks,
        wire_dtype=layout.wire_dtype,
    )


def decode_layout(message: pb.KVLayout) -> KVLayout:
    """The KVLayout of a message; ConfigError names a format that this process cannot store."""
    return KVLayout(
        block_size=message.block_size,
        groups=tuple(_decode_group(group) for group in message.groups),
        order=message.order,
        tensor_ranks=message.tensor_ranks,
        pipeline_ranks=message.pipeline_ranks,
        wire_dtype=message.wire_dtype if message.HasField("wire_dtype") else None,
    )


def encode_root(root: HashRoot) -> pb.HashRoot:
    """The message of a HashRoot."""
    return pb.HashRoot(algorithm=root.algorithm.value, block_size=root.block_size, seed=root.seed)


def decode_root(message: pb.HashRoot) -> HashRoot:
    """The HashRoot of a message."""
    algorithm = _member(HashAlgorithm, "hash algorithm", message.algorithm)
    return HashRoot(algorithm, message.block_size, message.seed)


def _encode_group(group: KVGroup) -> pb.KVGroup:
    return pb.KVGroup(
        kind=group.kind.value,
        layers=group.layers,
        num_kv_heads=group.num_kv_heads,
        slot_format=group.slot.name,
        dtype=group.slot.dtype,
        head_dim=group.slot.head_dim,
        window=group.window,
    )


def _decode_group(message: pb.KVGroup) -> KVGroup:
    return KVGroup(
        kind=_member(GroupKind, "KV group kind", message.kind),
        layers=tuple(message.layers),
        num_kv_heads=message.num_kv_heads,
        slot=SlotFormat(message.slot_format, message.dtype, message.head_dim),
        window=message.window if message.HasField("window") else None,
    )


def _member(enum: type[_Enum], what: str, value: str) -> _Enum:
    try:
        return enum(value)
    except ValueError:
        known = ", ".join(member.value for member in enum)
        raise ProtocolMismatch(f"{what}: {value!r} is unknown; known: {known}") from None
