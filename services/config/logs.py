"""How a process logs: to stderr, one line an event, at the configured level."""

from __future__ import annotations

import logging


def configure_logging(level: str) -> None:
    """Log at this level and above from here on."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
