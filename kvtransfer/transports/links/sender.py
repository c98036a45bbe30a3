"""P's end of all connections of one kind: one mover thread that sends what is pushed.

The engine thread only queues commands; everything else, the outbox included, belongs to the mover.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from core.errors import TransferError
from core.ids import SessionId
from kvtransfer.config import TransferConfig
from kvtransfer.counters import TransferCounters
from kvtransfer.events import PostEvent, SendFailed, SessionDrained
from kvtransfer.session import OutgoingPlan, SendSession, SessionKey, SourceBlock
from kvtransfer.transports.links.outbound import OutboundCarrier, OutboundLink
from kvtransfer.transports.links.token_bucket import TokenBucket
from kvtransfer.transports.links.wakeup import Wakeup
from kvtransfer.transports.outbox import Outbox, pushed_bytes

logger = logging.getLogger(__name__)

SEND_BATCH_BYTES = 1024 * 1024
"""What one connection may send before the others have a turn, where no rate is set."""

MAX_TURNS_ALONE = 4
"""How many such turns a connection that is the only one may have before its answers are looked at."""

MAX_COMMANDS_A_TURN = 4
"""Pushes that are taken before the links have a turn: what is ready leaves while more is being queued."""


class LinkSender:
    """`transports.base.Sender` over connections; `_carrier` knows what is special about their kind."""

    def __init__(
        self,
        kind: str,
        outbox: Outbox,
        carrier: OutboundCarrier,
        post: PostEvent,
        config: TransferConfig,
    ) -> None:
        """outbox: owned from now on, by the mover thread."""
        self._kind = kind
        self._counters = outbox.counters
        self._post = post
        self._config = config
        self._outbox = outbox
        self._carrier = carrier
        self._bucket = TokenBucket(config.link_rate_bytes_s)
        self._open_plans: dict[SessionKey, dict[str, OutgoingPlan | None]] = {}  # by address
        self._commands: deque[Callable[[], None]] = deque()
        self._wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._links: dict[str, OutboundLink] = {}
        self._is_stopping = False
        self._lock = threading.Lock()  # orders the last command before the end of the mover
        self._is_over = False
        self._num_urgent = 0
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=False)
        self._thread.start()

    @property
    def kind(self) -> str:
        """The transport's name in offers."""
        return self._kind

    @property
    def counters(self) -> TransferCounters:
        """Live counters of this end."""
        return self._counters

    # ---- engine thread

    @property
    def carries_plans(self) -> bool:
        """See `Sender.carries_plans`."""
        return True

    def reaches(self, address: str) -> bool:
        """See `Sender.reaches`."""
        return True

    def open(self, session: SendSession) -> None:
        """See `Sender.open`."""
        plans = self._open_plans.setdefault(session.key, {})
        assert session.address not in plans, f"session {session.key} is open there already"
        plans[session.address] = session.plan
        is_taken = self._urgent_command(partial(self._take_open, session))
        if not is_taken and len(plans) == 1:  # told once
            self._post(SendFailed(*session.key, TransferError("the sender has ended")))

    def push(
        self,
        session: SessionId,
        attempt: int,
        group: int,
        blocks: Sequence[SourceBlock],
        first_layer: int,
        num_layers: int,
    ) -> None:
        """See `Sender.push`."""
        key, layers = (session, attempt), (first_layer, num_layers)
        plans = list(self._open_plans.get(key, {}).values())
        num_bytes = pushed_bytes(self._outbox.layout, plans, group, blocks, layers)
        self._counters.pushed_bytes_total += num_bytes
        self._command(partial(self._outbox.push, key, group, tuple(blocks), layers, num_bytes))

    def close_session(self, session: SessionId, attempt: int) -> None:
        """See `Sender.close_session`."""
        key = (session, attempt)
        if self._open_plans.pop(key, None) is None:
            return
        if not self._urgent_command(partial(self._take_close, key)):
            self._post(SessionDrained(session, attempt))

    def close(self) -> None:
        """See `Sender.close`."""
        self._is_stopping = True
        self._wakeup.signal()
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> bool:
        """Hand a command to the mover; False when there is no mover any more."""
        with self._lock:
            if self._is_over:
                return False
            self._commands.append(command)
        self._wakeup.signal()
        return True

    def _urgent_command(self, command: Callable[[], None]) -> bool:
        """The same for one that is taken with all before it in the next turn: others' pushes do not hold it up."""

        def taken() -> None:
            with self._lock:
                self._num_urgent -= 1
            command()

        with self._lock:
            self._num_urgent += 1
        return self._command(taken)

    # ---- mover thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except Exception:
            logger.exception("kv sender stopped by a fault of its own")
        finally:
            self._shut()

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._timeout_s()):
            if isinstance(key.data, OutboundLink):
                key.data.handle(mask, time.monotonic())
            else:
                self._wakeup.drain()
        num_taken = 0
        while self._commands and (num_taken < MAX_COMMANDS_A_TURN or self._num_urgent):
            self._commands.popleft()()
            num_taken += 1
        self._serve_links(time.monotonic())

    def _timeout_s(self) -> float | None:
        """How long nothing can happen by itself; None when that is for ever."""
        if self._commands:
            return 0.0
        now_s = time.monotonic()
        waits_s = [
            link.wait_until_s - now_s
            for link in self._links.values()
            if link.wait_until_s is not None
        ]
        if any(link.can_send for link in self._links.values()):
            waits_s.append(self._bucket.wait_s(now_s))
        return max(0.0, min(waits_s)) if waits_s else None

    def _serve_links(self, now_s: float) -> None:
        """A turn for each link, as far as the rate allows; the next round begins with another."""
        max_bytes = self._bucket.slice_bytes if self._bucket.is_limited else SEND_BATCH_BYTES
        if len(self._links) == 1 and not self._bucket.is_limited:
            self._send_ahead(next(iter(self._links.values())), now_s)
        for address, link in list(self._links.items()):
            link.advance(now_s)
            if link.is_unused:
                del self._links[address], self._outbox.lanes[address]
            elif link.can_send and self._bucket.wait_s(now_s) <= 0:
                self._bucket.spend(link.send(max_bytes, now_s))
                if self._bucket.is_limited:
                    self._links[address] = self._links.pop(address)

    def _send_ahead(self, link: OutboundLink, now_s: float) -> None:
        """The turns of a link that nobody shares with, but for its last one; a command ends them."""
        for _ in range(MAX_TURNS_ALONE - 1):
            if self._commands or not link.can_send:
                break
            link.send(SEND_BATCH_BYTES, now_s)

    def _take_open(self, session: SendSession) -> None:
        lane = self._outbox.open(session)
        if lane.address not in self._links:
            link = OutboundLink(lane, self._outbox, self._carrier, self._config, self._selector)
            self._links[lane.address] = link

    def _take_close(self, key: SessionKey) -> None:
        for part in self._outbox.parts(key):
            if (link := self._links.get(part.lane.address)) is not None:
                link.detach(part)
        self._outbox.close_session(key)

    def _shut(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        with self._lock:
            self._is_over = True
        if not self._is_stopping:
            self._end_sessions()
        self._outbox.close()
        self._selector.close()
        self._wakeup.close()

    def _end_sessions(self) -> None:
        """After a fault of our own: what is owed an event gets it."""
        while self._commands:
            self._commands.popleft()()
        for lane in self._outbox.lanes.values():
            for session in lane.sessions.values():
                self._outbox.fail(session, TransferError("the sender of this worker stopped"))
