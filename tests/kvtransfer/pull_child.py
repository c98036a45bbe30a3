"""P in a process of its own, to be stopped and killed: `KIND ADDRESS SESSION SECRET NUM_TOKENS`.

Pushes all blocks of a prompt, whose bytes `block_bytes_of` tells, and lives until its input ends.
"""

from __future__ import annotations

import sys

from core.ids import BlockId, SessionId
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from kvtransfer.config import TransferConfig
from kvtransfer.pool_memory import PoolMemory
from kvtransfer.session import SendSession, SourceBlock
from kvtransfer.transports.mooncake.engine import MooncakeEngine
from kvtransfer.transports.nixl.engine import NixlEngine
from kvtransfer.transports.pull.sender import PullSender

LAYOUT = KVLayout(
    16, (KVGroup(GroupKind.FULL_ATTENTION, tuple(range(8)), 8, SlotFormat.of("float32", 64)),)
)
"""512 KiB a block."""


def bytes_of(position: int) -> bytes:
    """What P's block at a position holds."""
    return bytes([position % 251 + 1]) * LAYOUT.block_bytes


def main() -> None:
    kind, address, session, secret, num_tokens = sys.argv[1:]
    num_blocks = LAYOUT.num_blocks(int(num_tokens))
    memory = PoolMemory(num_blocks + 1, LAYOUT.block_bytes)
    sources = []
    for position in range(num_blocks):
        start = (position + 1) * LAYOUT.block_bytes
        memory.buffer[start : start + LAYOUT.block_bytes] = bytes_of(position)
        slots = LAYOUT.valid_slots(position, int(num_tokens))
        sources.append(SourceBlock(position, BlockId(position + 1), slots))
    engine = NixlEngine(is_read=True) if kind == "nixl" else MooncakeEngine("127.0.0.1")
    sender = PullSender(
        kind, engine, memory, LAYOUT, lambda event: print(type(event).__name__, flush=True),
        TransferConfig(link_rate_bytes_s=200e6),
    )  # fmt: skip
    key = (SessionId(int(session)), 0)
    sender.open(SendSession(*key, bytes.fromhex(secret), address))
    sender.push(*key, 0, sources, 0, len(LAYOUT.groups[0].layers))
    sys.stdin.read()
    sender.close_session(*key)
    sender.close()
    memory.close()


if __name__ == "__main__":
    main()
