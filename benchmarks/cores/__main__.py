"""`make bench-cores`: two workers on one machine share its cores through the ledger.

    alone        one engine, a thread for each core, no ledger
    one busy     the same work by one of two engines on a ledger; the other one is idle
    both busy    the same work split between the two

Predicted before the first run, on two cores:
- one busy, one idle: 0.99 of alone (goal 0.9). An idle worker counts nothing; what is left is a load a tile.
- both busy with prefill: their sum 1.03 of alone (goal 0.95). One thread an engine waits for nobody at the end of an
  operation, and one engine's Python overlaps with the other's kernels.
- both busy with one stream of decode each: their sum 1.4 of alone. Steps of one thread have no 210 meetings of two
  threads; the weights are read twice, and 100 MB fit the last cache of this machine.
- a thread that claims a core of a prefill waits 0.3 ms for it (median), 1.5 ms at worst: the rest of a tile. One that
  does not claim waits for a third of the time.
"""

from __future__ import annotations

import argparse

from benchmarks import report
from benchmarks.cores import measure


def main() -> None:
    """Run all and write results/cores.json."""
    parser = argparse.ArgumentParser(prog="bench-cores")
    parser.add_argument("--rounds", type=int, default=5)
    report.write("cores", measure.run(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
