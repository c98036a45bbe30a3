"""What the cluster knows of one worker: its record, its loads, its rates.

One WorkerInfo is one KV pool (a data-parallel rank counts as one). The record is fixed for an epoch; loads change
all the time and travel apart, with every heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from core.block_hash import HashRoot
from core.ids import Epoch, WorkerId
from core.kv_identity import KVIdentity
from core.kv_layout import KVLayout


class Role(StrEnum):
    """What a worker does: run prompts for others, run answers, or both on its own."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def serves_prefill(self) -> bool:
        """Whether other workers may ask this one for a prompt's KV."""
        return self is not Role.DECODE

    @property
    def serves_decode(self) -> bool:
        """Whether this worker owns requests from admission to last token."""
        return self is not Role.PREFILL


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker is busy with, as of its last heartbeat.

    num_running, num_waiting: sequences in the batch, and not yet in it.
    num_free_blocks: blocks that can be allocated now, cached ones included.
    waiting_prefill_tokens: prompt tokens queued and not yet computed.
    named_request_ids: requests that this report already counts, so that gateways drop their reservations.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    waiting_prefill_tokens: int = 0
    named_request_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """Speeds that the worker measured on itself; 0 means not yet measured.

    prefill_tokens_per_s: prompt tokens computed a second.
    decode_step_ms: time of one decode step at batch size 1.
    load_tokens_per_s: tokens whose KV comes back a second from the worker's tiers below its device pool, from the
        slowest where there are several; 0 too where there is none.
    """

    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0
    load_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The record of one worker.

    id, epoch: who, and which incarnation.
    role: what it serves.
    control_address: `host:port` of its gRPC service.
    data_addresses: `host:port` of the data endpoint of each rank.
    models: served model names, the first is the default.
    model_bundle_digest: digest of its tokenizer, template and generation config (see `Describe`).
    max_model_len: most tokens of prompt and answer together.
    identity, layout: what KV it holds and how.
    hash_root: where its hash chains begin.
    num_blocks: allocatable blocks in its pool.
    adapters: names of loaded adapters.
    rates: measured speeds.
    """

    id: WorkerId
    epoch: Epoch
    role: Role
    control_address: str
    data_addresses: tuple[str, ...]
    models: tuple[str, ...]
    model_bundle_digest: str
    max_model_len: int
    identity: KVIdentity
    layout: KVLayout
    hash_root: HashRoot
    num_blocks: int
    adapters: tuple[str, ...] = ()
    rates: WorkerRates = field(default_factory=WorkerRates)
