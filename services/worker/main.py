"""A worker process: starts the front, waits for a signal or for the engine's death, leaves a clear
exit status.

0: asked to stop. EXIT_REFUSED: cannot start, and would not another time; the reason is one sentence
on stderr. EXIT_ENGINE_DEAD: the engine died; a restart helps.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from core.errors import ServeError
from services.event_loop import loop_factory
from services.rpc.status import error_kind
from services.worker.config import WorkerConfig
from services.worker.engine_client import ENGINE_COMMAND
from services.worker.front import WorkerFront
from services.worker.status_pipe import Failed, StatusPipe

EXIT_REFUSED = 1
EXIT_ENGINE_DEAD = 3
END_STREAMS_S = 0.5
"""How long a worker whose engine died still answers, so that every stream carries the reason away.
"""

_log = logging.getLogger(__name__)


def run_worker(
    config: WorkerConfig,
    *,
    status_fd: int = -1,
    engine_command: Sequence[str] = ENGINE_COMMAND,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(config, StatusPipe(status_fd), engine_command))


async def _serve(config: WorkerConfig, status: StatusPipe, engine_command: Sequence[str]) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    front = WorkerFront(config, status=status, engine_command=engine_command)
    try:
        return await _run_until(front, stopping, status)
    finally:
        await front.stop()


async def _run_until(front: WorkerFront, stopping: asyncio.Event, status: StatusPipe) -> int:
    """Start and serve; a signal ends either."""
    asked = asyncio.create_task(stopping.wait())
    for phase, exit_status in ((front.start, EXIT_REFUSED), (front.run, EXIT_ENGINE_DEAD)):
        work = asyncio.create_task(phase())
        await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            work.cancel()
            await asyncio.wait([work])
            return 0
        try:
            work.result()
        except ServeError as error:
            print(f"baton: {error.message}", file=sys.stderr, flush=True)  # noqa: T201
            if exit_status == EXIT_REFUSED:
                status.send(Failed(error_kind(error), error.message))
            else:
                await asyncio.sleep(END_STREAMS_S)
            return exit_status
    asked.cancel()
    return 0
