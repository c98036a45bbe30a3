"""Random schedules of whole engines: deaths, aborts, stops, lost leases and every fault of a link.

`--schedules 10000` runs so many, `--first-schedule 4711 --schedules 1` the one that a failure names.
"""

from __future__ import annotations

from tests.support.simulation import run_schedule


def test_every_schedule_ends_right_and_at_rest(schedule: int) -> None:
    run_schedule(schedule)


def test_a_seed_is_a_history() -> None:
    histories = [run_schedule(seed) for seed in (3, 3, 4)]
    assert histories[0] == histories[1] != histories[2]
    assert len(histories[0]) > 20
