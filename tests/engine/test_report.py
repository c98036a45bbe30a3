"""What an engine tells while there is nothing to tell."""

from __future__ import annotations

from itertools import pairwise

import pytest

from core.errors import ConfigError
from engine.config import EngineConfig
from engine.core import _IDLE_WAIT_S
from services.worker.config import LEAST_SILENCE_MS, WorkerConfig
from tests.support.engines import EngineHarness
from tests.support.simulation import simulated_clock


def test_an_idle_engine_speaks_well_within_any_limit_that_its_front_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a front with a short limit would end the sessions of an engine that only waits."""
    with simulated_clock() as clock:
        engine = EngineHarness(is_ledger=True)
        told_at_ms: list[float] = []
        monkeypatch.setattr(engine.core, "_send", lambda _: told_at_ms.append(clock.now_ms))
        for _ in range(40):
            clock.now_ms += _IDLE_WAIT_S * 1000
            engine.core.turn()
        engine.close()
    gaps = [b - a for a, b in pairwise(told_at_ms)]
    assert len(gaps) >= 10
    assert max(gaps) <= LEAST_SILENCE_MS * 3 / 4


def test_a_limit_that_a_live_engine_could_exceed_is_refused() -> None:
    engine = EngineConfig(model="tiny")
    assert WorkerConfig(engine, engine_silence_ms=LEAST_SILENCE_MS)
    with pytest.raises(ConfigError, match="engine-silence-ms: 999"):
        WorkerConfig(engine, engine_silence_ms=999)
