"""Records of the index as bytes, a schema version in front of each.

Owns the two records that other processes read: WorkerInfo (msgpack) and WorkerLoad (JSON, because it travels as text
inside the answer to a match). A record of another version, or one whose content makes no sense, decodes to a named
error and never to a guess; who reads records ignores and counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from core.errors import ServeError
from core.worker_info import WorkerInfo, WorkerLoad

SCHEMA_VERSION = 1
"""Version of keys and records; a change of either that an old reader would misread raises it."""

_Value = TypeVar("_Value", WorkerInfo, WorkerLoad)


class UnknownSchema(ServeError):
    """A record has a schema version that this process does not read."""


class UndecodableRecord(ServeError):
    """A record of our version has content that makes no sense."""


def encode_worker_info(info: WorkerInfo) -> bytes:
    """The record of a worker."""
    return msgspec.msgpack.encode((SCHEMA_VERSION, info))


def decode_worker_info(data: bytes) -> WorkerInfo:
    """The worker of a record. Raises UnknownSchema or UndecodableRecord."""
    return _decode(data, WorkerInfo, msgspec.msgpack.decode)


def encode_worker_load(load: WorkerLoad) -> bytes:
    """The record of a load."""
    return msgspec.json.encode((SCHEMA_VERSION, load))


def decode_worker_load(data: bytes | str) -> WorkerLoad:
    """The load of a record. Raises UnknownSchema or UndecodableRecord."""
    return _decode(data, WorkerLoad, msgspec.json.decode)


def _decode(data: bytes | str, kind: type[_Value], parse: Callable[..., Any]) -> _Value:
    # The version is read alone first: a future record need not have a body that we could parse.
    try:
        parts = parse(data, type=list[msgspec.Raw])
        version = parse(parts[0], type=int)
        if version != SCHEMA_VERSION:
            raise UnknownSchema(f"index record: schema version {version} is not {SCHEMA_VERSION}")
        value: _Value = parse(parts[1], type=kind)
        return value
    except UnknownSchema:
        raise
    except (msgspec.MsgspecError, IndexError, ServeError) as error:
        raise UndecodableRecord(f"index record: not a {kind.__name__} ({error})") from error
