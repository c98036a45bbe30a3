"""How the engine thread calls a mover thread out of its selector."""

from __future__ import annotations

import socket


class Wakeup:
    """A self-pipe. Work is queued first and signalled after, so that none is missed."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_signalled = False

    def fileno(self) -> int:
        """The descriptor that turns readable; for a selector."""
        return self._reader.fileno()

    def signal(self) -> None:
        """Wake the mover thread. Any thread; a signal not yet taken is not repeated."""
        if not self._is_signalled:
            self._is_signalled = True
            try:
                self._writer.send(b"\0")
            except OSError:
                pass  # full: a signal is pending anyway; closed: nobody is left to wake

    def drain(self) -> None:
        """Take the signal, before looking for work."""
        try:
            self._reader.recv(4096)
        except BlockingIOError:
            pass
        self._is_signalled = False

    def close(self) -> None:
        """Give both ends back."""
        self._reader.close()
        self._writer.close()
