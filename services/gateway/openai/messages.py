"""Chat messages: checked, and brought into the one shape that templates read.

Content becomes one text (the texts of its parts, joined without anything between), missing content of an assistant
that called tools becomes an empty one, `developer` is `system` to templates that know no other, and arguments of tool
calls are objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from core.errors import InvalidRequest
from services.gateway.openai.validation import check_type, shown
from services.gateway.text.chat_template import RESERVED_VARIABLES

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalise_messages(messages: Any, max_messages: int) -> list[dict[str, Any]]:
    """The conversation as templates read it; InvalidRequest names the place of what is wrong."""
    check_type("messages", messages, list, "a list of messages")
    if not 1 <= len(messages) <= max_messages:
        message = f"messages must hold 1 to {max_messages} messages, got {len(messages)}"
        raise InvalidRequest(message, param="messages")
    return [_message(f"messages[{place}]", each) for place, each in enumerate(messages)]


def template_variables(
    kwargs: Mapping[str, Any] | None, reasoning_effort: str | None = None
) -> dict[str, Any]:
    """What a request may set for its template: anything but what the gateway sets itself."""
    for name in kwargs or {}:
        if name in RESERVED_VARIABLES:
            message = f"chat_template_kwargs: {name} may not be set by a request"
            raise InvalidRequest(message, param="chat_template_kwargs")
    variables = dict(kwargs or {})
    if reasoning_effort is not None:
        variables.setdefault("reasoning_effort", reasoning_effort)
    return variables


def _message(path: str, message: Any) -> dict[str, Any]:
    check_type(path, message, Mapping, "an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequest(
            f"{path}.role must be one of {known}, got {shown(role)}", param="messages"
        )
    clean = {key: value for key, value in message.items() if value is not None}
    clean["role"] = "system" if role == "developer" else role
    clean["content"] = _content(f"{path}.content", message.get("content"), role)
    if message.get("tool_calls") is not None:
        clean["tool_calls"] = _tool_calls(f"{path}.tool_calls", message["tool_calls"])
    return clean


def _content(path: str, content: Any, role: str) -> str:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    check_type(path, content, list, "a text or a list of parts")
    return "".join(_part(f"{path}[{place}]", part) for place, part in enumerate(content))


def _part(path: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    check_type(path, part, Mapping, "an object with a type")
    field = _TEXT_PARTS.get(str(part.get("type")))
    if field is None:
        message = f"{path}.type must be text (this model reads nothing else), got {shown(part.get('type'))}"
        raise InvalidRequest(message, param="messages")
    check_type(f"{path}.{field}", part.get(field), str, "a text")
    return str(part[field])


def _tool_calls(path: str, calls: Any) -> list[dict[str, Any]]:
    check_type(path, calls, list, "a list of tool calls")
    return [_tool_call(f"{path}[{place}]", call) for place, call in enumerate(calls)]


def _tool_call(path: str, call: Any) -> dict[str, Any]:
    check_type(path, call, Mapping, "an object with a function")
    function = call.get("function")
    check_type(f"{path}.function", function, Mapping, "an object with name and arguments")
    check_type(f"{path}.function.name", function.get("name"), str, "a text")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments)
        except ValueError:
            message = f"{path}.function.arguments must be JSON, got {shown(arguments)}"
            raise InvalidRequest(message, param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}
