"""`make bench-engine`: the engine beside transformers, then split beside mixed clusters."""

from __future__ import annotations

import argparse

from benchmarks.engine.in_process import limit_threads


def main() -> None:
    """Run both parts and write results/engine.json."""
    parser = argparse.ArgumentParser(prog="bench-engine")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    limit_threads(2)
    from benchmarks import report  # after the thread budget is set
    from benchmarks.engine import against_transformers, splitting
    from tests.support.oracle import demo_model_path

    engine = against_transformers.run(str(demo_model_path()), rounds)
    limit_threads(1)
    split = splitting.run(rounds)
    report.write("engine", {"against_transformers": engine, "splitting": split})


if __name__ == "__main__":
    main()
