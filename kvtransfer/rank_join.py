"""What the ranks of a receiving worker say of a session, as one: the worker has what all of them have.

Each rank takes in its own part, over links of its own, and they need not agree: one may be complete while another has
lost its sender. So a block is whole when it is whole on every rank that holds a layer of its group, a session complete
when it is on every rank, and failed when it is on any. What one rank says of a session that has failed elsewhere is
dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from msgspec.structs import replace

from core.kv_layout import KVLayout
from kvtransfer.events import MoverEvent, ReceiveFailed, RunAdmitted, SessionComplete
from kvtransfer.session import SessionKey


@dataclass(slots=True)
class _Session:
    """What has been heard of one session attempt."""

    num_whole: Counter[tuple[int, int]] = field(
        default_factory=Counter
    )  # ranks, by (group, position)
    num_complete: int = 0
    is_failed: bool = False


class RankJoin:
    """Engine thread only. Sessions are known from `expect` to `forget`; of others every event is dropped."""

    def __init__(self, layout: KVLayout) -> None:
        self._num_ranks = layout.num_ranks
        self._num_holders = [
            sum(bool(layout.rank_share(group, rank).layers) for rank in range(layout.num_ranks))
            for group in range(len(layout.groups))
        ]
        self._sessions: dict[SessionKey, _Session] = {}

    def expect(self, key: SessionKey) -> None:
        """Every rank expects the session from now on."""
        self._sessions[key] = _Session()

    def forget(self, key: SessionKey) -> None:
        """Every rank has forgotten the session, or is about to. Idempotent."""
        self._sessions.pop(key, None)

    def hear(self, event: RunAdmitted | SessionComplete | ReceiveFailed) -> MoverEvent | None:
        """An event of one rank as one of the worker; None where it says nothing of all of them."""
        session = self._sessions.get((event.session, event.attempt))
        if session is None or session.is_failed:
            return None
        match event:
            case ReceiveFailed():
                session.is_failed = True
                return event
            case SessionComplete():
                session.num_complete += 1
                return event if session.num_complete == self._num_ranks else None
            case RunAdmitted(is_block_whole=True):
                place = (event.group, event.position)
                session.num_whole[place] += 1
                if session.num_whole[place] < self._num_holders[event.group]:
                    return replace(event, is_block_whole=False)
        return event
