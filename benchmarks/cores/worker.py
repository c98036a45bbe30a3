"""One engine in a process of its own, told what to run by its parent, line by line.

python -m benchmarks.cores.worker LEDGER    `none`, or a file

prefill COUNT TOKENS    as many prompts; answers when all have their first token
decode TOKENS           one stream
read MIB TIMES          sums memory that no other work needs
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

from benchmarks.engine.in_process import limit_threads

DECODE_PROMPT = 32
VOCAB = 49_000


class Worker:
    """The process as its parent sees it."""

    def __init__(self, ledger: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cores.worker", ledger],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def tell(self, words: str) -> None:
        """Let it begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        """Until it has done what it was told."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise SystemExit("a worker of the benchmark has ended")

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def main(ledger: str) -> None:
    """Obey until the input ends."""
    limit_threads(1)
    import numpy

    from benchmarks.engine.in_process import InProcessEngine
    from tests.support.oracle import demo_model_path

    threads = len(os.sched_getaffinity(0))
    engine = InProcessEngine(str(demo_model_path()), threads, ledger)
    chance = random.Random(1)

    def prompt(length: int) -> list[int]:
        return [chance.randrange(100, VOCAB) for _ in range(length)]

    memory = numpy.ones(0, dtype=numpy.float32)
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["prefill", count, tokens]:
                engine.generate([prompt(int(tokens)) for _ in range(int(count))], 1)
            case ["decode", tokens]:
                engine.generate([prompt(DECODE_PROMPT)], int(tokens))
            case ["read", mib, times]:
                if memory.nbytes != int(mib) << 20:
                    memory = numpy.ones(int(mib) << 18, dtype=numpy.float32)
                for _ in range(int(times)):
                    float(memory @ memory)
        print("done", flush=True)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1])
