"""The version of this installation."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The installed package's version; `0` where the project runs from a checkout without one."""
    try:
        return metadata.version("baton")
    except metadata.PackageNotFoundError:
        return "0"
