"""One request on D whose prompt another worker computes.

CALLED    a Prefill stream to a candidate is open or being opened; no block is held
DECLINED  P announced, D had no room; no block is held; asked again when there is room
GRANTED   what D holds is pinned, the rest reserved, and KV may arrive
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from core.blocks import Permit
from core.ids import SessionId
from core.kv_layout import KVLayout
from engine.channel import monotonic_ms
from engine.remote.timeline import Timeline
from engine.sequence import Sequence
from kvtransfer.plan import TransferPlan
from kvtransfer.session import SECRET_BYTES

_SESSION_BITS = 63


class ArrivalState(Enum):
    """How far the current attempt has come."""

    CALLED = "called"
    DECLINED = "declined"
    GRANTED = "granted"


@dataclass(slots=True)
class Arrival:
    """A sequence in WAITING_FOR_KV and the attempt that is under way for it.

    candidates: prefill workers not yet asked, best first.
    candidate: the one being asked.
    plan: how its KV becomes ours, once it has announced.
    num_pinned_blocks: leading blocks that D held itself when it granted.
    is_covered: whether every byte has arrived and is verified.
    has_first_tokens: whether any attempt has brought the first tokens; they are relayed once.
    whole_blocks: (group, position) of blocks that have arrived whole in this attempt.
    last_sign_ms: when P was last heard of, for the attempt's timeout.
    """

    sequence: Sequence
    candidates: deque[str]
    timeline: Timeline
    session: SessionId = field(default_factory=lambda: SessionId(secrets.randbits(_SESSION_BITS)))
    attempt: int = 0
    candidate: str = ""
    secret: bytes = b""
    state: ArrivalState = ArrivalState.CALLED
    plan: TransferPlan | None = None
    permit: Permit | None = None
    num_pinned_blocks: int = 0
    is_covered: bool = False
    has_first_tokens: bool = False
    whole_blocks: set[tuple[int, int]] = field(default_factory=set)
    last_sign_ms: float = 0.0

    def begin_attempt(self) -> None:
        """Turn to the next candidate: a new attempt with a secret of its own, holding nothing."""
        self.candidate = self.candidates.popleft()
        self.attempt += 1
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.state = ArrivalState.CALLED
        self.plan = None
        self.permit = None
        self.num_pinned_blocks = 0
        self.is_covered = False
        self.whole_blocks.clear()
        self.note_sign()

    def note_sign(self) -> None:
        """P gave a sign of life."""
        self.last_sign_ms = monotonic_ms()

    def note_runs(self, group: int, whole: Iterable[int]) -> None:
        """More layers of some blocks are in the pool and verified. whole: positions of which now every layer is."""
        self.whole_blocks.update((group, position) for position in whole)
        self.note_sign()

    def num_verified_blocks(self, layout: KVLayout) -> int:
        """Leading full blocks of the prompt that are whole: pinned here, or arrived in every layer."""
        groups = range(len(layout.groups))
        num_full = self.sequence.num_prompt_tokens // layout.block_size
        position = self.num_pinned_blocks
        while position < num_full and all((g, position) in self.whole_blocks for g in groups):
            position += 1
        return position
