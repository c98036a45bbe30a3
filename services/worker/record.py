"""The worker's record: what it says of itself to gateways and to the index, built once its engine
is ready.
"""

from __future__ import annotations

import socket
from pathlib import PurePath

from core.ids import WorkerId
from core.worker_info import WorkerInfo
from engine.messages import EngineReady
from services.rpc.bundle import bundle_digest
from services.worker.config import WorkerConfig

_WILDCARDS = ("0.0.0.0", "::", "[::]")


def advertised_host(config: WorkerConfig) -> str:
    """The host name under which others reach this worker."""
    if config.advertise_host:
        return config.advertise_host
    return socket.gethostname() if config.host in _WILDCARDS else config.host


def served_models(config: WorkerConfig) -> tuple[str, ...]:
    """The names clients may use: as configured, or derived from the model.

    A file's or folder's path gives its last part without a weight file's ending; a Hub id stays as
    it is.
    """
    if config.served_model_names:
        return config.served_model_names
    model = config.engine.model
    path = PurePath(model)
    if path.suffix == ".gguf":
        return (path.name.removesuffix(".gguf"),)
    is_path = path.is_absolute() or model.startswith(".") or len(path.parts) > 2
    return (path.name if is_path else model,)


def worker_id(config: WorkerConfig, port: int) -> WorkerId:
    """The worker's name: as configured, or from where it listens, so that a restart keeps it."""
    name = config.worker_id or f"{config.engine.role.value}-{advertised_host(config)}-{port}"
    return WorkerId(name)


def build_record(config: WorkerConfig, port: int, ready: EngineReady) -> WorkerInfo:
    """The record of this epoch. data_addresses: those over tcp, one a rank."""
    return WorkerInfo(
        id=worker_id(config, port),
        epoch=ready.epoch,
        role=config.engine.role,
        control_address=f"{advertised_host(config)}:{port}",
        data_addresses=_data_addresses(ready),
        models=served_models(config),
        model_bundle_digest=bundle_digest(ready.bundle),
        max_model_len=ready.max_model_len,
        identity=ready.identity,
        layout=ready.layout,
        hash_root=ready.hash_root,
        num_blocks=ready.num_blocks,
        rates=ready.rates,
    )


def _data_addresses(ready: EngineReady) -> tuple[str, ...]:
    """Those that a person may want to reach; peers are offered all of them when a session begins."""
    return tuple(a for offer in ready.transports if offer.kind == "tcp" for a in offer.addresses)
