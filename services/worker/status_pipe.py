"""How a worker tells the process that started it how far it has come: JSON lines in an inherited
pipe.

    listening --progress*--> ready          or --> failed, with one sentence

Without a pipe, progress goes to the log. The reader may vanish at any time; that is not the
worker's concern.
"""

from __future__ import annotations

import logging
import os

import msgspec

_log = logging.getLogger(__name__)


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The control service has its port; the model is not loaded yet."""

    control_address: str
    metrics_port: int = -1

    def __str__(self) -> str:
        return f"listening on {self.control_address}"


class Progress(msgspec.Struct, frozen=True, tag=True):
    """One line on how far loading has come."""

    message: str

    def __str__(self) -> str:
        return self.message


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker serves."""

    worker_id: str
    models: list[str]

    def __str__(self) -> str:
        return f"{self.worker_id} serves {', '.join(self.models)}"


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker refuses to start, for a reason that a restart would not change."""

    error_kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.error_kind}: {self.message}"


Status = Listening | Progress | Ready | Failed


class StatusPipe:
    """The writing end. fd: an inherited descriptor, -1 for none."""

    def __init__(self, fd: int = -1) -> None:
        self._fd = fd
        if fd >= 0:
            os.set_inheritable(fd, False)  # the engine must not keep it open

    def send(self, status: Status) -> None:
        """Tell the parent."""
        _log.info("%s", status)
        if self._fd < 0:
            return
        try:
            os.write(self._fd, msgspec.json.encode(status) + b"\n")
        except OSError:
            self._fd = -1


def decode_status(line: bytes) -> Status:
    """The status of one line, without or with its line end."""
    return msgspec.json.decode(line, type=Status)
