"""Addresses and options of data sockets."""

from __future__ import annotations

import ipaddress
import socket

from core.errors import TransferError


def listen(host: str) -> socket.socket:
    """A non-blocking listener on a port that the system picks."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=128)
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """How senders name a listener: numeric, so that nobody has to resolve it."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def start_connect(address: str) -> socket.socket:
    """A non-blocking socket on its way to a numeric address."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not (_is_numeric(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise TransferError(f"data address: {address!r} is not a numeric host and a port")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        tune(sock)
        sock.connect((host, int(port)))
    except BlockingIOError:
        pass
    except OSError:
        sock.close()
        raise
    return sock


def _is_numeric(host: str) -> bool:
    """Whether a host is an address: a name would have to be resolved, which blocks."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def tune(sock: socket.socket) -> None:
    """Never block, never hold a small frame back, and notice a host that is gone.

    Buffer sizes are left to the kernel: it grows them beyond what a process may ask for.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
