"""`baton chat`: a conversation with any OpenAI-compatible gateway, answer by answer as it streams.

Ctrl-C stops an answer (what came so far stays in the conversation), Ctrl-D or /exit leaves, /reset begins anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

from core.errors import ServeError

_TIMEOUT = httpx.Timeout(connect=5.0, read=300.0, write=30.0, pool=5.0)
_HELP = "/reset begins anew, Ctrl-C stops an answer, Ctrl-D or /exit leaves."
_EXITS = ("/exit", "/quit")
_IS_FULL = "/reset begins a new conversation; --max-tokens sets how long answers may be"


class ChatError(ServeError):
    """The gateway cannot be reached, or says no."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a conversation starts with.

    url: the gateway. model: a served name, empty for the gateway's first.
    api_key: the gateway's key, empty for none.
    system: the system message, empty for none.
    max_tokens: longest answer. temperature: None leaves it to the model's defaults.
    """

    url: str
    model: str = ""
    api_key: str = ""
    system: str = ""
    max_tokens: int = 1024
    temperature: float | None = None


@dataclass
class Conversation:
    """The messages so far, and the calls that continue them."""

    client: httpx.Client
    options: ChatOptions
    messages: list[dict[str, str]] = field(default_factory=list)
    model: str = ""

    def begin(self) -> None:
        """Find the model and forget what was said. Raises ChatError where it is not served."""
        self.model = self._served_model()
        system = self.options.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str) -> Generator[str, None, None]:
        """Pieces of the answer to `text`. What was yielded is remembered, however the iteration
        ends.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        except ChatError:
            if not pieces:
                self.messages.pop()  # the question was not taken: it may be asked again
            raise
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _served_model(self) -> str:
        url, wanted = self.options.url, self.options.model
        try:
            reply = self.client.get("/v1/models")
        except httpx.ConnectError as error:
            raise ChatError(
                f"{url}: {error}; `baton up` starts a server, --url names another"
            ) from None
        except httpx.HTTPError as error:
            raise ChatError(f"{url}: {error}") from None
        if reply.status_code != httpx.codes.OK:
            raise ChatError(_reason(reply.status_code, reply.content))
        names = [str(model["id"]) for model in reply.json()["data"]]
        if not names:
            raise ChatError(f"{url}: no model is served there yet")
        if wanted and wanted not in names:
            raise ChatError(
                f"--model: {wanted!r} is not served at {url}; served: {', '.join(names)}"
            )
        return wanted or names[0]

    def _stream(self) -> Iterator[str]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": self.options.max_tokens,
            "stream": True,
        }
        if self.options.temperature is not None:
            body["temperature"] = self.options.temperature
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != httpx.codes.OK:
                    reason, num_said = _reason(reply.status_code, reply.read()), len(self.messages)
                    is_full = reply.status_code == httpx.codes.BAD_REQUEST and num_said > 1
                    raise ChatError(f"{reason} ({_IS_FULL})" if is_full else reason)
                yield from _deltas(reply.iter_lines())
        except httpx.HTTPError as error:
            raise ChatError(f"{self.options.url}: {error}") from None


def run_chat(
    options: ChatOptions,
    *,
    transport: httpx.BaseTransport | None = None,
    source: TextIO | None = None,
) -> int:
    """Talk until the input ends; 1 where the last question got no whole answer.

    transport and source: instead of network and terminal, for tests.
    """
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    with httpx.Client(
        base_url=options.url, headers=headers, timeout=_TIMEOUT, transport=transport
    ) as client:
        conversation = Conversation(client, options)
        conversation.begin()
        print(f"{conversation.model} at {options.url}. {_HELP}")
        is_answered = True
        for text in _inputs(source):
            if text in _EXITS:
                break
            if text == "/reset":
                conversation.begin()
                print("(a new conversation)")
            elif text == "/help":
                print(_HELP)
            elif text:
                is_answered = _show_answer(conversation, text)
    return 0 if is_answered else 1


def _show_answer(conversation: Conversation, text: str) -> bool:
    answer = conversation.answer(text)
    try:
        for piece in answer:
            print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except ChatError as error:
        print(f"\nbaton: {error.message}", file=sys.stderr)
        return False
    finally:
        answer.close()
    return True


def _inputs(source: TextIO | None) -> Iterator[str]:
    """Lines the user enters, until the end of the input."""
    if source is not None:
        yield from (line.strip() for line in source)
        return
    import readline  # noqa: F401 - gives input() a history and editing

    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _deltas(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if not data:
            continue
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatError(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", []):
            content = choice.get("delta", {}).get("content")
            if content:
                yield content


def _reason(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered with status {status}"
