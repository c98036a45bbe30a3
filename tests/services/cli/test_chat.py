"""A conversation with a scripted gateway."""

import io
import json
from collections.abc import Iterator

import httpx
import pytest

from services.cli.chat import ChatError, ChatOptions, Conversation, run_chat


class ScriptedGateway:
    """Answers each question with its number of words, in pieces; remembers what it was asked."""

    def __init__(self, models: tuple[str, ...] = ("m",)) -> None:
        self.models = models
        self.bodies: list[dict[str, object]] = []
        self.keys: list[str | None] = []
        self.failure: httpx.Response | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers.get("Authorization"))
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in self.models]})
        self.bodies.append(json.loads(request.content))
        if self.failure is not None:
            return self.failure
        return httpx.Response(200, content=b"".join(self._events()))

    def _events(self) -> Iterator[bytes]:
        yield b": a comment\n\n"
        for content in ("one ", None, "größe"):
            chunk = {"choices": [{"delta": {"content": content}}]}
            yield f"data: {json.dumps(chunk)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def options(self, **changes: object) -> ChatOptions:
        return ChatOptions("http://gateway", **changes)  # type: ignore[arg-type]


def talk(gateway: ScriptedGateway, text: str, **options: object) -> int:
    transport = httpx.MockTransport(gateway)
    return run_chat(gateway.options(**options), transport=transport, source=io.StringIO(text))


def test_every_turn_carries_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = ScriptedGateway()
    assert talk(gateway, "first\n\nsecond\n/reset\nthird\n", system="be brief", api_key="k") == 0
    said = [
        [(message["role"], message["content"]) for message in body["messages"]]  # type: ignore[attr-defined]
        for body in gateway.bodies
    ]
    system = ("system", "be brief")
    assert said == [
        [system, ("user", "first")],
        [system, ("user", "first"), ("assistant", "one größe"), ("user", "second")],
        [system, ("user", "third")],
    ]
    assert set(gateway.keys) == {"Bearer k"}
    assert capsys.readouterr().out.count("one größe\n") == 3


def test_the_first_model_is_taken_unless_one_is_named() -> None:
    gateway = ScriptedGateway(("first", "second"))
    talk(gateway, "hi\n")
    talk(gateway, "hi\n", model="second", temperature=0.5)
    assert [body["model"] for body in gateway.bodies] == ["first", "second"]
    assert [body.get("temperature") for body in gateway.bodies] == [None, 0.5]


def test_no_model_is_said_so() -> None:
    with pytest.raises(ChatError, match="no model is served there yet"):
        talk(ScriptedGateway(()), "hi\n")


def test_a_refused_question_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = ScriptedGateway()
    gateway.failure = httpx.Response(400, json={"error": {"message": "too long"}})
    assert talk(gateway, "hi\nagain\n") == 1
    assert capsys.readouterr().err.count("baton: too long\n") == 2
    assert gateway.bodies[1]["messages"] == [{"role": "user", "content": "again"}]


def test_an_answer_that_was_stopped_stays_in_the_conversation() -> None:
    with httpx.Client(
        base_url="http://gateway", transport=httpx.MockTransport(ScriptedGateway())
    ) as client:
        conversation = Conversation(client, ChatOptions("http://gateway"))
        conversation.begin()
        answer = conversation.answer("hi")
        assert next(answer) == "one "
        answer.close()
        assert conversation.messages[-1] == {"role": "assistant", "content": "one "}


def test_a_conversation_that_is_full_says_what_helps() -> None:
    gateway = ScriptedGateway()
    with httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(gateway)) as client:
        conversation = Conversation(client, ChatOptions("http://gateway"))
        conversation.begin()
        assert list(conversation.answer("hi")) == ["one ", "größe"]
        gateway.failure = httpx.Response(400, json={"error": {"message": "too long"}})
        with pytest.raises(ChatError, match=r"too long .*/reset.*--max-tokens"):
            list(conversation.answer("again"))


def test_words_that_are_commands_are_no_questions(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = ScriptedGateway()
    assert talk(gateway, "/help\n/exit\nhi\n") == 0
    assert gateway.bodies == []
    assert capsys.readouterr().out.count("/reset begins anew") == 2


def test_a_model_that_is_not_served_is_said_at_once() -> None:
    with pytest.raises(ChatError, match=r"--model: 'x' is not served at http://gateway; served: m"):
        talk(ScriptedGateway(), "hi\n", model="x")


def test_nobody_at_the_address() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    options = ChatOptions("http://gateway")
    with pytest.raises(ChatError, match="refused; `baton up` starts a server, --url names another"):
        run_chat(options, transport=httpx.MockTransport(refuse), source=io.StringIO("hi\n"))
