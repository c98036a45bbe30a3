"""One child process: its group, its output, its end.

A child leads a process group of its own, so that Ctrl-C in a terminal reaches the launcher alone
and a kill reaches the child's own children. Its output is kept line by line, for the sentence that
says why it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from services.cluster.child import ChildSpec

KEPT_LINES = 50
_MAX_LINE_BYTES = 1 << 20
_COMMAND = (sys.executable, "-m", "services.cluster.child")


class ChildProcess:
    """A started child. Made by `start_child`."""

    def __init__(self, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        self._process = process
        self._on_line = on_line
        self._reader = asyncio.create_task(self._read_output())
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)

    @property
    def pid(self) -> int:
        """Process id, which is also its group's."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit status once it has ended and all it said is read; negative for a signal."""
        status = await self._process.wait()
        # A grandchild may hold the pipe open for a moment longer than its parent lived.
        await asyncio.wait([self._reader], timeout=1.0)
        return status

    async def stop(self, seconds: float) -> None:
        """Ask it to end, and kill its whole group when that takes longer."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            pass
        self.kill_group()
        await self.wait()
        self._reader.cancel()

    def kill_group(self) -> None:
        """End whatever is left of the child and its own children at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            self.last_lines.append(text)
            self._on_line(text)


async def start_child(
    spec: ChildSpec, on_line: Callable[[str], None], pass_fds: Sequence[int] = ()
) -> ChildProcess:
    """Start a process for this spec; on_line is called for each line that it writes."""
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        pass_fds=tuple(pass_fds),
        process_group=0,
        limit=_MAX_LINE_BYTES,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec))
    process.stdin.close()
    return ChildProcess(process, on_line)


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
