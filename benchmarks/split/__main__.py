"""`make bench-split`: the second token of a split request beside a mixed worker's, at default flags on the same cores.

    mixed          one worker that does both
    split          a prefill and a decode worker on this host: shared memory
    split, tcp     the same without shared memory
    split, slow    the same over a link so slow that the transfer alone takes half of the prefill's time

All clusters are up for the whole run and asked in turn; an idle worker takes no core.

Predicted before the first run, for prompts of 1,000 and 2,000 tokens:
- split / mixed, time to the second token: 1.06 and 1.04; a handover costs some 15 ms whatever the length.
- bytes not at D when the last kernel ends: 20% and 10% (a third of the layers of the last chunk); over the slow link
  30%.
- slow link: 0.75 of the transfer is hidden behind compute.
"""

from __future__ import annotations

import argparse

from benchmarks import report
from benchmarks.split import measure


def main() -> None:
    """Run all and write results/split.json."""
    parser = argparse.ArgumentParser(prog="bench-split")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker-args", default="", help="more arguments for every worker")
    parser.add_argument("--output", default="split", help="name of the file in benchmarks/results")
    arguments = parser.parse_args()
    figures = measure.run(arguments.rounds, arguments.worker_args.split())
    report.write(arguments.output, figures)


if __name__ == "__main__":
    main()
