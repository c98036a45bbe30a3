"""Where receivers of one host listen."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from pathlib import Path

from core.errors import ConfigError, PeerLost

_PREFIX = "kv-"
_MAX_PATH_BYTES = 107
"""What a unix socket's address holds."""


def listen(ipc_dir: str) -> tuple[socket.socket, str]:
    """A non-blocking listener on a path of its own in a directory, made if need be, and that path.

    Only this user gets to it. What receivers that were killed have left there is swept first.
    """
    folder = Path(ipc_dir).absolute()
    path = str(folder / f"{_PREFIX}{secrets.token_hex(8)}")
    if len(path.encode()) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"--ipc-dir: {folder} is too long; paths in it may have {_MAX_PATH_BYTES} bytes"
        )
    listener = socket.socket(socket.AF_UNIX)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError("it belongs to another user")
        _sweep(folder)
        hidden = str(folder / f".{secrets.token_hex(8)}")
        listener.bind(hidden)
        os.chmod(hidden, 0o600)
        listener.listen(128)
        os.rename(hidden, path)  # no sweep sees one that does not listen yet
    except OSError as error:
        listener.close()
        raise ConfigError(f"--ipc-dir: {folder} cannot be used: {error}") from error
    listener.setblocking(False)
    return listener, path


def connect(path: str) -> socket.socket:
    """A non-blocking socket, connected; PeerLost where nobody of this host and user listens there."""
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        sock.connect(path)
        if _peer_uid(sock) != os.getuid():
            raise PermissionError("another user listens there")
    except (FileNotFoundError, ConnectionRefusedError, PermissionError) as error:
        sock.close()
        raise PeerLost(f"shared memory: {path} is not reached from here: {error}") from error
    except OSError:
        sock.close()
        raise
    return sock


def _peer_uid(sock: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def _sweep(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # a full backlog is somebody's
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue
