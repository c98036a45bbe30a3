"""These tests need triton, whose interpreter tests/conftest.py has chosen."""

from collections.abc import Iterator

import pytest

from tests.support.poison import poisoned_memory

pytest.importorskip("triton", reason="needs the extra `triton`, which exists for Linux only")


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """What a launcher allocates holds NaN until its kernel writes it."""
    with poisoned_memory():
        yield
