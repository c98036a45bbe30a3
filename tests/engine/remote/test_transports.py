"""Which transport a session takes, and that the answer is the same over any, also when one fails on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from engine import movers
from engine.messages import AddPrefill, TransportOffer
from tests.kvtransfer.memory_engine import MemoryEngine, Network
from tests.support.engines import EngineHarness, Wire, make_request, run_alone, turn_until
from tests.support.scenes import (
    answer,
    random_prompt,
    run_random_mix,
    run_to_end,
    split_pair,
    submit,
)


def sent_bytes(engine: EngineHarness, kind: str) -> int:
    return engine.senders._senders[kind].counters.sent_bytes_total


def shared(tmp_path: Path) -> dict[str, Any]:
    """What both workers of a host are told."""
    folder = str(tmp_path)
    return {"ipc_dir": folder, "prefill": {"ipc_dir": folder}}


@pytest.mark.parametrize("num_choices", [1, 3])
def test_workers_of_one_host_use_shared_memory(tmp_path: Path, num_choices: int) -> None:
    request = make_request("r", random_prompt(100), n=num_choices, temperature=0.9, logprobs=2)
    with split_pair(**shared(tmp_path)) as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        prefill = wire.prefill["p1"]
        assert sent_bytes(prefill, "shm") == prefill.senders.counters.sent_bytes_total > 0


def test_a_host_apart_is_reached_by_tcp(tmp_path: Path) -> None:
    """D offers a path that P's host does not have."""
    request = make_request("r", random_prompt(100))
    with split_pair(**shared(tmp_path)) as wire:
        for path in tmp_path.iterdir():
            path.unlink()
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        prefill = wire.prefill["p1"]
        assert sent_bytes(prefill, "shm") == 0
        assert sent_bytes(prefill, "tcp") > 0


@pytest.mark.parametrize("num_acknowledged", [1, 3, 6])
def test_a_session_goes_on_over_tcp_when_shared_memory_fails(
    tmp_path: Path, num_acknowledged: int
) -> None:
    request = make_request("r", random_prompt(100), logprobs=2)
    folder = {"ipc_dir": str(tmp_path)}
    slow = {**folder, "link_rate_bytes_s": 200_000.0}
    with split_pair(prefill=slow, **folder) as wire:
        prefill = wire.prefill["p1"]
        submit(wire, request, "p1")

        def has_begun() -> bool:
            return prefill.senders.counters.blocks_acknowledged_total >= num_acknowledged

        turn_until(has_begun, wire, wire.decode, prefill)
        wire.decode.receivers._receivers[0].stop()
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        assert sent_bytes(prefill, "tcp") > 0
        assert wire.decode.stats.computed_prompt_tokens_total == 0


def test_a_worker_without_a_directory_is_not_offered_shared_memory(tmp_path: Path) -> None:
    request = make_request("r", random_prompt(40))
    with split_pair(ipc_dir=str(tmp_path)) as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        assert sent_bytes(wire.prefill["p1"], "tcp") > 0


def test_offers_of_unknown_kinds_are_passed_over(tmp_path: Path) -> None:
    with split_pair() as wire:
        prefill = wire.prefill["p1"]
        offers = [TransportOffer("rdma", ["10.0.0.1:1"]), TransportOffer("tcp", [])]
        prefill.inbox.post(_add_prefill(wire, offers))
        turn_until(lambda: bool(prefill.said), prefill)
        (refusal,) = prefill.said
        assert refusal.message == "transports: ours tcp, theirs rdma, tcp"
        prefill.said.clear()


def _add_prefill(wire: Wire, offers: list[TransportOffer]) -> AddPrefill:
    decode = wire.decode
    request = make_request("r", random_prompt(40))
    return AddPrefill(5, 1, request, 0, decode.identity, decode.layout, offers, bytes(32), 10_000)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(100, 104))
def test_random_mixes_over_shared_memory_end_right(tmp_path: Path, seed: int) -> None:
    run_random_mix(seed, ipc_dir=str(tmp_path))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Network:
    """What stands for NIXL: an engine inside this process."""
    network = Network()
    monkeypatch.setattr(movers, "NixlEngine", lambda is_read: MemoryEngine(network))
    return network


NIXL_FIRST = {"kv_transports": ("nixl", "tcp")}


@pytest.mark.parametrize("is_staged", [False, True])
def test_an_engine_that_is_asked_for_first_is_used(reads: Network, is_staged: bool) -> None:
    request = make_request("r", random_prompt(100), n=2, temperature=0.9, logprobs=2)
    options = {**NIXL_FIRST, "is_staged": is_staged}
    with split_pair(prefill=options, **options) as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        prefill = wire.prefill["p1"]
        assert sent_bytes(prefill, "nixl") == prefill.senders.counters.sent_bytes_total > 0


def test_a_worker_without_the_engine_is_reached_by_the_next_transport(reads: Network) -> None:
    request = make_request("r", random_prompt(100))
    with split_pair(**NIXL_FIRST) as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        assert sent_bytes(wire.prefill["p1"], "tcp") > 0
        assert reads.num_begun == 0


@pytest.mark.parametrize("num_read", [0, 2, 5])
def test_a_session_goes_on_over_tcp_when_the_engine_fails(reads: Network, num_read: int) -> None:
    def fail(number: int) -> None:
        if number > num_read:
            raise ConnectionError("the engine lost its peer")

    reads.before_read = fail
    request = make_request("r", random_prompt(100), logprobs=2)
    with split_pair(prefill=NIXL_FIRST, **NIXL_FIRST) as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        assert sent_bytes(wire.prefill["p1"], "tcp") > 0
        assert wire.decode.stats.computed_prompt_tokens_total == 0


@pytest.mark.parametrize("kind", ["nixl", "mooncake"])
def test_the_package_itself_moves_kv(kind: str) -> None:
    request = make_request("r", random_prompt(100), n=2, temperature=0.9, logprobs=2)
    options = {"kv_transports": (kind, "tcp")}
    try:
        with split_pair(prefill=options, **options) as wire:
            submit(wire, request, "p1")
            run_to_end(wire, request)
            assert answer(wire, request) == run_alone(request)
            prefill = wire.prefill["p1"]
            assert sent_bytes(prefill, kind) == prefill.senders.counters.sent_bytes_total > 0
    except ConfigError as error:
        if "is not installed" not in error.message:
            raise
        pytest.skip(error.message)


@pytest.mark.parametrize("seed", range(200, 204))
def test_random_mixes_over_an_engine_end_right(reads: Network, seed: int) -> None:
    run_random_mix(seed, **NIXL_FIRST)
    assert reads.num_begun > 0
