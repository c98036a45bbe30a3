"""Bad input gets a 4xx in the API's shape that names the field; what is merely unknown is ignored."""

import json
from typing import Any

import pytest

from tests.support.fake_worker import running_worker, say
from tests.support.gateways import CHAT, COMPLETION, Gateway, asgi_gateway

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
LONE_SURROGATE = '{"model":"fake","messages":[{"role":"user","content":"x\\ud800y"}]}'

# Fields of both endpoints: raw JSON of the value, so that NaN and 1e400 can be written, and the field at fault.
BAD_SAMPLING = [
    ("temperature", "NaN"),
    ("temperature", "Infinity"),
    ("temperature", "1e400"),
    ("temperature", "-0.1"),
    ("temperature", "2.5"),
    ("temperature", '"0.5x"'),
    ("temperature", "[]"),
    ("top_p", "0"),
    ("top_p", "1.1"),
    ("top_p", "NaN"),
    ("min_p", "-0.1"),
    ("min_p", "1.5"),
    ("top_k", "-2"),
    ("top_k", "1.5"),
    ("repetition_penalty", "0"),
    ("repetition_penalty", "-1"),
    ("presence_penalty", "99"),
    ("frequency_penalty", "-3"),
    ("n", "0"),
    ("n", "-1"),
    ("n", "1000000"),
    ("max_tokens", "-5"),
    ("max_tokens", "0"),
    ("max_tokens", '"many"'),
    ("min_tokens", "-1"),
    ("seed", '"x"'),
    ("seed", "1e30"),
    ("stop", '""'),
    ("stop", '["a", ""]'),
    ("stop", "7"),
    ("stop", "[7]"),
    ("stop", json.dumps(["x"] * 65)),
    ("stop_token_ids", "[-1]"),
    ("stop_token_ids", "[1000000]"),
    ("stop_token_ids", '["a"]'),
    ("logit_bias", '{"x": 1}'),
    ("logit_bias", '{"1000000": 1}'),
    ("logit_bias", '{"1": NaN}'),
    ("cache_salt", '""'),
    ("stream_options", '{"include_usage": true}'),
    ("stream", '"maybe"'),
    ("truncate_prompt_tokens", "-2"),
    ("truncate_prompt_tokens", "0"),
    ("priority", "1e12"),
    ("model", "7"),
]

UNSUPPORTED = [
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
    ("structured_outputs", {"regex": "a+"}),
    ("guided_json", {}),
    ("tools", []),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "auto"),
    ("functions", [{"name": "f"}]),
    ("use_beam_search", True),
    ("best_of", 3),
    ("length_penalty", 2.0),
    ("prompt_logprobs", 1),
    ("allowed_token_ids", [1]),
    ("bad_words", ["x"]),
    ("kv_transfer_params", {"do_remote_prefill": True, "remote_host": "127.0.0.1"}),
    ("chat_template", "{% for i in range(99999) %}x{% endfor %}"),
    ("repetition_detection", {"max_pattern_size": 3}),
    ("modalities", ["text", "audio"]),
    ("vllm_xargs", {"a": 1}),
]

NEUTRAL = [
    ("response_format", {"type": "text"}),
    ("response_format", None),
    ("tools", None),
    ("tool_choice", "none"),
    ("use_beam_search", False),
    ("best_of", 1),
    ("prompt_logprobs", None),
    ("allowed_token_ids", []),
    ("logit_bias", {}),
    ("stop", None),
    ("stop", []),
    ("n", None),
    ("seed", None),
    ("user", "someone"),
    ("foo", 1),
    ("metadata", {"a": "b"}),
    ("parallel_tool_calls", True),
    ("logit_bias", {"5": 400}),
    ("modalities", ["text"]),
    ("spaces_between_special_tokens", False),
]

BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    (None, "messages"),
    ("hi", "messages"),
    ([7], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 7}], "messages[0].content"),
    ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    (
        [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        ],
        "messages[1].content[0].type",
    ),
    ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    ([{"role": "user", "content": "x"}] * 10_001, "messages"),
]

BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt"),
    ([""], "prompt[0]"),
    ([], "prompt"),
    ([[]], "prompt[0]"),
    (["ok", ""], "prompt[1]"),
    (None, "prompt"),
    (7, "prompt"),
    ({}, "prompt"),
    ([1, "x"], "prompt[1]"),
    (["x", [1]], ""),
    ([-1], "prompt[0]"),
    ([1_000_000], "prompt[0]"),
    ([[1], [10**30]], "prompt[1][0]"),
    ([True], "prompt[0]"),
    (["x"] * 1025, "prompt"),
]


async def post(
    gateway: Gateway, path: str, body: bytes | str, content_type: str = "application/json"
):
    return await gateway.client.post(path, content=body, headers={"content-type": content_type})


def check_error(answer, status: int, param: str | None, *, names: str = "") -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["param"] == param, error
    assert names in error["message"]
    return error


def with_raw(base: dict[str, Any], field: str, raw: str) -> str:
    return json.dumps(base | {field: None}).replace(f'"{field}": null', f'"{field}": {raw}')


@pytest.mark.public_case("B12")
async def test_bad_sampling_values_are_refused_by_name():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for path, base in ((CHAT_PATH, CHAT), (COMPLETION_PATH, COMPLETION)):
            for stream in (False, True):
                for field, raw in BAD_SAMPLING:
                    if field == "stream" or (field == "stream_options" and stream):
                        continue
                    body = with_raw(base | {"stream": stream}, field, raw)
                    check_error(await post(gateway, path, body), 400, field, names=field)
        assert not worker.submits


@pytest.mark.public_case("B12")
async def test_greedy_is_legal_with_both_spellings_of_no_top_k():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for top_k in (-1, 0):
            assert (await gateway.complete(temperature=0, top_k=top_k)).status_code == 200
        assert [submit.request.sampling.top_k for submit in worker.submits] == [0, 0]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT_PATH, {"top_logprobs": 2_000_000_000, "logprobs": True}, "top_logprobs"),
        (CHAT_PATH, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT_PATH, {"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        (CHAT_PATH, {"n": 2, "temperature": 0}, "n"),
        (CHAT_PATH, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        (CHAT_PATH, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (
            CHAT_PATH,
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (CHAT_PATH, {"echo": True}, "echo"),
        (CHAT_PATH, {"stream_options": {}}, "stream_options"),
        (COMPLETION_PATH, {"logprobs": 21}, "logprobs"),
        (COMPLETION_PATH, {"echo": True, "logprobs": 1}, "echo"),
        (COMPLETION_PATH, {"suffix": "end"}, "suffix"),
        (COMPLETION_PATH, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
async def test_values_that_do_not_fit_together(path, fields, param):
    base = CHAT if path == CHAT_PATH else COMPLETION
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        answer = await gateway.client.post(path, json=base | fields)
        check_error(answer, 400, param, names=param)


async def test_what_is_not_served_is_refused_instead_of_ignored():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for path, base in ((CHAT_PATH, CHAT), (COMPLETION_PATH, COMPLETION)):
            for field, value in UNSUPPORTED:
                answer = await gateway.client.post(path, json=base | {field: value})
                check_error(answer, 400, field, names=field)
        assert not worker.submits


async def test_what_asks_for_nothing_passes():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for path, base in ((CHAT_PATH, CHAT), (COMPLETION_PATH, COMPLETION)):
            for field, value in NEUTRAL:
                answer = await gateway.client.post(path, json=base | {field: value})
                assert answer.status_code == 200, (field, answer.text)


@pytest.mark.public_case("B13")
async def test_bad_messages_are_refused_by_place():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for stream in (False, True):
            for messages, place in BAD_MESSAGES:
                answer = await gateway.chat(messages=messages, stream=stream)
                check_error(answer, 400, "messages", names=place)
            body = {"model": "fake", "stream": stream}
            answer = await gateway.client.post(CHAT_PATH, json=body)
            check_error(answer, 400, "messages", names="messages is required")


@pytest.mark.public_case("B13")
async def test_empty_words_are_answered_alike_streamed_and_whole():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for content in ("", []):
            messages = [{"role": "user", "content": content}]
            for stream in (False, True):
                answer = await gateway.chat(messages=messages, stream=stream)
                assert answer.status_code == 200, answer.text


@pytest.mark.public_case("B13")
async def test_bad_prompts_are_refused_by_place():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for stream in (False, True):
            for prompt, place in BAD_PROMPTS:
                answer = await gateway.complete(prompt=prompt, stream=stream)
                if place:
                    check_error(answer, 400, "prompt", names=place)
                else:
                    assert answer.status_code == 200


@pytest.mark.public_case("B16")
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_http_statuses_with_codes(stream):
    long, limit = [5] * 2058, 2048
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        answer = await gateway.chat(model="no-such-model", stream=stream)
        error = check_error(answer, 404, "model", names="no-such-model")
        assert (error["code"], error["type"]) == ("model_not_found", "NotFoundError")
        for fields in (
            {"prompt": long},
            {"prompt": [5] * (limit - 4), "max_tokens": 100},
            {"max_tokens": 1_000_000_000},
            {"prompt": "x" * 5_000_000},
        ):
            answer = await gateway.complete(**fields, stream=stream)
            error = check_error(answer, 400, "input_tokens", names="maximum context length is 2048")
            assert error["code"] == "context_length_exceeded"
        error = check_error(await post(gateway, CHAT_PATH, '{"model":'), 400, None)
        assert "JSON" in error["message"]
        answer = await gateway.client.get(CHAT_PATH)
        assert check_error(answer, 405, None)["code"] == "method_not_allowed"
        assert (await gateway.chat(foo=1, stream=stream)).status_code == 200
        check_error(await post(gateway, CHAT_PATH, json.dumps(CHAT), "text/plain"), 415, None)
        check_error(await gateway.client.post("/v1/nothing", json={}), 404, None)


@pytest.mark.public_case("B19")
@pytest.mark.parametrize("stream", ["true", "false"])
async def test_broken_text_never_reaches_the_tokenizer(stream):
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for body in (
            LONE_SURROGATE.encode(),
            LONE_SURROGATE.replace("\\ud800", "\\udc00\\ud800").encode(),
            LONE_SURROGATE.encode().replace(b"\\ud800", b"\xff"),
        ):
            body = body.replace(b'{"model"', b'{"stream":' + stream.encode() + b',"model"')
            message = check_error(await post(gateway, CHAT_PATH, body), 400, None)["message"]
            assert "Error" not in message
        for text in ("\\ud83d\\ude00", "a\\u0000b"):
            body = LONE_SURROGATE.replace("\\ud800", text).encode()
            assert (await post(gateway, CHAT_PATH, body)).status_code == 200
        escaped, direct = worker.submits[0], None
        await post(gateway, CHAT_PATH, LONE_SURROGATE.replace("\\ud800", "😀").encode())
        direct = worker.submits[-1]
        assert escaped.request.prompt_token_ids == direct.request.prompt_token_ids


async def test_a_surrogate_inside_the_json_of_tool_arguments_is_refused():
    arguments = '{"a": "\\ud800"}'
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        answer = await gateway.chat(messages=[{"role": "assistant", "tool_calls": calls}])
        check_error(answer, 400, "messages", names="arguments")


@pytest.mark.public_case("B58")
async def test_templates_and_reserved_variables_are_never_taken_from_a_request():
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        check_error(await gateway.chat(chat_template=loops), 400, "chat_template")
        reserved = [
            ("chat_template", loops),
            ("messages", []),
            ("tools", [1]),
            ("tokenize", False),
            ("add_generation_prompt", False),
            ("bos_token", "x"),
        ]
        for name, value in reserved:
            answer = await gateway.chat(chat_template_kwargs={name: value})
            check_error(answer, 400, "chat_template_kwargs", names=name)
        for fields in (
            {"chat_template_args": {"chat_template": loops}},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {},
        ):
            assert (await gateway.chat(**fields)).status_code == 200
        prompts = [submit.request.prompt_token_ids for submit in worker.submits]
        assert prompts[0] == prompts[1] == prompts[2]


@pytest.mark.public_case("B59")
async def test_nothing_a_client_names_is_fetched_or_connected_to():
    hits = 0

    def count(*_):
        nonlocal hits
        hits += 1

    import asyncio

    server = await asyncio.start_server(count, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    urls = [
        f"http://127.0.0.1:{port}/a",
        f"http://[::1]:{port}",
        f"http://0x7f000001:{port}",
        "file:///etc/hostname",
        "data:image/png;base64," + "A" * 1_000_000,
    ]
    async with server, running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for url in urls:
            part = {"type": "image_url", "image_url": {"url": url}}
            answer = await gateway.chat(messages=[{"role": "user", "content": [part]}])
            check_error(answer, 400, "messages", names="messages[0].content[0].type")
        params = {"remote_host": "127.0.0.1", "remote_port": port}
        check_error(await gateway.chat(kv_transfer_params=params), 400, "kv_transfer_params")
        headers = {
            "x-target-worker": f"127.0.0.1:{port}",
            "x-prefiller-host-port": f"127.0.0.1:{port}",
        }
        answer = await gateway.client.post(CHAT_PATH, json=CHAT, headers=headers)
        assert answer.status_code == 200
    assert hits == 0


async def test_an_error_message_shows_long_values_short():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        answer = await gateway.chat(model="x", temperature="y" * 100_000)
        error = check_error(answer, 400, "temperature")
        assert len(error["message"]) < 300
