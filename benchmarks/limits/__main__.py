"""`make bench-limits`: what the machine can do at most, into results/limits.json."""

from __future__ import annotations

import argparse

from benchmarks import report
from benchmarks.limits import measure


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="bench-limits")
    parser.add_argument("--repeats", type=int, default=5, help="times each limit is measured")
    report.write("limits", {"limits": measure.run(parser.parse_args().repeats)})


if __name__ == "__main__":
    main()
