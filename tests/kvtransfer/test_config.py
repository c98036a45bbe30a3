"""Values that cannot be used are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import ConfigError
from kvtransfer.config import TransferConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_name", "x" * 300),
        ("link_rate_bytes_s", -1),
        ("max_connect_failures", 0),
        ("connect_timeout_s", 0),
        ("reconnect_delay_s", -0.1),
        ("data_host", "0.0.0.0"),
        ("data_host", "::"),
    ],
)
def test_bad_values_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        TransferConfig(**{field: value})
    assert str(value)[:20] in caught.value.message
