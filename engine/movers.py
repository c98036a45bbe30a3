"""Which transports a worker has, made from its config."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from core.blocks import BlockLife
from core.errors import ConfigError
from core.kv_layout import KVLayout
from engine.config import EngineConfig
from engine.kvcache.storage import Storage
from kvtransfer.config import TransferConfig
from kvtransfer.events import PostEvent
from kvtransfer.transports.base import Receiver, Sender
from kvtransfer.transports.choice import Receivers, Senders
from kvtransfer.transports.intake import Intake
from kvtransfer.transports.mooncake.engine import MooncakeEngine
from kvtransfer.transports.nixl.engine import NixlEngine
from kvtransfer.transports.pull.receiver import PullReceiver
from kvtransfer.transports.pull.sender import PullSender
from kvtransfer.transports.shm.receiver import ShmReceiver
from kvtransfer.transports.shm.sender import ShmSender
from kvtransfer.transports.tcp.receiver import TcpReceiver
from kvtransfer.transports.tcp.sender import TcpSender

AUTO, NONE = "auto", "none"

logger = logging.getLogger(__name__)


def make_movers(
    config: EngineConfig, life: BlockLife, storage: Storage, layout: KVLayout, post: PostEvent
) -> tuple[Receivers, Senders]:
    """Both ends of one worker, running. life: its generations are those of `storage.memory`, where shm is offered."""
    transfer = TransferConfig(
        data_host=config.data_host,
        link_rate_bytes_s=config.link_rate_bytes_s,
        window_bytes=config.transfer_window_bytes,
        ipc_dir=ipc_folder(config.ipc_dir),
        shm_checksums=config.shm_checksums,
    )
    intake = Intake(life, storage.buffer, layout, post)
    makers: dict[str, Callable[[PostEvent], Sender]] = {}
    receivers: list[Receiver] = []
    try:
        for kind in config.kv_transports:
            if receiver := _receiver(kind, config, intake, transfer):
                receivers.append(receiver)
                makers[kind] = partial(_sender, kind, storage, layout, transfer)
        if not receivers:
            raise ConfigError(
                f"--kv-transports: {','.join(config.kv_transports)}: none is left here"
            )
        return Receivers(intake, receivers), Senders(makers, post)
    except BaseException:
        for receiver in receivers:
            receiver.stop()
        raise


def _receiver(
    kind: str, config: EngineConfig, intake: Intake, transfer: TransferConfig
) -> Receiver | None:
    """D's end of one kind, running. None where shared memory is not to be had and need not be."""
    match kind:
        case "nixl":
            return PullReceiver(kind, NixlEngine(is_read=False), intake, transfer)
        case "mooncake":
            return PullReceiver(kind, MooncakeEngine(transfer.data_host), intake, transfer)
        case "shm":
            return _shared_memory_end(config, intake, transfer)
        case _:
            return TcpReceiver(intake, transfer)


def _sender(
    kind: str, storage: Storage, layout: KVLayout, transfer: TransferConfig, post: PostEvent
) -> Sender:
    """P's end of one kind, running."""
    memory = storage.memory
    match kind:
        case "nixl":
            return PullSender(kind, NixlEngine(is_read=True), memory, layout, post, transfer)
        case "mooncake":
            engine = MooncakeEngine(transfer.data_host)
            return PullSender(kind, engine, memory, layout, post, transfer)
        case "shm":
            return ShmSender(memory, layout, post, transfer)
        case _:
            return TcpSender(storage.buffer, layout, post, transfer)


def _shared_memory_end(
    config: EngineConfig, intake: Intake, transfer: TransferConfig
) -> ShmReceiver | None:
    """None where it is not wanted, or nobody asked for it and this host does not allow it."""
    if not transfer.ipc_dir:
        return None
    try:
        return ShmReceiver(intake, transfer)
    except ConfigError as error:
        if config.ipc_dir != AUTO:
            raise
        logger.warning("KV does not go through shared memory: %s", error.message)
        return None


def ipc_folder(name: str) -> str:
    """The directory that `--ipc-dir` means; "" for none. `auto`: one for each user of this host."""
    if name == NONE:
        return ""
    if name == AUTO:
        return str(Path(tempfile.gettempdir()) / f"baton-ipc-{os.getuid()}")
    return name
