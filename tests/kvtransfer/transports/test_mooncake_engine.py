"""What becomes of reads when Mooncake's engine says no, or nothing; the engine itself is scripted here."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from core.errors import ConfigError, TransferError
from kvtransfer.transports.mooncake import engine as module
from kvtransfer.transports.mooncake.engine import MooncakeEngine


class Scripted:
    """Mooncake's own class, as far as it is used: each read has the states that the test has left for it."""

    made: ClassVar[list[Scripted]] = []
    refuses_memory = False

    def __init__(self) -> None:
        self.states: list[int] = []
        Scripted.made.append(self)

    def initialize(self, *_: Any) -> int:
        return 0

    def register_memory(self, address: int, num_bytes: int) -> int:
        return int(Scripted.refuses_memory)

    def unregister_memory(self, address: int) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 7

    def batch_transfer_async_read(self, *_: Any) -> int:
        if not self.states:
            raise RuntimeError("no such segment")
        return 1

    def transfer_check_status(self, batch: int) -> int:
        return self.states.pop(0)


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    Scripted.made, Scripted.refuses_memory = [], False
    monkeypatch.setattr(module, "_load", lambda: Scripted)


def read(engine: MooncakeEngine, states: list[int]) -> Any:
    Scripted.made[-1].states = states
    return engine.meet(b"10.0.0.1:7", bytes(16)).read([1], [2], [3])


def test_a_read_that_goes_on_is_not_over() -> None:
    began = read(MooncakeEngine("127.0.0.1"), [0, 0, 1])
    assert [began.is_over() for _ in range(3)] == [False, False, True]


def test_a_read_that_fails_or_cannot_begin_is_a_lost_connection() -> None:
    engine = MooncakeEngine("127.0.0.1")
    with pytest.raises(ConnectionError, match=r"read from 10\.0\.0\.1:7 failed"):
        read(engine, [-1]).is_over()
    with pytest.raises(ConnectionError, match="failed"):
        read(engine, []).is_over()


def test_a_read_that_times_out_takes_its_engine_along_and_the_next_peer_has_a_fresh_one() -> None:
    """What has timed out may still be written; only without its engine it may not."""
    engine = MooncakeEngine("127.0.0.1")
    engine.register(memoryview(bytearray(8)))
    first, other = read(engine, [-2]), read(engine, [-2])
    with pytest.raises(ConnectionError):
        first.is_over()
    with pytest.raises(ConnectionError):
        other.is_over()
    assert len(Scripted.made) == 1
    peer = engine.meet(b"10.0.0.1:7", bytes(16))
    assert len(Scripted.made) == 2
    Scripted.made[-1].states = [1]
    assert peer.read([1], [2], [3]).is_over()


def test_a_fresh_engine_that_will_not_have_the_memory_is_no_peer() -> None:
    engine = MooncakeEngine("127.0.0.1")
    engine.register(memoryview(bytearray(8)))
    engine.meet(b"10.0.0.1:7", bytes(16))
    Scripted.refuses_memory = True
    with pytest.raises(TransferError, match="cannot register 8 bytes again"):
        engine.meet(b"10.0.0.1:7", b"x" * 16)


def test_an_engine_that_does_not_start_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "initialize", lambda *_: -1)
    with pytest.raises(ConfigError, match="--kv-transports: mooncake does not start on 127"):
        MooncakeEngine("127.0.0.1")
