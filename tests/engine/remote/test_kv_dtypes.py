"""Every KV dtype through whole engines: split, shared, copied and preempted runs give what one engine alone gives."""

from __future__ import annotations

import pytest

from core.kv_layout import KV_DTYPES
from engine.kvcache.chain import HashChain
from engine.messages import AddRequest
from tests.support.engines import BLOCK_SIZE, EngineHarness, make_request, run_alone, turn_until
from tests.support.scenes import answer, random_prompt, run_to_end, split_pair, submit

every_kv_dtype = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


@every_kv_dtype
@pytest.mark.parametrize("length", [15, 16, 100, 161])
def test_a_split_answer_is_the_answer_of_one_engine_alone(kv_dtype: str, length: int) -> None:
    request = make_request("r", random_prompt(length), max_tokens=20, n=2, temperature=0.9)
    settings = {"kv_cache_dtype": kv_dtype}
    with split_pair(prefill=settings, **settings) as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request, **settings)
        assert wire.decode.stats.received_prompt_tokens_total == length
        assert wire.decode.stats.local_prefill_fallbacks_total == 0


@every_kv_dtype
def test_what_arrives_are_the_bytes_that_were_sent(kv_dtype: str) -> None:
    """Scales included, and nothing of the layout is guessed on the way."""
    prompt = random_prompt(6 * BLOCK_SIZE)
    request = make_request("r", prompt, max_tokens=2)
    settings = {"kv_cache_dtype": kv_dtype}
    with split_pair(prefill=settings, **settings) as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        held = [_blocks(engine, prompt) for engine in (wire.decode, wire.prefill["p1"])]
    assert len(held[0]) == 6
    assert held[0] == held[1]
    assert len(set(held[0])) == 6
    assert all(any(block) for block in held[0])


def _blocks(engine: EngineHarness, prompt: list[int]) -> list[bytes]:
    """The bytes of a prompt's full blocks, found by content."""
    contents = HashChain(engine.root, BLOCK_SIZE).contents(prompt, len(prompt) // BLOCK_SIZE)
    return [bytes(engine.storage.block_buffer(block)) for block in engine.pool.match(contents)]


@every_kv_dtype
def test_a_shared_prefix_and_copied_tails_change_no_token(kv_dtype: str) -> None:
    """A cached prefix, and four choices that fork from one partly filled block."""
    prefix = random_prompt(5 * BLOCK_SIZE)
    first = make_request("a", [*prefix, 7], max_tokens=6)
    second = make_request("b", [*prefix, 3, 4, 5], max_tokens=12, n=4, temperature=0.9)
    engine = EngineHarness(kv_cache_dtype=kv_dtype)
    try:
        for request in (first, second):
            engine.inbox.post(AddRequest(request))
            wanted = request.sampling.n
            turn_until(lambda r=request, n=wanted: len(engine.finish_reasons(r.id)) == n, engine)
        assert engine.stats.cached_prompt_tokens_total == len(prefix)
        together = [engine.tokens("b", choice) for choice in range(4)]
    finally:
        engine.close()
    assert together == run_alone(second, kv_cache_dtype=kv_dtype)
    assert len({tuple(tokens) for tokens in together}) > 1


@every_kv_dtype
def test_preempted_sequences_end_as_if_alone(kv_dtype: str) -> None:
    requests = [make_request(f"r{i}", random_prompt(40, i), max_tokens=40) for i in range(4)]
    engine = EngineHarness(kv_cache_dtype=kv_dtype, num_blocks=12)
    try:
        for request in requests:
            engine.inbox.post(AddRequest(request))
        turn_until(lambda: all(engine.finish_reasons(r.id) for r in requests), engine)
        assert engine.stats.preemptions_total > 0
        for request in requests:
            assert [engine.tokens(request.id)] == run_alone(request, kv_cache_dtype=kv_dtype)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("float32", "fp8"), ("fp8_e4m3", "fp8_per_token_head"), ("float16", "bfloat16")],
)
def test_workers_of_different_kv_dtypes_do_not_exchange_kv(prefill: str, decode: str) -> None:
    """Equal sizes or not: no plan leads from one to the other, so decode computes the prompt itself."""
    request = make_request("r", random_prompt(50))
    with split_pair(prefill={"kv_cache_dtype": prefill}, kv_cache_dtype=decode) as wire:
        submit(wire, request, "p1")
        run_to_end(wire, request)
        assert answer(wire, request) == run_alone(request, kv_cache_dtype=decode)
        assert wire.decode.stats.local_prefill_fallbacks_total == 1
        assert wire.prefill["p1"].senders.counters.sent_bytes_total == 0
        assert wire.decode.root != wire.prefill["p1"].root


def test_an_alias_is_the_same_kv_as_its_name() -> None:
    engines = [EngineHarness(kv_cache_dtype=name) for name in ("fp8", "fp8_e4m3")]
    try:
        assert engines[0].root == engines[1].root
        assert engines[0].layout == engines[1].layout
    finally:
        for engine in engines:
            engine.close()
