"""`make bench-tiers`: the first token of a 2,000-token prompt whose KV lies in the pool, in the host tier, on disk.

    device     everything but the last block is in the pool
    host       the pool has lost it, the host tier has it
    disk       only the disk tier has it, and no byte of it is in the page cache
    computed   nobody has it
    slow       the host tier has it and gives it back four times slower than computing takes
    slow, new  the same, before the worker knows how slow the tier is

Beside them, in the same run: the same bytes copied from memory to memory by one thread, and read from a plain file.

Goals: host within 1.15 times device + bytes / half of memcpy; disk within device + bytes / half of the file's speed;
slow within 1.1 times computed.

Predicted before the first run: host 10 ms over device (46 MB copied and digested, both at 9 GB/s), 1.0 of what the
goal allows; disk 40 ms over device; slow 1.0 and slow, new 1.05 of computed.
"""

from __future__ import annotations

import argparse

from benchmarks import report
from benchmarks.engine.in_process import limit_threads


def main() -> None:
    """Run all and write results/tiers.json."""
    parser = argparse.ArgumentParser(prog="bench-tiers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", default="tiers", help="name of the file in benchmarks/results")
    arguments = parser.parse_args()
    limit_threads(arguments.threads)
    from benchmarks.tiers import measure  # brings torch, whose threads are limited by now

    report.write(
        arguments.output, measure.run(arguments.rounds, arguments.tokens, arguments.threads)
    )


if __name__ == "__main__":
    main()
