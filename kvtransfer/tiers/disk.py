"""The disk tier: blocks in files of a folder, which outlive the process.

What is believed after a restart is said in disk_files.py. Writes go to the kernel's page cache and are not forced to
the disk: a cache that loses its newest blocks with the power has lost nothing that cannot be computed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from core.errors import ConfigError
from kvtransfer.tiers.base import BlockKey, Placement, StorePlan
from kvtransfer.tiers.disk_files import HEADER_BYTES, RECORD_BYTES, DiskFiles, Record
from kvtransfer.tiers.fingerprint import FINGERPRINT_BYTES
from kvtransfer.tiers.frequency import DECAY_USES
from kvtransfer.tiers.policies import DEFAULT_POLICY
from kvtransfer.tiers.slotted import SlottedTier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """One worker's disk tier.

    folder: where the files are; made if it is not there. One process at a time.
    capacity_bytes: what both files together never exceed.
    policy: which blocks leave, `arc` or `lru`.
    min_frequency: how often, by the measure of FrequencyFilter, a block must have been used to be written:
        2 is the second use, 0 writes every block.
    decay_uses: in so many uses of blocks a block's frequency falls by one; 0 for never.
    """

    folder: Path
    capacity_bytes: int
    policy: str = DEFAULT_POLICY
    min_frequency: int = 2
    decay_uses: int = DECAY_USES

    def __post_init__(self) -> None:
        for name in ("min_frequency", "decay_uses"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 0")


class DiskTier(SlottedTier):
    """Slots in two files. What an earlier process of the same KV left there is found from the start.

    block_bytes: bytes of a block.
    fingerprint: what the bytes belong to (kvtransfer/tiers/fingerprint.py); blocks of anything else are dropped.
    Raises ConfigError where not one block fits or the folder cannot be used, FolderInUseError where another process
    uses it.
    """

    def __init__(self, config: DiskConfig, block_bytes: int, fingerprint: bytes) -> None:
        assert len(fingerprint) == FINGERPRINT_BYTES, f"a fingerprint of {len(fingerprint)} bytes"
        num_slots = (config.capacity_bytes - HEADER_BYTES) // (block_bytes + RECORD_BYTES)
        if num_slots < 1:
            raise ConfigError(
                f"disk tier: {config.capacity_bytes} bytes hold no block of {block_bytes} bytes"
            )
        super().__init__(
            block_bytes, num_slots, config.policy, config.min_frequency, config.decay_uses
        )
        self._files = DiskFiles(config.folder, block_bytes, num_slots, fingerprint)
        self._digests = [b""] * num_slots
        self._sequences = [0] * num_slots
        self._num_placed = 0
        self._take_over()

    def prepare_store(self, chain: Sequence[BlockKey]) -> StorePlan | None:
        """See Tier.prepare_store. A block that has not been used often enough is left out."""
        plan = super().prepare_store(chain)
        for placement in reversed(plan.placements if plan else ()):
            self._num_placed += 1  # the head is the newest, as in the policy
            self._sequences[placement.slot] = self._num_placed
        return plan

    def write(self, placement: Placement, block: memoryview) -> None:
        """See Tier.write."""
        assert len(block) == self.block_bytes, f"{len(block)} bytes of a block"
        key, slot = placement
        digest = xxhash.xxh3_128_digest(block)
        self._files.write(Record(key, slot, self._sequences[slot], digest), block)
        self._digests[slot] = digest

    def expect(self, placements: Sequence[Placement]) -> None:
        """See Tier.expect: the kernel fetches while blocks before are read and verified."""
        self._files.read_ahead([placement.slot for placement in placements])

    def read(self, placement: Placement, block: memoryview) -> bool:
        """See Tier.read."""
        assert len(block) == self.block_bytes, f"{len(block)} bytes for a block"
        if not self._files.read(placement.slot, block):
            return False
        return xxhash.xxh3_128_digest(block) == self._digests[placement.slot]

    def close(self) -> None:
        """See Tier.close."""
        self._files.close()

    def _take_over(self) -> None:
        """Find the blocks that an earlier process left."""
        found = self._files.found
        self.counters.damaged_blocks_total = found.num_damaged
        self.counters.foreign_blocks_total = found.num_foreign
        by_age = sorted(found.records, key=lambda record: record.sequence)
        for record in by_age:
            self._digests[record.slot] = record.digest
            self._num_placed = record.sequence
        self._restore(Placement(record.key, record.slot) for record in by_age)

    def _erase(self, slot: int) -> None:
        try:
            self._files.erase(slot)
        except OSError as error:
            # The digest still keeps damaged bytes out; only the count of damage would be made again.
            logger.warning("disk tier: slot %d cannot be erased: %s", slot, error)

    def _erase_all(self) -> None:
        try:
            self._files.erase_all()  # also what was evicted and is not overwritten yet
        except OSError as error:
            logger.warning("disk tier: its index cannot be cleared: %s", error)
