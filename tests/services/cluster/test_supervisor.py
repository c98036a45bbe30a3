"""How often a child is started again, and what it means when it is not."""

import asyncio

import pytest

from core.errors import ServeError
from services.cluster import supervisor
from services.cluster.process import describe_exit
from services.cluster.supervisor import GivenUp, Supervisor
from tests.support.worker_calls import eventually


class ScriptedProcess:
    """A process that ends at once, or when it is stopped."""

    pid = 0

    def __init__(self, status: int | None, lines: tuple[str, ...] = ()) -> None:
        self._ended = asyncio.Event()
        self._status = status
        self.last_lines = lines
        if status is not None:
            self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        return self._status or 0

    async def stop(self, seconds: float) -> None:
        self._ended.set()

    def kill_group(self) -> None:
        self._ended.set()


class ScriptedChild(Supervisor):
    """A child whose lives end as a list says; the last one lasts."""

    def __init__(self, *statuses: int, becomes_ready: bool = True) -> None:
        self.said: list[str] = []
        super().__init__("child", self.said.append, self.said.append)
        self.statuses = list(statuses)
        self.becomes_ready = becomes_ready
        self.num_starts = 0

    async def _start(self) -> ScriptedProcess:  # type: ignore[override]
        self.num_starts += 1
        if self.becomes_ready:
            self.mark_ready()
        status = self.statuses.pop(0) if self.statuses else None
        return ScriptedProcess(status, ("a line", "the last line", ""))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.004)


async def test_a_child_is_started_again_with_growing_pauses() -> None:
    child = ScriptedChild(-9, 3, 3)
    running = asyncio.create_task(child.run())
    await eventually(lambda: child.num_starts == 4)
    assert child.said == [
        "child died (SIGKILL); starting it again in 0.001 s",
        "child serves again",
        "child died (exit status 3); starting it again in 0.002 s",
        "child serves again",
        "child died (exit status 3); starting it again in 0.004 s",
        "child serves again",
    ]
    await child.stop(1.0)
    await running


async def test_too_many_deaths_in_a_row_are_the_end() -> None:
    child = ScriptedChild(*[3] * 100)
    with pytest.raises(GivenUp, match="child died 9 times in a row"):
        await child.run()
    assert child.num_starts == supervisor.MAX_DEATHS + 1


async def test_a_death_after_long_service_starts_the_count_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "STABLE_S", 0.0)
    child = ScriptedChild(*[3] * 20)
    running = asyncio.create_task(child.run())
    await eventually(lambda: child.num_starts == 21)
    await child.stop(1.0)
    await running


async def test_a_child_that_never_served_is_not_started_again() -> None:
    child = ScriptedChild(1, becomes_ready=False)
    with pytest.raises(ServeError, match=r"child did not start \(exit status 1\): the last line"):
        await child.run()
    assert child.num_starts == 1


def test_exits_in_words() -> None:
    assert describe_exit(3) == "exit status 3"
    assert describe_exit(-9) == "SIGKILL"
    assert describe_exit(-60) == "signal 60"
