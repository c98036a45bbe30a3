"""Factories of what the index takes: workers, chains, events."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from core.block_hash import BlockHash, HashRoot
from core.events import CacheEvent, EventKind, Tier
from core.ids import Epoch, RequestId, WorkerId
from core.kv_identity import GroupShape, KVIdentity
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from core.worker_info import Role, WorkerInfo
from kvindex.base import Reservation

IDENTITY = KVIdentity(
    "ab" * 32, "float32", "float32", "", (GroupShape("full_attention", 2, 3, 64),)
)
LAYOUT = KVLayout(
    16, (KVGroup(GroupKind.FULL_ATTENTION, (0, 1), 3, SlotFormat("plain", "float32", 64)),)
)
ROOT = HashRoot.of(IDENTITY)
OTHER_ROOT = HashRoot.of(replace(IDENTITY, model_digest="cd" * 32))


def create_worker(
    name: str = "w1", epoch: int = 2**62 + 1, *, root: HashRoot = ROOT, role: Role = Role.MIXED
) -> WorkerInfo:
    return WorkerInfo(
        id=WorkerId(name),
        epoch=Epoch(epoch),
        role=role,
        control_address=f"{name}:50051",
        data_addresses=(f"{name}:50052",),
        models=("demo",),
        model_bundle_digest="ef" * 32,
        max_model_len=2048,
        identity=IDENTITY,
        layout=LAYOUT,
        hash_root=root,
        num_blocks=256,
    )


def create_chain(num_blocks: int, name: str = "chain") -> list[BlockHash]:
    """Distinct hashes; chains of different names share none."""
    words = (f"{name} {position}".encode() for position in range(num_blocks))
    return [BlockHash(hashlib.sha256(word).digest()[:16]) for word in words]


def stored(hashes: Sequence[BlockHash], tier: Tier = Tier.DEVICE) -> CacheEvent:
    return CacheEvent(EventKind.STORED, tier, tuple(hashes))


def removed(hashes: Sequence[BlockHash], tier: Tier = Tier.DEVICE) -> CacheEvent:
    return CacheEvent(EventKind.REMOVED, tier, tuple(hashes))


def cleared(tier: Tier | None = None) -> CacheEvent:
    return CacheEvent(EventKind.CLEARED, tier)


def create_reservation(
    request_id: str, worker: str = "w1", *, num_tokens: int = 100, expiry_ms: int = 60_000
) -> Reservation:
    return Reservation(RequestId(request_id), WorkerId(worker), Epoch(7), num_tokens, expiry_ms)
