"""Chat templates: a model's own Jinja text, run in a sandbox.

Templates come from model bundles, never from requests. Names and helpers are those that templates on the Hub are
written for: `raise_exception`, `strftime_now`, `tojson` that leaves non-ASCII alone, `{% generation %}` blocks, loop
controls. An error inside a template is the request's fault (roles in an order that it refuses, say), so it is raised
as InvalidRequest.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import InvalidRequest, ModelLoadError

RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
    }
)
"""Variables that the gateway sets itself; `chat_template_kwargs` may not."""


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks the assistant's words for training, prints them here."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, unchanged."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """One compiled template with the special tokens of its model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template cannot be compiled: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation."""
        try:
            text = self._template.render(
                **self._special_tokens,
                **(variables or {}),
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            message = f"messages: the model's chat template refuses them: {error}"
            raise InvalidRequest(message, param="messages") from None
        return _cut_after(text, messages) if continue_final_message else text


def _cut_after(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt up to the end of the last message's words, so that the model goes on with them."""
    words = str(messages[-1].get("content") or "").strip()
    start = text.rfind(words)
    if not words or start < 0:
        message = "continue_final_message: the last message must have text that the template prints"
        raise InvalidRequest(message, param="continue_final_message")
    return text[: start + len(words)]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)
