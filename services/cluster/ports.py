"""Ports that are kept for servers which have not started yet, or which come and go."""

from __future__ import annotations

import socket
import sys

KEEPS_PORTS = sys.platform == "linux"
"""Whether a server may listen at an address that another socket is bound to without listening there."""


class HeldPort:
    """A TCP port, of the system's choice, that this process keeps until `close`.

    A port that was merely free a moment ago can be given to any client or server before ours has taken it, and again
    whenever ours is away. Linux gives one that is held to nobody who asks for any port, refuses connections to it, and
    lets a server which names it, and sets SO_REUSEADDR as servers do, have it as often as it likes. Elsewhere
    (`KEEPS_PORTS`) the port is let go at once, and is only likely to be free.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        """host: the address that the server will listen on, a number; of a name only its first address is held.

        Raises OSError where there is none.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host.strip("[]"), 0))
            self.port: int = self._socket.getsockname()[1]
        except BaseException:
            self._socket.close()
            raise
        if not KEEPS_PORTS:
            self._socket.close()

    def close(self) -> None:
        """Let it go; a server that listens there stays. Idempotent."""
        self._socket.close()
