"""Split serving between workers that keep KV in other blocks or formats: every token is still the right one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from core.kv_layout import SlotFormat
from engine.kvcache.chain import HashChain
from engine.messages import GrantPrefill, RefusePrefill
from kernels.kv_view import KVView
from kernels.reference.cache import convert_kv
from tests.support.engines import EngineHarness, make_request, run_alone
from tests.support.ledger_model import ledger_answer
from tests.support.scenes import answer, ledger_pair, random_prompt, run_to_end, split_pair, submit

BLOCK_SIZES = [(32, 16), (16, 32), (48, 32)]
wire_dtypes = pytest.mark.parametrize(
    "wire_dtype", ["int8_per_token_head", "fp8_per_token_head", "bfloat16"]
)


@pytest.mark.parametrize(("prefill", "decode"), BLOCK_SIZES)
@pytest.mark.parametrize("length", [1, 15, 32, 33, 100, 161])
def test_other_block_sizes_change_no_token(prefill: int, decode: int, length: int) -> None:
    request = make_request("r", random_prompt(length), max_tokens=20, n=2, temperature=0.9)
    with split_pair(prefill={"block_size": prefill}, block_size=decode) as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        assert wire.decode.stats.received_prompt_tokens_total == length
        assert wire.decode.stats.local_prefill_fallbacks_total == 0


@pytest.mark.parametrize(("prefill", "decode"), BLOCK_SIZES)
@pytest.mark.parametrize("is_staged", [False, True])
def test_only_what_decode_lacks_is_sent_between_other_blocks(
    prefill: int, decode: int, is_staged: bool
) -> None:
    prompt = random_prompt(100)
    requests = [make_request("a", prompt), make_request("b", [*prompt, 1, 2, 3])]
    options: dict[str, Any] = {"block_size": prefill, "is_staged": is_staged}
    with ledger_pair(prefill=options, block_size=decode, is_staged=is_staged) as (wire, _):
        sent = []
        for request in requests:
            submit(wire, request, "p1")
            run_to_end(wire, request)
            assert answer(wire, request) == ledger_answer(request)
            sent.append(wire.prefill["p1"].senders.counters.sent_bytes_total)
        held = 100 // decode
        grants = [m.first_missing_block for m in wire.passed if isinstance(m, GrantPrefill)]
        assert grants == [[0], [held]]
        slot_bytes = 3 * 16  # three layers of one head
        assert sent == [100 * slot_bytes, (203 - held * decode) * slot_bytes]


def test_a_transport_that_carries_no_plans_is_passed_over(tmp_path: Any) -> None:
    """Both workers offer shm, which copies blocks as they are; KV of other blocks goes over tcp."""
    request = make_request("r", random_prompt(60))
    folder = {"ipc_dir": str(tmp_path / "ipc")}
    for block_size, kind in ((16, "shm"), (32, "tcp")):
        with split_pair(prefill={"block_size": block_size, **folder}, **folder) as wire:
            submit(wire, request, "p1")
            run_to_end(wire, request)
            assert answer(wire, request) == run_alone(request)
            senders = wire.prefill["p1"].senders._senders
            sent = {name: sender.counters.sent_bytes_total for name, sender in senders.items()}
            assert [name for name, num_bytes in sent.items() if num_bytes] == [kind]


@wire_dtypes
def test_a_codec_brings_what_it_says_and_marks_the_blocks(wire_dtype: str) -> None:
    """D holds P's numbers, through the codec and back; and under other hashes than KV of its own making has."""
    prompt = random_prompt(48)
    request = make_request("r", prompt, max_tokens=2)
    with split_pair(kv_wire_dtype=wire_dtype) as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        decode, prefill = wire.decode, wire.prefill["p1"]
        assert decode.root != prefill.root
        ours, theirs = (blocks_of(engine, prompt) for engine in (decode, prefill))
        assert len(ours) == len(theirs) == 3
        for layer, (kept, given) in enumerate(
            zip(decode.storage.layer_views(), prefill.storage.layer_views(), strict=True)
        ):
            expected = through(wire_dtype, KVView(given.values[theirs]))
            assert torch.equal(kept.values[ours], expected), f"layer {layer}"
            assert not torch.equal(expected, given.values[theirs]), "the codec did nothing"
        slot = decode.layout.wire_slot(0)
        num_heads = decode.layout.groups[0].num_kv_heads * len(decode.layout.groups[0].layers)
        sent = prefill.senders.counters.sent_bytes_total
        assert sent == 48 * num_heads * slot.slot_bytes < 3 * decode.layout.block_bytes


def through(wire_dtype: str, view: KVView) -> torch.Tensor:
    """The numbers of a float32 view after a way through a KV dtype."""
    like = EngineHarness(kv_cache_dtype=wire_dtype, num_blocks=len(view.values))
    try:
        there = like.storage.layer_views()[0]
        blocks = list(range(len(view.values)))
        convert_kv(view, blocks, there, blocks)
        back = KVView(torch.empty_like(view.values))
        convert_kv(there, blocks, back, blocks)
        return back.values
    finally:
        like.close()


def blocks_of(engine: EngineHarness, prompt: list[int]) -> list[int]:
    """A prompt's full blocks, found by content."""
    size = engine.layout.block_size
    contents = HashChain(engine.root, size).contents(prompt, len(prompt) // size)
    return list(engine.pool.match(contents))


def test_workers_of_other_kv_dtypes_meet_where_decode_names_one() -> None:
    """P keeps fp8, D float32: by fp8 on the wire D has every number as P has it."""
    prompt = random_prompt(70)
    request = make_request("r", prompt)
    with split_pair(prefill={"kv_cache_dtype": "fp8"}, kv_wire_dtype="fp8") as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert wire.decode.stats.received_prompt_tokens_total == 70
        assert wire.decode.stats.local_prefill_fallbacks_total == 0
        engines = wire.decode, wire.prefill["p1"]
        ours, theirs = (blocks_of(engine, prompt) for engine in engines)
        assert len(ours) == len(theirs) == 4
        views = (engine.storage.layer_views() for engine in engines)
        for kept, given in zip(*views, strict=True):
            assert torch.equal(kept.values[ours], given.values[theirs].float())


def test_a_prefill_worker_whose_layout_is_a_lie_is_left_for_the_next() -> None:
    """What P says of its layout when it accepts fits no plan: D leaves it, and nothing is held."""
    request = make_request("r", random_prompt(50))
    with split_pair("p1", "p2") as wire:
        group = wire.decode.layout.groups[0]
        other = replace(group, slot=SlotFormat.of("fp8_e4m3", group.slot.head_dim))
        wire.prefill["p1"].layout = replace(wire.decode.layout, groups=(other,))
        submit(wire, request, "p1", "p2")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request)
        assert wire.decode.stats.sessions_failed_total == 1
        assert not any(isinstance(message, RefusePrefill) for message in wire.passed)
