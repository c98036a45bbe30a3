"""Numbers with units, switches, lists."""

import pytest

from services.config import values


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5k", 1500),
        ("2m", 2_000_000),
        ("1M", 2**20),
    ],
)
def test_counts_follow_the_peers_rule(text: str, count: int) -> None:
    assert values.parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "-1", "1.2345k", "1x", "0.5"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"whole number"):
        values.parse_count(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5M", 5e6),
        ("5MB/s", 5e6),
        ("5mb", 5e6),
        ("0", 0),
        ("1.5G", 1.5e9),
        ("512Mi", 512 * 2**20),
        ("1GiB", 2**30),
    ],
)
def test_sizes_and_rates(text: str, size: float) -> None:
    assert values.parse_bytes(text) == size
    assert values.parse_rate(text) == size


@pytest.mark.parametrize("text", ["fast", "5X", "-5M", ""])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write bytes"):
        values.parse_rate(text)


def test_switches_lists_and_weights() -> None:
    assert [values.parse_switch(text) for text in ("true", "1", "On", "no")] == [True] * 3 + [False]
    with pytest.raises(ValueError, match="true or false"):
        values.parse_switch("maybe")
    assert values.parse_list("a, b,,c") == ("a", "b", "c")
    assert values.parse_weights('{"prefix": 2}') == {"prefix": 2.0}
    with pytest.raises(ValueError, match="JSON object"):
        values.parse_weights("[1]")
