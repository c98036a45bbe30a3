"""JSON objects of a model's folder, read with checked types: errors name the file, the key and the value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError


def parse_object(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object from a file's content."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ModelLoadError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{where}: holds {type(value).__name__}, not an object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_object(content, str(path))


class JsonReader:
    """Typed look-ups in a JSON object; errors name the file and the key."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self._where, self._values = where, values

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "a boolean")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers, empty when the key is not there."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, (int, float)) for v in value):
            raise self._wrong(key, value, "a list of numbers")
        return tuple(float(v) for v in value)

    def texts(self, key: str) -> list[str]:
        """A list of strings, empty when the key is not there."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self._wrong(key, value, "a list of strings")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them, empty when the key is not there."""
        value = self._values.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) for v in values):
            raise self._wrong(key, value, "a token id or a list of them")
        return tuple(values)

    def section(self, key: str) -> JsonReader | None:
        """A nested object, None when the key is not there."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return JsonReader(f"{self._where}: {key}", value)

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self._where}: {key} is missing")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> ModelLoadError:
        return ModelLoadError(f"{self._where}: {key} must be {wanted}, got {value!r}")
