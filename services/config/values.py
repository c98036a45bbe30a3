"""How a value is written on a command line, in the environment and in YAML: numbers with units,
lists, switches.

Counts follow the peer's rule: k, m, g are powers of 1000 and K, M, G powers of 1024. Rates and
sizes in bytes are decimal (5M is 5,000,000), unless written with an i (5Mi).
"""

from __future__ import annotations

import json
import re
from typing import Any

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_COUNT_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?(?:/s)?", re.IGNORECASE)
_BYTE_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True}
_SWITCHES |= {"0": False, "false": False, "no": False, "off": False}


def parse_integer(text: str) -> int:
    """A plain whole number."""
    return int(text)


def parse_count(text: str) -> int:
    """A count such as 4096, 32k (32,000) or 32K (32,768)."""
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError("write a whole number, or one with k, m, g (thousands) or K, M, G (1024s)")
    value = float(found[1]) * _COUNT_UNITS[found[2]]
    if value != int(value):
        raise ValueError(f"{value} is not a whole number")
    return int(value)


def parse_bytes(text: str) -> int:
    """A size such as 1073741824, 512M (512,000,000) or 1Gi; a rate may end in /s."""
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError("write bytes, or a number with K, M, G (thousands) or Ki, Mi, Gi (1024s)")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** _BYTE_POWERS[found[2].lower()])


def parse_rate(text: str) -> float:
    """Bytes a second, such as 5M or 5MB/s."""
    return float(parse_bytes(text))


def parse_number(text: str) -> float:
    """A number."""
    return float(text)


def parse_text(text: str) -> str:
    """Any text."""
    return text


def parse_switch(text: str) -> bool:
    """True or false, in the usual spellings."""
    value = _SWITCHES.get(text.strip().lower())
    if value is None:
        raise ValueError("write true or false")
    return value


def parse_list(text: str) -> tuple[str, ...]:
    """Values between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_weights(text: str) -> dict[str, float]:
    """A JSON object of numbers, such as {"prefix": 1.0}."""
    value: Any = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError('write a JSON object such as {"prefix": 1.0}')
    return {str(name): float(weight) for name, weight in value.items()}
