"""D's end of all connections of one kind: a listener and one mover thread that takes in what arrives."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from core.errors import TransferError
from core.ids import SessionId
from kvtransfer.config import TransferConfig
from kvtransfer.counters import TransferCounters
from kvtransfer.session import ReceiveSession
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.links import wire
from kvtransfer.transports.links.inbound import InboundLink
from kvtransfer.transports.links.patience import Patience
from kvtransfer.transports.links.wakeup import Wakeup

logger = logging.getLogger(__name__)

MAX_STRANGERS = 128
"""Connections without an accepted session; further ones are closed at once."""

_CHECK_STRANGERS_SECONDS = 0.5


class LinkReceiver:
    """`transports.base.Receiver` over connections; `_link_of` knows what is special about their kind."""

    def __init__(
        self,
        kind: str,
        intake: Intake,
        listener: socket.socket,
        address: str,
        link_of: Callable[..., InboundLink],
        config: TransferConfig,
    ) -> None:
        """listener: non-blocking, owned from now on. link_of: makes an InboundLink, with its arguments."""
        self._kind = kind
        self._intake = intake
        self._config = config
        self._hello = wire.Hello(wire.PROTOCOL_VERSION, config.worker_name)
        self._listener = listener
        self._address = address
        self._link_of = link_of
        self._wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._links: set[InboundLink] = set()
        self._ending: list[InboundLink] = []  # closed, but busy
        self._patience = Patience()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-receiver", daemon=False)
        self._thread.start()

    @property
    def kind(self) -> str:
        """The transport's name in offers."""
        return self._kind

    @property
    def addresses(self) -> list[str]:
        """Where senders reach this end."""
        return [self._address]

    @property
    def counters(self) -> TransferCounters:
        """Live counters of this end."""
        return self._intake.counters

    def expect(self, session: ReceiveSession) -> None:
        """See `Receiver.expect`."""
        self._intake.expect(session)

    def forget(self, session: SessionId, attempt: int) -> None:
        """See `Receiver.forget`."""
        self._intake.forget(session, attempt)

    def stop(self) -> None:
        """See `Receiver.stop`."""
        self._is_stopping = True
        self._wakeup.signal()
        self._thread.join()

    def close(self) -> None:
        """See `Receiver.close`."""
        self.stop()
        self._intake.close()

    # ---- mover thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except Exception:
            logger.exception("kv receiver stopped by a fault of its own")
        finally:
            self._shut()

    def _turn(self) -> None:
        num_strangers = sum(not link.is_trusted for link in self._links)
        for key, mask in self._selector.select(self._timeout_s(num_strangers)):
            if isinstance(key.data, InboundLink):
                # a link that is not read from for now says nothing but that it is lost
                self._serve(key.data, mask or selectors.EVENT_READ)
            elif key.fileobj is self._listener:
                self._accept(num_strangers)
            else:
                self._wakeup.drain()
        if num_strangers:
            self._drop_slow_strangers(time.monotonic())
        self._advance()

    def _timeout_s(self, num_strangers: int) -> float | None:
        """How long to wait for the sockets; what is under way beside them is looked at soon."""
        if self._ending or any(link.is_busy for link in self._links):
            return self._patience.wait_s()
        return _CHECK_STRANGERS_SECONDS if num_strangers else None

    def _advance(self) -> None:
        """Look at everything that is under way."""
        for link in [link for link in self._links if link.is_busy]:
            self._serve(link, 0)
        for link in self._ending:
            try:
                self._note_progress(link.advance())
            except (OSError, TransferError) as error:
                logger.debug("kv receiver: the rest of %s is lost: %s", link.peer_name, error)
        self._ending = [link for link in self._ending if link.is_busy]

    def _note_progress(self, has_advanced: bool) -> None:
        if has_advanced:
            self._patience.renew()

    def _accept(self, num_strangers: int) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:  # aborted meanwhile, or no descriptor left
            logger.warning("kv receiver cannot accept: %s", error)
            time.sleep(0.001)
            return
        if num_strangers >= MAX_STRANGERS:
            self._intake.count(refused_connections_total=1)
            sock.close()
            return
        sock.setblocking(False)
        deadline_s = time.monotonic() + self._config.connect_timeout_s
        link = self._link_of(sock, self._intake, self._hello, deadline_s)
        self._links.add(link)
        self._selector.register(sock, selectors.EVENT_READ, link)
        logger.debug("kv receiver: connection from %s", address)

    def _serve(self, link: InboundLink, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                link.read()
            self._note_progress(link.advance())
            link.flush()
        except OSError as error:
            self._lose(link, error)
        except TransferError as error:
            self._refuse(link, error)
        else:
            events = selectors.EVENT_READ if link.may_read else 0
            events |= selectors.EVENT_WRITE if link.has_answers else 0
            if self._selector.get_key(link.sock).events != events:
                self._selector.modify(link.sock, events, link)

    def _lose(self, link: InboundLink, error: OSError) -> None:
        logger.debug("kv receiver: connection of %s ended: %s", link.peer_name, error)
        if link.is_trusted:
            self._intake.count(connections_lost_total=1)
        self._drop(link)

    def _refuse(self, link: InboundLink, error: TransferError) -> None:
        logger.warning("kv receiver refused %s: %s", link.peer_name or "a stranger", error)
        self._intake.count(refused_connections_total=1)
        try:
            link.flush()
        except OSError:
            pass
        self._drop(link)

    def _drop_slow_strangers(self, now_s: float) -> None:
        for link in [x for x in self._links if not x.is_trusted and x.deadline_s < now_s]:
            self._refuse(link, TransferError("showed no session in time"))

    def _drop(self, link: InboundLink) -> None:
        self._selector.unregister(link.sock)
        self._links.discard(link)
        link.close()
        if link.is_busy:
            self._ending.append(link)

    def _shut(self) -> None:
        for link in list(self._links):
            self._drop(link)
        if not self._is_stopping:
            self._intake.fail_all(TransferError("the receiver of this worker stopped"))
        self._selector.close()
        self._listener.close()
        self._wakeup.close()
