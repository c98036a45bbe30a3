"""The server-side functions of the Redis index: Lua texts beside this file, put together once.

Owns names, texts and digests. A script is sent by its digest; a server that does not have it (new, restarted, flushed)
gets the whole text, once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "lua"

_READ_ONLY = "#!lua flags=no-writes\n"
_WRITES = "#!lua\n"
# A full server refuses blocks, never workers: leases, reports and reservations are few, small and short-lived.
_WRITES_WHEN_FULL = "#!lua flags=allow-oom\n"


@dataclass(frozen=True, slots=True)
class Script:
    """One server-side function: its name, whole text, and the digest that EVALSHA takes."""

    name: str
    text: str
    digest: str


@cache
def load_script(name: str) -> Script:
    """The script `name`, with the prelude that all share."""
    match name:
        case "match" | "workers":
            parts = ["prelude", "reports", name]
            shebang = _READ_ONLY
        case "register" | "heartbeat" | "deregister" | "reserve" | "release":
            parts = ["prelude", name]
            shebang = _WRITES_WHEN_FULL
        case _:
            parts = ["prelude", name]
            shebang = _WRITES
    text = shebang + "\n".join((_FOLDER / f"{part}.lua").read_text() for part in parts)
    return Script(name, text, hashlib.sha1(text.encode()).hexdigest())
