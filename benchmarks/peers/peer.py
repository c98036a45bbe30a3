"""The seam between the benchmark and what it measures: a peer answers token-id prompts, greedily, as timelines."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.client import ReadEvent, ServerRefusedError, stream_all
from benchmarks.peers.processes import ServerProcess
from benchmarks.peers.timeline import Timeline

START_TIMEOUT_S = 300.0
NUM_THREADS = 2
KV_TOKENS = 16_384
"""Tokens of KV that every server may hold: its largest workload here, 32 streams, needs 10,240."""

MAX_MODEL_TOKENS = 4_096
MAX_STREAMS = 32


class Peer(Protocol):
    """A server that runs: `process` for accounts, `ask` for answers."""

    name: str
    process: ServerProcess

    def wait_ready(self) -> None:
        """Return when it serves, also after it was paused."""

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = True
    ) -> list[Timeline]:
        """Greedy answers to prompts that are sent at the same time."""


@dataclass
class HttpPeer:
    """A peer behind its own HTTP server.

    body: prompt, tokens to generate, whether to go on past an end token -> the request's JSON.
    read_event: see `client.ReadEvent`.
    """

    name: str
    process: ServerProcess
    port: int
    path: str
    body: Callable[[Sequence[int], int, bool], Mapping[str, Any]]
    read_event: ReadEvent
    is_ready: Callable[[int], bool]

    def wait_ready(self) -> None:
        """Poll its health endpoint, then ask for a token until one comes: health may be stale after a pause."""
        self.process.wait_until(lambda: self.is_ready(self.port), START_TIMEOUT_S)
        self.process.wait_until(self._answers, START_TIMEOUT_S)

    def _answers(self) -> bool:
        try:
            return bool(self.ask([[1, 2, 3]], 1))
        except (ServerRefusedError, OSError):
            return False

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = True
    ) -> list[Timeline]:
        """One connection a prompt."""
        bodies = [self.body(prompt, max_tokens, ignore_eos) for prompt in prompts]
        return asyncio.run(stream_all(self.port, self.path, bodies, self.read_event))


@dataclass
class ChildPeer:
    """A library without a server: a child process of ours drives it and takes the times itself, without HTTP.

    Lines of JSON: it says {"ready": true}, then answers {"prompts", "max_tokens", "ignore_eos"} with
    {"times", "counts", "ids"}, one entry a prompt.
    """

    name: str
    process: ServerProcess
    is_started: bool = False

    def wait_ready(self) -> None:
        """Wait for its first line."""
        if not self.is_started:
            self._read()
            self.is_started = True

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = True
    ) -> list[Timeline]:
        """Send one line, read one line."""
        asked = {"prompts": prompts, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
        pipe = self.process.popen.stdin
        assert pipe is not None
        pipe.write(json.dumps(asked).encode() + b"\n")
        pipe.flush()
        told = self._read()
        rows = zip(told["times"], told["counts"], told["ids"], strict=True)
        return [
            Timeline(tuple(times), tuple(counts), tuple(token_ids))
            for times, counts, token_ids in rows
        ]

    def _read(self) -> Any:
        pipe = self.process.popen.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            self.process.popen.wait()
            self.process.check_alive()
        return json.loads(line)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers_health(port: int) -> bool:
    """Whether GET /health says 200."""
    return get_json(port, "/health") is not None


def get_json(port: int, path: str) -> Any:
    """The JSON at a path ({} where the body is empty), None unless the status is 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5.0) as response:
            return json.loads(response.read() or b"{}")
    except (urllib.error.URLError, OSError, ValueError):
        return None


def log_path(folder: Path, name: str) -> Path:
    """Where a server's log goes."""
    return folder / f"{name.replace(' ', '-').replace('/', '-')}.log"
