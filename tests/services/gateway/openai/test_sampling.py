"""What reaches the worker: the client's values, the model's defaults, the limits of the context."""

import pytest

from services.rpc.bundle import bundle_digest
from services.rpc.codec import decode_request
from tests.support.fake_worker import running_worker, say
from tests.support.gateways import COMPLETION, asgi_gateway
from tests.support.text_bundles import small_bundle


async def submitted(worker, answer):
    assert answer.status_code == 200, answer.text
    return decode_request(worker.submits[-1].request)


async def test_every_field_reaches_the_worker():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        answer = await gateway.complete(
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.1,
            seed=-1,
            n=3,
            max_tokens=7,
            min_tokens=2,
            stop_token_ids=[5, 6],
            ignore_eos=True,
            logprobs=4,
            logit_bias={"9": 400, "7": -1.5},
            priority=3,
            cache_salt="tenant",
        )
        request = await submitted(worker, answer)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 40)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (
        0.05,
        0.5,
        -0.5,
    )
    assert (sampling.repetition_penalty, sampling.seed, sampling.n) == (1.1, 2**64 - 1, 3)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids) == (7, 2, (5, 6))
    assert (sampling.ignore_eos, sampling.logprobs) == (True, 4)
    assert sampling.logit_bias == ((7, -1.5), (9, 100.0))
    assert (request.priority, request.cache_salt, request.model) == (3, "tenant", "fake")
    assert 0 < request.deadline_ms <= 600_000


async def test_what_is_left_out_takes_the_apis_defaults():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        request = await submitted(worker, await gateway.complete(temperature=None))
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
            1,
            1,
            0,
            0,
        )
        assert sampling.max_tokens == 16
        assert sampling.logprobs is None
        request = await submitted(worker, await gateway.chat())
        assert request.sampling.max_tokens == 2048 - len(request.prompt_token_ids)


async def test_a_seed_is_always_set_and_differs():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        seeds = {(await submitted(worker, await gateway.chat())).sampling.seed for _ in range(4)}
        assert len(seeds) == 4
        assert (await submitted(worker, await gateway.chat(seed=42))).sampling.seed == 42


async def test_the_models_generation_config_gives_defaults():
    config = '{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}'
    bundle = small_bundle(generation_config=config)
    async with running_worker(say("x"), bundle=bundle) as worker, asgi_gateway(worker) as gateway:
        assert worker.info.model_bundle_digest == bundle_digest(bundle)
        sampling = (await submitted(worker, await gateway.chat())).sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
        assert sampling.repetition_penalty == 1.05
        sampling = (await submitted(worker, await gateway.chat(temperature=0, top_k=0))).sampling
        assert (sampling.temperature, sampling.top_k) == (0, 0)


async def test_a_tiny_temperature_is_raised_and_zero_stays_greedy():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        raised = await submitted(worker, await gateway.chat(temperature=0.001))
        assert raised.sampling.temperature == 0.01
        assert (await submitted(worker, await gateway.chat(temperature=0))).sampling.is_greedy


async def test_the_default_answer_shrinks_to_the_context_and_an_asked_one_is_refused():
    async with running_worker(say("x"), max_model_len=32) as worker:
        async with asgi_gateway(worker) as gateway:
            request = await submitted(worker, await gateway.complete(prompt=[5] * 28))
            assert request.sampling.max_tokens == 4
            assert (await gateway.complete(prompt=[5] * 28, max_tokens=5)).status_code == 400
            assert (await gateway.complete(prompt=[5] * 32)).status_code == 400


async def test_both_names_of_the_answers_length_are_taken():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
            assert (await submitted(worker, await gateway.chat(**fields))).sampling.max_tokens == 5
        request = await submitted(worker, await gateway.chat(max_tokens=9, max_completion_tokens=5))
        assert request.sampling.max_tokens == 5


@pytest.mark.parametrize(("most", "kept"), [(3, 3), (-1, 31), (100, 40)])
async def test_prompts_are_truncated_on_the_left_when_asked(most, kept):
    ids = list(range(3, 43))
    async with running_worker(say("x"), max_model_len=32 if most == -1 else 2048) as worker:
        async with asgi_gateway(worker) as gateway:
            answer = await gateway.complete(prompt=ids, truncate_prompt_tokens=most)
            request = await submitted(worker, answer)
            assert list(request.prompt_token_ids) == ids[-kept:]


@pytest.mark.public_case("B14")
async def test_all_spellings_of_the_same_words_give_the_same_prompt():
    spellings = [
        "alpha beta",
        [{"type": "text", "text": "alpha beta"}],
        [{"type": "text", "text": "alpha "}, {"type": "text", "text": "beta"}],
    ]
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for role in ("system", "user", "assistant", "tool"):
            prompts = set()
            for content in spellings:
                messages = [{"role": role, "content": content}]
                request = await submitted(worker, await gateway.chat(messages=messages))
                prompts.add(request.prompt_token_ids)
            assert len(prompts) == 1


@pytest.mark.public_case("B14")
@pytest.mark.parametrize("content", [{"content": None}, {}])
async def test_a_turn_with_tool_calls_is_a_prompt_like_any_other(content):
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"place": "Paris"}'},
    }
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        assert (await gateway.chat(messages=messages)).status_code == 200


async def test_the_developer_role_is_the_system_role():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        prompts = [
            await submitted(worker, await gateway.chat(messages=[{"role": role, "content": "x"}]))
            for role in ("developer", "system")
        ]
        assert prompts[0].prompt_token_ids == prompts[1].prompt_token_ids


@pytest.mark.parametrize(
    ("header", "passed"), [(f"00-{'a' * 32}-{'b' * 16}-01", True), ("00-xyz", False)]
)
async def test_a_trace_goes_on_at_the_worker(header, passed):
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        answer = await gateway.client.post(
            "/v1/completions", json=COMPLETION, headers={"traceparent": header}
        )
        request = await submitted(worker, answer)
        assert request.trace_parent == (header if passed else "")
