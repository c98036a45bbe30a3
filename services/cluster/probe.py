"""Whether a gateway answers /health with 200, asked without an HTTP library: the launcher should
start fast.
"""

from __future__ import annotations

import asyncio

_TIMEOUT_S = 2.0
_POLL_S = 0.05
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


async def wait_until_healthy(host: str, port: int) -> None:
    """Ask until the answer is yes."""
    while not await is_healthy(host, port):  # noqa: ASYNC110 - the gateway is another process
        await asyncio.sleep(_POLL_S)


async def is_healthy(host: str, port: int) -> bool:
    """Ask once; anything but a 200 in time is no."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(_WILDCARDS.get(host, host), port)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: baton\r\nConnection: close\r\n\r\n")
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return status_line.split(b" ")[1:2] == [b"200"]
