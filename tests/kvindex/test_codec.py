"""Records survive the way through bytes, and strange ones are named, not guessed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from core.worker_info import WorkerLoad, WorkerRates
from kvindex.codec import (
    SCHEMA_VERSION,
    UndecodableRecord,
    UnknownSchema,
    decode_worker_info,
    decode_worker_load,
    encode_worker_info,
    encode_worker_load,
)
from tests.support.index_values import create_worker


def test_a_worker_and_a_load_survive() -> None:
    worker = create_worker(epoch=2**63 - 1)
    assert decode_worker_info(encode_worker_info(worker)) == worker
    load = WorkerLoad(1, 2, 3, 4, ("r1", "r2"))
    assert decode_worker_load(encode_worker_load(load)) == load


def test_records_of_workers_that_know_fewer_or_more_rates_are_read() -> None:
    worker = replace(create_worker(), rates=WorkerRates(1000.0, 5.0, 4000.0))
    assert decode_worker_info(encode_worker_info(worker)).rates.load_tokens_per_s == 4000.0
    record = msgspec.to_builtins(worker, builtin_types=(bytes,))
    del record["rates"]["load_tokens_per_s"]
    older = decode_worker_info(msgspec.msgpack.encode([SCHEMA_VERSION, record]))
    assert older == replace(worker, rates=WorkerRates(1000.0, 5.0, 0.0))
    newer = msgspec.to_builtins(worker, builtin_types=(bytes,))
    newer["rates"]["unheard_of"] = 1.0
    assert decode_worker_info(msgspec.msgpack.encode([SCHEMA_VERSION, newer])) == worker


def test_another_version_is_named_whatever_its_body() -> None:
    with pytest.raises(UnknownSchema, match="schema version 9"):
        decode_worker_load(b'[9, "new words"]')
    for body in [[SCHEMA_VERSION + 1, "anything", {}], [SCHEMA_VERSION + 1, 7], [0, None]]:
        with pytest.raises(UnknownSchema, match="schema version"):
            decode_worker_info(msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"no msgpack at all",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([SCHEMA_VERSION]),
        msgspec.msgpack.encode(["one", {}]),
        msgspec.msgpack.encode([SCHEMA_VERSION, {"id": 3}]),
    ],
)
def test_what_makes_no_sense_is_named(data: bytes) -> None:
    with pytest.raises(UndecodableRecord):
        decode_worker_info(data)


def test_a_value_that_its_type_refuses_is_named() -> None:
    worker = msgspec.to_builtins(create_worker())
    worker["layout"]["block_size"] = 0
    with pytest.raises(UndecodableRecord, match="block_size"):
        decode_worker_info(msgspec.msgpack.encode([SCHEMA_VERSION, worker]))
