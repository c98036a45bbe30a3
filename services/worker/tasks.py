"""A helper task that ends with the block that started it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine


@contextlib.asynccontextmanager
async def background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` beside the block; at the block's end cancel it and wait until it is gone.

    Where the block ends well, an error of the work is raised; the block's own error comes first.
    """
    task = asyncio.ensure_future(work)
    try:
        yield
    except BaseException:
        await _end(task)
        raise
    error = await _end(task)
    if error is not None:
        raise error


async def _end(task: asyncio.Future[None]) -> BaseException | None:
    task.cancel()
    await asyncio.wait([task])
    return None if task.cancelled() else task.exception()
