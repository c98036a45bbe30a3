"""From bytes to a request body: JSON and schema errors become InvalidRequest with field, value and limit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from core.errors import InvalidRequest

_LONGEST_VALUE = 80
_MOST_ELEMENTS = 1_000_000
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

_Body = TypeVar("_Body", bound=BaseModel)

_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("greater than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
    "string_too_short": ("a text of at least {} characters", "min_length"),
    "string_too_long": ("a text of at most {} characters", "max_length"),
    "too_long": ("a list of at most {} entries", "max_length"),
    "too_short": ("a list of at least {} entries", "min_length"),
}


def parse_body(data: bytes, model: type[_Body]) -> _Body:
    """The body that these bytes hold."""
    if _has_too_many_elements(data):
        raise InvalidRequest(
            f"the request body must have at most {_MOST_ELEMENTS} JSON elements, got more"
        )
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise _first_error(error) from None


def _has_too_many_elements(data: bytes) -> bool:
    """Whether parsing would make so many objects that memory suffers; the text of a long prompt does not count."""
    if _num_separators(data) <= _MOST_ELEMENTS:
        return False
    if data.count(b'"') > _MOST_ELEMENTS // 4:
        return True
    return _num_separators(_STRING.sub(b"", data)) > _MOST_ELEMENTS


def _num_separators(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def check_type(path: str, value: Any, kind: type | tuple[type, ...], what: str) -> None:
    """InvalidRequest unless `value` is a `kind`; what: the kind in words."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise InvalidRequest(f"{path} must be {what}, got {shown(value)}", param=_field(path))


def shown(value: Any) -> str:
    """A value as an error message shows it: short, whatever it is."""
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} entries"
    if isinstance(value, Mapping):
        return f"an object with {len(value)} fields"
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _first_error(error: ValidationError) -> InvalidRequest:
    details = error.errors(include_url=False)[0]
    kind, context = details["type"], details.get("ctx") or {}
    if kind == "json_invalid":
        return InvalidRequest(f"the request body is no valid JSON: {context.get('error', '')}")
    path = _path(details["loc"])
    if not path:
        return InvalidRequest("the request body must be a JSON object")
    if kind == "missing":
        return InvalidRequest(f"{path} is required", param=_field(path))
    value = details.get("input")
    if kind in _LIMITS:
        words, key = _LIMITS[kind]
        limit = context.get(key)
        expected = words.format(limit) if "{}" in words else f"{words} {limit}"
    elif kind == "finite_number":
        expected = "a finite number"
    else:
        expected = details["msg"].removeprefix("Input should be ")
    return InvalidRequest(f"{path} must be {expected}, got {shown(value)}", param=_field(path))


def _path(location: Sequence[int | str]) -> str:
    """`messages[0].content` from the parts of a location."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _field(path: str) -> str:
    """The top-level field of a path."""
    return path.split(".")[0].split("[")[0]
