"""Where receivers of one host listen."""

from __future__ import annotations

import os
import secrets
import socket
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
        _sweep(folder)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--ipc-dir: {folder} cannot be used: {error}") from error
    listener.setblocking(False)
    return listener, path


def connect(path: str) -> socket.socket:
    """A non-blocking socket, connected; PeerLost where nobody of this host listens there."""
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        sock.connect(path)
    except (FileNotFoundError, ConnectionRefusedError, PermissionError) as error:
        sock.close()
        raise PeerLost(f"shared memory: {path} is not reached from here: {error}") from error
    except OSError:
        sock.close()
        raise
    return sock


def _sweep(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue
