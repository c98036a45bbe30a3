"""These tests need triton, and choose its interpreter before anything of it is imported."""

from collections.abc import Iterator

import pytest

import tests.support.triton_device  # noqa: F401  first: it chooses the interpreter
from tests.support.poison import poisoned_memory

pytest.importorskip("triton", reason="needs the extra `triton`, which exists for Linux only")


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """What a launcher allocates holds NaN until its kernel writes it."""
    with poisoned_memory():
        yield
