"""D's end of shm: what senders of this host announce is copied out of their pools."""

from __future__ import annotations

import os

from kvtransfer.config import TransferConfig
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.links.receiver import LinkReceiver
from kvtransfer.transports.shm import sockets
from kvtransfer.transports.shm.inbound import ShmInbound


class ShmReceiver(LinkReceiver):
    """`transports.base.Receiver` through shared memory."""

    def __init__(self, intake: Intake, config: TransferConfig) -> None:
        listener, self._path = sockets.listen(config.ipc_dir)
        super().__init__("shm", intake, listener, self._path, ShmInbound, config)

    def stop(self) -> None:
        """See LinkReceiver.stop."""
        super().stop()
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
