"""Log-probabilities in both shapes of the API."""

import math

import pytest

from tests.support.fake_worker import output, running_worker, say, speak
from tests.support.gateways import CHAT, COMPLETION, asgi_gateway
from tests.support.text_bundles import small_tokenizer

TEXT = "the capital 歪"


async def test_chat_logprobs_have_an_entry_a_token():
    fields = {"logprobs": True, "top_logprobs": 2}
    async with running_worker(say(TEXT)) as worker, asgi_gateway(worker) as gateway:
        body = (await gateway.chat(**fields)).json()
        chunks = await gateway.stream("/v1/chat/completions", CHAT | fields)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in content)
    *words, end = content
    assert bytes(byte for entry in words for byte in entry["bytes"]).decode() == TEXT
    assert end["token"] == "<|im_end|>"
    streamed = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry for logprobs in streamed for entry in logprobs["content"]] == content


async def test_a_token_that_is_no_whole_character_shows_its_bytes():
    async with running_worker(say("歪")) as worker, asgi_gateway(worker) as gateway:
        body = (await gateway.chat(logprobs=True)).json()
    broken = [
        e for e in body["choices"][0]["logprobs"]["content"] if e["token"].startswith("bytes:")
    ]
    for entry in broken:
        assert entry["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])
    assert "\ufffd" not in str(body)


async def test_completion_logprobs_are_four_lists_that_fit():
    fields = {"logprobs": 2, "max_tokens": 50}
    async with running_worker(say(TEXT)) as worker, asgi_gateway(worker) as gateway:
        body = (await gateway.complete(**fields)).json()
        chunks = await gateway.stream("/v1/completions", COMPLETION | fields)
    choice = body["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]
    assert {len(values) for values in logprobs.values()} == {body["usage"]["completion_tokens"]}
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert text[offset:].startswith(token)
    assert all(1 <= len(top) <= 3 for top in logprobs["top_logprobs"])
    assert all(
        token in top
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    )
    for name, values in logprobs.items():
        pieces = [
            c["logprobs"][name] for chunk in chunks for c in chunk["choices"] if c["logprobs"]
        ]
        assert [value for piece in pieces for value in piece] == values


async def test_zero_alternatives_still_show_the_chosen_token():
    async with running_worker(say("one")) as worker, asgi_gateway(worker) as gateway:
        logprobs = (await gateway.complete(logprobs=0)).json()["choices"][0]["logprobs"]
        assert [len(top) for top in logprobs["top_logprobs"]] == [1] * len(logprobs["tokens"])
        chat = (await gateway.chat(logprobs=True)).json()["choices"][0]["logprobs"]
        assert all(entry["top_logprobs"] == [] for entry in chat["content"])
        assert worker.submits[0].request.sampling.logprobs == 0


async def test_offsets_count_from_the_echoed_prompt():
    ids = small_tokenizer().encode("one").ids
    async with running_worker(speak(ids)) as worker, asgi_gateway(worker) as gateway:
        body = (await gateway.complete(logprobs=1)).json()
        assert body["choices"][0]["logprobs"]["text_offset"][0] == 0


async def test_tokens_can_be_shown_by_id():
    async with running_worker(say("one")) as worker, asgi_gateway(worker) as gateway:
        body = (await gateway.complete(logprobs=1, return_tokens_as_token_ids=True)).json()
    tokens = body["choices"][0]["logprobs"]["tokens"]
    ids = small_tokenizer().encode("one").ids
    assert tokens[: len(ids)] == [f"token_id:{token_id}" for token_id in ids]


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
async def test_what_is_no_json_number_is_floored(value):
    from services.rpc.v1 import baton_pb2 as pb

    async def script(request):
        entry = pb.TokenLogprobs(logprob=value, rank=9, top_token_ids=[7], top_logprobs=[value])
        yield [output(request, [5], logprobs=[entry], finish_reason="length")]

    async with running_worker(script) as worker, asgi_gateway(worker) as gateway:
        body = (await gateway.chat(logprobs=True, top_logprobs=1)).json()
    entry = body["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


async def test_nothing_is_reported_unasked():
    async with running_worker(say("one")) as worker, asgi_gateway(worker) as gateway:
        assert (await gateway.complete()).json()["choices"][0]["logprobs"] is None
        assert not worker.submits[0].request.sampling.HasField("logprobs")
