"""An engine that is stopped while its front lives on is found: prompts move on, and in the end the worker ends."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from core.errors import EngineDeadError
from core.worker_info import Role
from services.worker.engine_watch import EngineWatch
from tests.support.fake_engine import expected_token
from tests.support.worker_calls import eventually, gateway, make_front, make_request


async def test_an_idle_engine_is_heard() -> None:
    async with make_front(engine_silence_ms=1000, engine_death_ms=1400) as front:
        running = asyncio.create_task(front.run())
        await asyncio.sleep(1.5)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.failure_edge("completion twice / late / never")
async def test_a_prompt_moves_on_from_a_stopped_engine(tmp_path: Path) -> None:
    log = tmp_path / "decode"
    async with (
        make_front("--silent-prefill", role=Role.PREFILL, engine_silence_ms=1000) as prefill,
        make_front("--log", str(log), role=Role.DECODE) as decode,
        gateway(decode) as end,
    ):
        assert prefill.engine_pid is not None
        await end.submit(make_request("r1", sampling={"max_tokens": 3}), (prefill.control_address,))
        await eventually(lambda: prefill._state.sessions.num_open == 1)
        os.kill(prefill.engine_pid, signal.SIGSTOP)
        try:
            assert (await end.ending("r1")).finish_reason == "length"
            assert end.tokens["r1", 0] == [expected_token((5, 6, 7), i) for i in range(3)]
            assert log.read_text().splitlines() == ["lost WorkerLostError"]
            await eventually(lambda: prefill._state.sessions.num_open == 0)
        finally:
            os.kill(prefill.engine_pid, signal.SIGCONT)
        await eventually(lambda: not prefill._watch.is_silent)


async def test_an_engine_that_stays_silent_ends_the_worker() -> None:
    async with make_front(engine_silence_ms=1000, engine_death_ms=1400) as front:
        running = asyncio.create_task(front.run())
        assert front.engine_pid is not None
        os.kill(front.engine_pid, signal.SIGSTOP)
        async with asyncio.timeout(5):
            with pytest.raises(EngineDeadError):
                await running


async def test_what_is_heard_in_time_is_not_silence() -> None:
    calls: list[str] = []
    watch = EngineWatch(100, 200, lambda: calls.append("silent"), lambda: calls.append("dead"))
    watching = asyncio.create_task(watch.run())
    for _ in range(8):
        await asyncio.sleep(0.04)
        watch.heard()
    assert calls == []
    await watching
    assert calls[0] == "silent"
    assert calls[-1] == "dead"
    assert calls.count("dead") == 1
