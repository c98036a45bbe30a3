"""Marks reach whoever listens, while they listen."""

import pytest

from kernels import ops
from kernels.program import Progress, progress


def test_marks_reach_the_listener_of_the_running_step_only() -> None:
    heard: list[int] = []
    ops.mark(0)
    with progress.listening(heard.append):
        ops.mark(1)
        ops.mark(2)
    ops.mark(3)
    assert heard == [1, 2]


def test_a_step_without_listener_hears_nothing() -> None:
    own = Progress()
    with own.listening(None):
        own.mark(1)
    assert own.on_mark is None


def test_a_step_that_fails_leaves_no_listener() -> None:
    own = Progress()
    with pytest.raises(RuntimeError), own.listening(lambda layer: None):
        raise RuntimeError
    assert own.on_mark is None
