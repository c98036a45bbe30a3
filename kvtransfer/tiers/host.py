"""The host tier: blocks in this machine's memory, in one slab that is mapped at the start."""

from __future__ import annotations

import xxhash

from core.errors import ConfigError
from kernels.host_memory import HostMemory, copy_runs
from kvtransfer.pool_memory import PoolMemory, num_blocks_within
from kvtransfer.tiers.base import Placement
from kvtransfer.tiers.policies import DEFAULT_POLICY
from kvtransfer.tiers.slotted import SlottedTier


class HostTier(SlottedTier):
    """Slots in a PoolMemory, which is never larger than `capacity_bytes`; its pages are populated as they are used.

    Raises ConfigError where not one block fits, or the memory cannot be mapped.
    """

    def __init__(
        self,
        capacity_bytes: int,
        block_bytes: int,
        policy: str = DEFAULT_POLICY,
        min_frequency: int = 0,
    ) -> None:
        """min_frequency: how often a block must have been used to be stored, see FrequencyFilter; 0 for every block."""
        num_slots = num_blocks_within(capacity_bytes, block_bytes)
        if num_slots < 1:
            raise ConfigError(
                f"host tier: {capacity_bytes} bytes hold no block of {block_bytes} bytes"
            )
        super().__init__(block_bytes, num_slots, policy, min_frequency)
        try:
            self._memory: PoolMemory | None = PoolMemory(num_slots, block_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"host tier: {capacity_bytes} bytes cannot be mapped: {error}"
            ) from error
        self._digests = [b""] * num_slots

    def slot_buffer(self, slot: int) -> memoryview:
        """The bytes of a slot, for a mover that copies them itself; between the two halves of a pair only."""
        assert self._memory is not None, "the tier is closed"
        return self._memory.buffer[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def write(self, placement: Placement, block: memoryview) -> None:
        """See Tier.write. The digest is of the bytes given, so that a copy that goes wrong is found out."""
        assert len(block) == self.block_bytes, f"{len(block)} bytes of a block"
        self._copy(HostMemory(self.slot_buffer(placement.slot)), HostMemory(block))
        self._digests[placement.slot] = xxhash.xxh3_128_digest(block)

    def read(self, placement: Placement, block: memoryview) -> bool:
        """See Tier.read. The digest is of the copy: what counts is what the reader has."""
        assert len(block) == self.block_bytes, f"{len(block)} bytes for a block"
        self._copy(HostMemory(block), HostMemory(self.slot_buffer(placement.slot)))
        return xxhash.xxh3_128_digest(block) == self._digests[placement.slot]

    def close(self) -> None:
        """See Tier.close."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _copy(self, to: HostMemory, source: HostMemory) -> None:
        """One block, leaving the interpreter to others meanwhile."""
        copy_runs(to, [0], source, [0], self.block_bytes)
