"""What the launcher says on the terminal: progress, the address, what went wrong. Quiet about
everything else.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from core.errors import ServeError

QUESTION = "What is the capital of France?"
_WILDCARDS = ("0.0.0.0", "::", "")


class ServingWorker(Protocol):
    """What is shown of a worker."""

    name: str
    control_address: str
    metrics_port: int
    models: list[str]


class Words:
    """One launcher's voice. verbose: whether log lines of children are shown, each with its
    process's name.
    """

    def __init__(self, *, verbose: bool = False, file: TextIO | None = None) -> None:
        self._verbose = verbose
        self._file = file or sys.stdout

    def say(self, text: str) -> None:
        """One line."""
        print(f"baton: {text}", file=self._file, flush=True)

    def log_of(self, name: str) -> Callable[[str], None]:
        """What shows the log lines of a child."""

        def show(line: str) -> None:
            if self._verbose:
                print(f"{name} | {line}", file=self._file, flush=True)

        return show

    def serving(
        self,
        host: str,
        port: int,
        workers: Sequence[ServingWorker],
        seconds: float,
        *,
        has_api_key: bool,
    ) -> None:
        """The cluster is up: where it is, how to try it, how to stop it."""
        url = f"http://{'localhost' if host in _WILDCARDS else host}:{port}"
        model = workers[0].models[0]
        for worker in workers:
            metrics = f"http://127.0.0.1:{worker.metrics_port}/metrics"
            self.say(f"{worker.name}: {worker.control_address}, metrics at {metrics}")
        self._file.write(
            f"\nBaton serves {model} at {url} (up in {seconds:.1f} s). Try it:\n\n"
            f"{curl_line(url, model, has_api_key=has_api_key)}\n\n"
            f"Chat in another terminal: {_baton()} chat --url {url}\n"
            "Stop it with Ctrl-C.\n"
        )
        self._file.flush()

    def refuse(self, error: ServeError) -> None:
        """Why there is no cluster (any more), in one sentence."""
        print(f"baton: {error.message}", file=sys.stderr, flush=True)


def curl_line(url: str, model: str, *, has_api_key: bool) -> str:
    """A command that asks the cluster a question."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 64,
    }
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if has_api_key else ""
    return (
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"    -d {shlex.quote(json.dumps(body))}"
    )


def _baton() -> str:
    """How this shell calls the command: by name where that finds it, else by its place beside Python."""
    if shutil.which("baton"):
        return "baton"
    return os.path.relpath(Path(sys.executable).parent / "baton")
