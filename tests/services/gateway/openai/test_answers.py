"""What answers hold: text, reasons, usage, choices; streamed and whole say the same."""

from typing import Any

import pytest

from tests.support.fake_worker import output, running_worker, say, speak
from tests.support.gateways import CHAT, COMPLETION, Gateway, asgi_gateway
from tests.support.text_bundles import EOS, small_tokenizer

TEXT = "Paris is the capital of France, one two three four."
FORCED = "aé 👩‍🚀 𝒳 ไทย 歪."
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream."""
    pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(p["delta"].get("content", "") if "delta" in p else p["text"] for p in pieces)


def endings(chunks: list[dict[str, Any]]) -> list[tuple[int, str, Any]]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [
        (c["index"], c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"]
    ]


async def both(gateway: Gateway, **fields: Any) -> tuple[str, str, Any, int]:
    """Text, finish and stop reason and tokens of a completion, after checking that stream and whole agree."""
    body = (await gateway.complete(**fields)).json()
    chunks = await gateway.stream(
        COMPLETION_PATH, COMPLETION | fields | {"stream_options": {"include_usage": True}}
    )
    choice = body["choices"][0]
    assert joined(chunks) == choice["text"]
    assert endings(chunks) == [(0, choice["finish_reason"], choice["stop_reason"])]
    assert chunks[-1]["usage"] == body["usage"]
    tokens = body["usage"]["completion_tokens"]
    return choice["text"], choice["finish_reason"], choice["stop_reason"], tokens


async def test_a_chat_answer_has_the_documented_shape():
    async with running_worker(say(TEXT, cached=16)) as worker, asgi_gateway(worker) as gateway:
        body = (await gateway.chat()).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    # The end token counts, though it leaves no text.
    assert usage["completion_tokens"] == len(small_tokenizer().encode(TEXT).ids) + 1


async def test_a_chat_stream_has_the_documented_shape():
    async with running_worker(say(TEXT)) as worker, asgi_gateway(worker) as gateway:
        chunks = await gateway.stream(CHAT_PATH, CHAT)
    first, *_, last = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert joined(chunks) == TEXT
    assert last["choices"][0]["finish_reason"] == "stop"
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.public_case("B06")
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_usage_comes_in_streams_only_when_asked(path, max_tokens):
    base = (CHAT if path == CHAT_PATH else COMPLETION) | {"max_tokens": max_tokens}
    async with running_worker(say(TEXT)) as worker, asgi_gateway(worker) as gateway:
        whole = (await gateway.client.post(path, json=base)).json()["usage"]
        for options in ({}, {"include_usage": False}, None):
            chunks = await gateway.stream(path, base | {"stream_options": options})
            assert not any(chunk.get("usage") for chunk in chunks)
            assert all(chunk["choices"] for chunk in chunks)
        chunks = await gateway.stream(path, base | {"stream_options": {"include_usage": True}})
        *others, last = chunks
        assert last["choices"] == []
        assert last["usage"] == whole
        assert not any(chunk.get("usage") for chunk in others)
        assert others[-1]["choices"][0]["finish_reason"] == "length"


async def test_continuous_usage_grows_to_the_final_usage():
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running_worker(say(TEXT)) as worker, asgi_gateway(worker) as gateway:
        chunks = await gateway.stream(CHAT_PATH, CHAT | {"stream_options": options})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert chunks[-1]["usage"] == (await gateway.chat()).json()["usage"]
        alone = await gateway.stream(
            CHAT_PATH, CHAT | {"stream_options": {"continuous_usage_stats": True}}
        )
        assert not any("usage" in chunk for chunk in alone)


async def test_usage_can_be_forced_by_the_server():
    async with running_worker(say(TEXT)) as worker:
        async with asgi_gateway(worker, enable_force_include_usage=True) as gateway:
            chunks = await gateway.stream(CHAT_PATH, CHAT)
            assert all("usage" in chunk for chunk in chunks)
            assert chunks[-1]["choices"] == []


async def test_reasons_for_the_end():
    async with running_worker(say(TEXT)) as worker, asgi_gateway(worker) as gateway:
        assert (await both(gateway, max_tokens=99))[1:3] == ("stop", None)
        assert (await both(gateway, max_tokens=3))[1:] == ("length", None, 3)
        assert (await both(gateway, max_tokens=99, stop=["France"]))[1:3] == ("stop", "France")


async def test_a_stop_token_is_named_and_leaves_no_text():
    letter = small_tokenizer().encode("a").ids[0]

    async def script(request):
        yield [output(request, [letter, letter], finish_reason="stop", stop_token_id=letter)]

    async with running_worker(script) as worker, asgi_gateway(worker) as gateway:
        assert await both(gateway) == ("a", "stop", letter, 2)
        assert await both(gateway, include_stop_str_in_output=True) == ("aa", "stop", letter, 2)


@pytest.mark.public_case("B01")
@pytest.mark.public_case("B03")
@pytest.mark.parametrize("tokens_a_step", [1, 3, 100])
@pytest.mark.parametrize(("start", "length"), [(7, 9), (13, 6), (20, 12)])
async def test_stop_strings_cut_exactly(tokens_a_step, start, length):
    """Whatever the tokens and steps, the text ends where the stop string begins (or ends, when included)."""
    stop = TEXT[start : start + length]
    script = say(TEXT, tokens_a_step=tokens_a_step)
    async with running_worker(script) as worker, asgi_gateway(worker) as gateway:
        excluded = await both(gateway, max_tokens=50, stop=[stop])
        included = await both(gateway, max_tokens=50, stop=[stop], include_stop_str_in_output=True)
        assert excluded[:3] == (TEXT[: TEXT.find(stop)], "stop", stop)
        assert included[:3] == (TEXT[: TEXT.find(stop) + length], "stop", stop)
        assert excluded[3] == included[3] < len(small_tokenizer().encode(TEXT).ids)


async def test_a_matched_stop_string_frees_the_worker_at_once():
    async with running_worker(say("one two ", ends=False, delay_s=0.001)) as worker:
        async with asgi_gateway(worker) as gateway:
            body = (await gateway.complete(max_tokens=2000, stop=["two"])).json()
            assert body["choices"][0]["text"] == "one "
            await gateway.wait_for(lambda: worker.num_running == 0, "worker idle")
            assert worker.cancelled == [worker.submits[0].request.id]


async def test_stop_strings_do_not_count_before_min_tokens():
    ids = small_tokenizer().encode(TEXT).ids
    async with running_worker(say(TEXT)) as worker, asgi_gateway(worker) as gateway:
        text, reason, _, tokens = await both(
            gateway, max_tokens=50, min_tokens=len(ids) - 2, stop=["the", "four"]
        )
    assert (text, reason) == (TEXT[: TEXT.find("four")], "stop")
    assert tokens > len(ids) - 2


@pytest.mark.public_case("B04")
async def test_characters_of_several_tokens_are_never_broken():
    ids = small_tokenizer().encode(FORCED).ids
    assert len(ids) > len(FORCED)
    async with running_worker(speak(ids)) as worker, asgi_gateway(worker) as gateway:
        assert (await both(gateway, max_tokens=64))[0] == FORCED
        for max_tokens in range(1, 13):
            text, reason, *_ = await both(gateway, max_tokens=max_tokens)
            assert FORCED.startswith(text)
            assert "\ufffd" not in text
            assert reason == "length"


async def test_choices_are_numbered_and_interleaved():
    async def script(request):
        for word in ("one", " two"):
            ids = small_tokenizer().encode(word).ids
            yield [output(request, ids, choice) for choice in (1, 0, 2)]
        yield [output(request, [], 2, finish_reason="length")]
        yield [output(request, [], 0, finish_reason="stop")]
        yield [output(request, [], 1, finish_reason="length")]

    async with running_worker(script) as worker, asgi_gateway(worker) as gateway:
        body = (await gateway.chat(n=3)).json()
        chunks = await gateway.stream(CHAT_PATH, CHAT | {"n": 3})
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"one two"}
    assert [joined(chunks, index) for index in range(3)] == ["one two"] * 3
    assert [(index, reason) for index, reason, _ in endings(chunks)] == [
        (2, "length"),
        (0, "stop"),
        (1, "length"),
    ]
    roles = [c["index"] for k in chunks for c in k["choices"] if "role" in c["delta"]]
    assert sorted(roles) == [0, 1, 2]


async def test_many_prompts_are_many_choices():
    async with running_worker(say("one two")) as worker, asgi_gateway(worker) as gateway:
        fields = {"prompt": ["one", "two three", [5, 6]], "n": 2, "temperature": 1}
        body = (await gateway.complete(**fields)).json()
        chunks = await gateway.stream(COMPLETION_PATH, COMPLETION | fields)
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert {choice["text"] for choice in body["choices"]} == {"one two"}
    assert [joined(chunks, index) for index in range(6)] == ["one two"] * 6
    prompts = {tuple(submit.request.prompt_token_ids) for submit in worker.submits}
    assert len(prompts) == 3
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_echo_puts_the_prompt_before_each_choice():
    fields = {"prompt": ["one ", small_tokenizer().encode("two ").ids], "echo": True}
    async with running_worker(say("three")) as worker, asgi_gateway(worker) as gateway:
        body = (await gateway.complete(**fields)).json()
        chunks = await gateway.stream(COMPLETION_PATH, COMPLETION | fields)
    assert [choice["text"] for choice in body["choices"]] == ["one three", "two three"]
    assert [joined(chunks, index) for index in range(2)] == ["one three", "two three"]


async def test_special_tokens_can_be_shown():
    ids = [*small_tokenizer().encode("one").ids, small_tokenizer().token_to_id("<|im_start|>")]
    async with running_worker(speak(ids)) as worker, asgi_gateway(worker) as gateway:
        assert (await both(gateway))[0] == "one"
        assert (await both(gateway, skip_special_tokens=False))[0] == "one<|im_start|>"
        shown = await both(
            gateway, skip_special_tokens=False, include_stop_str_in_output=True, max_tokens=9
        )
        assert shown[0] == f"one<|im_start|>{EOS}"


async def test_token_ids_are_given_when_asked():
    async with running_worker(say("one two")) as worker, asgi_gateway(worker) as gateway:
        body = (await gateway.complete(return_token_ids=True)).json()
        chunks = await gateway.stream(COMPLETION_PATH, COMPLETION | {"return_token_ids": True})
    ids = body["choices"][0]["token_ids"]
    assert small_tokenizer().decode(ids) == "one two"
    assert [i for chunk in chunks for c in chunk["choices"] for i in c["token_ids"]] == ids


async def test_the_clients_request_id_names_the_answer_and_stays_unique_inside():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for _ in range(2):
            answer = await gateway.client.post(
                CHAT_PATH, json=CHAT, headers={"X-Request-Id": "mine"}
            )
            assert answer.json()["id"] == "chatcmpl-mine"
        assert (await gateway.complete(request_id="body")).json()["id"] == "cmpl-body"
    ids = [submit.request.id for submit in worker.submits]
    assert len(set(ids)) == 3
    assert ids[0].startswith("mine-")
