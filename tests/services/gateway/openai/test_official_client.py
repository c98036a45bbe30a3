"""The official SDK against a real port: what its users do with any OpenAI-compatible server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from tests.support.fake_worker import running_worker, say
from tests.support.gateways import Gateway, http_gateway

TEXT = "The capital of France is Paris."
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@asynccontextmanager
async def sdk(**config) -> AsyncIterator[tuple[openai.AsyncOpenAI, Gateway]]:
    async with (
        running_worker(say(TEXT, cached=32)) as worker,
        http_gateway(worker, **config) as gateway,
    ):
        url = f"http://127.0.0.1:{gateway.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
            yield client, gateway


async def test_chat_whole_and_streamed():
    async with sdk() as (client, _):
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES)
        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens_details.cached_tokens == 32
        stream = await client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[-1].usage == answer.usage


async def test_the_stream_helper_sees_events_and_the_final_answer():
    async with sdk() as (client, _):
        async with client.chat.completions.stream(model="fake", messages=MESSAGES) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.content == TEXT


async def test_completions_logprobs_and_n():
    async with sdk() as (client, _):
        answer = await client.completions.create(
            model="fake", prompt="x", logprobs=2, n=2, max_tokens=4
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert len(answer.choices[0].logprobs.tokens) == 4
        chat = await client.chat.completions.create(
            model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
        assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2


async def test_models_are_listed():
    async with sdk() as (client, _):
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"


async def test_errors_are_the_sdks_errors():
    async with sdk(api_key="key") as (client, gateway):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="fake", messages=MESSAGES, temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="none", messages=MESSAGES, stream=True)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="fake", input="x")
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(
                model="fake", messages=MESSAGES, response_format={"type": "json_object"}
            )
        url = f"http://127.0.0.1:{gateway.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="bad", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


async def test_headers_of_load_tools_are_taken():
    headers = {
        "x-request-id": "r-1",
        "x-correlation-id": "c",
        "x-session-affinity": "s",
        "x-stainless-lang": "python",
        "Authorization": "Bearer key",
    }
    async with sdk() as (client, _):
        answer = await client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_completion_tokens=5,
            extra_headers=headers,
            extra_body={"ignore_eos": True, "min_tokens": 5},
        )
        assert answer.id == "chatcmpl-r-1"
