"""Baton's own transports that read by another system's engine, where its package starts here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from benchmarks.peers import install
from core.errors import ConfigError
from kvtransfer.transports.mooncake.engine import MooncakeEngine
from kvtransfer.transports.nixl.engine import NixlEngine
from kvtransfer.transports.pull.engine import Engine

KINDS = ("nixl", "mooncake")


def engine(kind: str, *, is_read: bool) -> Engine:
    """One end."""
    return NixlEngine(is_read=is_read) if kind == "nixl" else MooncakeEngine("127.0.0.1")


def find() -> list[str]:
    """Those that start here, importable from now on; those that do not are named and left out."""
    found: list[str] = []
    for kind in KINDS:
        try:
            sys.path.append(str(install.transfer_engine(kind)))
            engine(kind, is_read=False).close()
            found.append(kind)
        except (install.InstallError, ConfigError) as error:
            print(f"  without baton over {kind}: {str(error).strip().splitlines()[-1]}", flush=True)
    return found


def environment(kinds: Sequence[str]) -> dict[str, str]:
    """Of a process that imports them too."""
    folders = [str(install.transfer_engine(kind)) for kind in kinds]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([".", *folders])}
