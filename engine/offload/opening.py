"""The tiers that a worker's config asks for."""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path

from core.block_hash import BlockHash, HashRoot
from core.errors import ConfigError
from core.events import Tier as TierName
from core.kv_layout import KVLayout
from engine.offload_config import OffloadConfig
from kvtransfer.tiers.base import BlockKey, Tier
from kvtransfer.tiers.connector import KVConnector
from kvtransfer.tiers.disk import DiskConfig, DiskTier
from kvtransfer.tiers.disk_files import FolderInUseError, leave_memory
from kvtransfer.tiers.fingerprint import FINGERPRINT_BYTES, fingerprint
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.mover import PostDone
from kvtransfer.tiers.remote.open import RemoteConfig, open_remote_tier

MAX_WAITING_BYTES = 64 << 20
"""Most that one tier's stores may keep held in the pool."""

POOL_SHARE = 8
"""All tiers' stores together keep no more than one part in so many of the pool held."""

MAX_FOLDERS = 64
"""Workers of one machine that may share a disk folder."""

_PROBE_BLOCKS = 8

logger = logging.getLogger(__name__)


def open_tiers(
    config: OffloadConfig, layout: KVLayout, root: HashRoot, num_blocks: int, post: PostDone
) -> KVConnector:
    """Every tier that is asked for, with its movers running; none at all where none is. num_blocks: the pool's.

    Raises ConfigError where one cannot be had.
    """
    tiers: dict[TierName, Tier] = {}
    mark = fingerprint(root, layout)
    try:
        if config.host_bytes:
            tiers[TierName.HOST] = HostTier(
                config.host_bytes, layout.block_bytes, config.policy, config.store_threshold
            )
        if config.disk_dir:
            tiers[TierName.DISK] = _open_disk(config, layout.block_bytes, mark)
        if config.remote_url:
            remote = RemoteConfig(config.remote_url, config.remote_bytes, config.policy)
            tiers[TierName.REMOTE] = open_remote_tier(remote, layout.block_bytes, mark)
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise
    share = num_blocks * layout.block_bytes // (POOL_SHARE * max(1, len(tiers)))
    rates = {n: _measure(n, config, layout) for n, tier in tiers.items() if not tier.is_shared}
    for name, tier in tiers.items():
        logger.info(
            "%s tier: %d blocks of %d, %d held", name, tier.num_slots, tier.block_bytes, len(tier)
        )
    return KVConnector(tiers, post, min(share, MAX_WAITING_BYTES), config.load_rate, rates)


def _open_disk(config: OffloadConfig, block_bytes: int, mark: bytes) -> DiskTier:
    """The first folder inside `disk_dir` that no other worker uses."""
    for number in range(MAX_FOLDERS):
        folder = Path(config.disk_dir) / f"worker-{number}"
        disk = DiskConfig(folder, config.disk_bytes, config.policy, config.disk_threshold)
        try:
            return DiskTier(disk, block_bytes, mark)
        except FolderInUseError:
            continue
    raise ConfigError(
        f"--kv-offloading-disk-dir: {config.disk_dir!r} is in use by {MAX_FOLDERS} other workers"
    )


def _measure(name: TierName, config: OffloadConfig, layout: KVLayout) -> float:
    """Bytes a second that a tier of our own gives back and verifies: a few blocks, in a place of their own."""
    size = layout.block_bytes
    if name is TierName.HOST:
        return _read_rate(HostTier(2 * _PROBE_BLOCKS * (size + 4096), size))
    with tempfile.TemporaryDirectory(prefix="probe-", dir=config.disk_dir) as folder:
        disk = DiskConfig(Path(folder), 2 * _PROBE_BLOCKS * (size + 4096), min_frequency=0)
        return _read_rate(DiskTier(disk, size, bytes(FINGERPRINT_BYTES)), Path(folder) / "blocks")


def _read_rate(tier: Tier, file: Path | None = None) -> float:
    """file: what is to be read from the disk and not from memory."""
    try:
        chain = [BlockKey(BlockHash(bytes([number] * 16))) for number in range(_PROBE_BLOCKS)]
        buffer = memoryview(bytearray(tier.block_bytes))
        plan = tier.prepare_store(chain)
        assert plan is not None, "an empty tier has room"
        for placement in plan.placements:
            tier.write(placement, buffer)
        if file is not None:
            leave_memory(file)
        started = time.perf_counter()
        tier.expect(plan.placements)
        for placement in plan.placements:
            tier.read(placement, buffer)
        return len(chain) * tier.block_bytes / (time.perf_counter() - started)
    finally:
        tier.close()
