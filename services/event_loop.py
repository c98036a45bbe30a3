"""The event loop of a process that serves: the fast one where it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the loop; None for the one that Python brings."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
