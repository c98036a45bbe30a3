"""A gateway process: HTTP service, workers, index, and an orderly end.

On SIGTERM or SIGINT the gateway takes no more requests, lets running ones end for at most `drain_timeout_s`, cancels
the rest at their workers, and returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn

from core.errors import ConfigError
from kvindex.base import PrefixIndex
from kvindex.connect import connect_index
from services.event_loop import loop_factory
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from services.gateway.state import GatewayState

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_LAST_WORDS_S = 2


def run_until_stopped(
    config: GatewayConfig,
    on_ready: Callable[[int], None] | None = None,
    *,
    listener: socket.socket | None = None,
) -> None:
    """`run_gateway` on an event loop of its own: the fast one where it is installed."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run_gateway(config, on_ready, listener=listener))


async def run_gateway(
    config: GatewayConfig,
    on_ready: Callable[[int], None] | None = None,
    *,
    listener: socket.socket | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    on_ready: told the port once connections are taken.
    listener: a socket that already listens, instead of one on the config's host and port.
    """
    index = connect_index(config.index) if config.index.redis_url else None
    stopping = asyncio.Event()
    with _signals_set(stopping):
        async with serve_gateway(config, index, listener=listener) as (port, _):
            if on_ready is not None:
                on_ready(port)
            await stopping.wait()
            logger.info("stopping")


class _Server(uvicorn.Server):
    """The web server, without its own idea of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield


@contextlib.asynccontextmanager
async def serve_gateway(
    config: GatewayConfig,
    index: PrefixIndex | None,
    *,
    listener: socket.socket | None = None,
) -> AsyncIterator[tuple[int, GatewayState]]:
    """A gateway that serves inside the block; drains and closes at its end. Gives the port and the state."""
    state = GatewayState(config, index)
    listener = listener or _listen(config)
    server = _Server(
        uvicorn.Config(
            create_app(state),
            log_level="warning",
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_WORDS_S,
            server_header=False,
        )
    )
    state.start()
    port: int = listener.getsockname()[1]
    serving = asyncio.create_task(server.serve([listener]), name="http")
    try:
        await _until_started(server, serving)
        logger.info("gateway listens on http://%s:%d", config.host, port)
        yield port, state
    finally:
        await state.drain(config.drain_timeout_s)
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()
        await state.close()


async def _until_started(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    while not server.started:
        if serving.done():
            await serving
            raise ConfigError("the HTTP service ended before it began")
        await asyncio.sleep(0.005)


def _listen(config: GatewayConfig) -> socket.socket:
    """A bound socket; ConfigError says why there is none."""
    host = config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port: cannot listen on {config.host}:{config.port}: {error.strerror}"
        ) from None
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def _signals_set(event: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
