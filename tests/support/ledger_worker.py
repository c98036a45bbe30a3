"""One worker on a core ledger, in a process of its own, told what to do line by line.

python -m tests.support.ledger_worker FILE CORES THREADS

claim, release, grant    as `kernels.cpu.ledger.CoreLedger`
hold                     claims again and again
run SECONDS              runs products on a team; answers processor seconds of the main and of the other threads
bits                     runs one product again and again for a while; answers the digests of its results
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from kernels.cpu.ledger import CoreLedger

ROWS, WIDTH = 64, 256
BITS_SECONDS = 1.0


class LedgerWorker:
    """The process as its parent sees it. Ends with `end`, or when the parent does."""

    def __init__(self, path: Path, cores: int = 2, threads: int = 2) -> None:
        command = [sys.executable, "-m", "tests.support.ledger_worker", path, cores, threads]
        self.process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "open"

    def tell(self, words: str) -> None:
        """Let it begin something."""
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def ask(self, words: str = "") -> str:
        """Let it do something, or end what was begun, and hear the answer."""
        if words:
            self.tell(words)
        return self._answer()

    @property
    def grant(self) -> int:
        """Cores that the ledger gives it."""
        return int(self.ask("grant"))

    def end(self) -> None:
        """Kill it, whatever it does."""
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def _thread_seconds() -> tuple[float, float]:
    """Processor seconds of the main thread, and of all the others."""
    main = others = 0.0
    for task in Path("/proc/self/task").iterdir():
        seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        if task.name == Path("/proc/self").readlink().name:
            main += seconds
        else:
            others += seconds
    return main, others


def _product(ledger: CoreLedger, threads: int) -> Any:
    import torch

    from kernels.cpu.backend import HostBackend
    from kernels.weights import DenseWeight

    torch.set_num_threads(1)
    backend = HostBackend(threads, "", ledger)
    generator = torch.Generator().manual_seed(1)
    weight = backend.pack(DenseWeight(torch.randn(1024, WIDTH, generator=generator)))
    rows = torch.randn(ROWS, WIDTH, generator=generator)
    return lambda: backend.linear(rows, weight)


def _run(product: Any, seconds: float) -> str:
    before, end = _thread_seconds(), time.monotonic() + seconds
    while time.monotonic() < end:
        product()
    after = _thread_seconds()
    return f"{after[0] - before[0]} {after[1] - before[1]}"


def _bits(product: Any) -> str:
    digests, end = set(), time.monotonic() + BITS_SECONDS
    while time.monotonic() < end:
        digests.add(hashlib.sha256(product().numpy().tobytes()).hexdigest())
    return " ".join(sorted(digests))


def _keep_claiming(ledger: CoreLedger) -> None:
    while True:
        ledger.claim()
        time.sleep(0.001)


def main(path: str, cores: str, threads: str) -> None:
    """Obey until the input ends."""
    ledger = CoreLedger(Path(path), int(threads), int(cores))
    product = None
    print("open", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["grant"]:
                answer = str(ledger.grant)
            case ["hold"]:
                ledger.claim()
                threading.Thread(target=_keep_claiming, args=(ledger,), daemon=True).start()
                answer = "held"
            case ["run", seconds]:
                product = product or _product(ledger, int(threads))
                answer = _run(product, float(seconds))
            case ["bits"]:
                product = product or _product(ledger, int(threads))
                answer = _bits(product)
            case [call]:
                getattr(ledger, call)()
                answer = call
            case _:
                answer = "unknown"
        print(answer, flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ConfigError as error:
        print(error.message, flush=True)
        sys.exit(1)
