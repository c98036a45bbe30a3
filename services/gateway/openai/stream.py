"""Server-sent events of one request: chunks as they come, usage when asked, `[DONE]` at the end.

The first event is made before the response begins, so that errors up to the first token are HTTP statuses. A later
error is one `data: {"error": ...}` event, and the stream ends.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import ServeError
from services.gateway.http_errors import ClientGone, error_body
from services.gateway.openai.job import Job
from services.gateway.openai.writers import Writer

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class UsageWish:
    """Which chunks carry usage: a last one of its own, and maybe every one."""

    at_end: bool
    always: bool


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


async def events(job: Job, writer: Writer, wish: UsageWish) -> AsyncGenerator[bytes, None]:
    """The stream's bytes; several events a piece when several choices moved in one step."""
    has_begun = False
    try:
        async with aclosing(job.deltas()) as deltas:
            async for group in deltas:
                chunks = [chunk for delta in group for chunk in writer.chunks(delta)]
                if wish.always:
                    usage = job.usage()
                    for chunk in chunks:
                        chunk["usage"] = usage
                if chunks:
                    has_begun = True
                    yield b"".join(map(event, chunks))
        if wish.at_end:
            yield event(writer.usage_chunk(job.usage())) + DONE
        else:
            yield DONE
    except ClientGone:
        raise
    except Exception as error:
        if not has_begun:
            raise
        if not isinstance(error, ServeError):
            logger.exception("a stream broke")
        yield event(error_body(error)) + DONE
