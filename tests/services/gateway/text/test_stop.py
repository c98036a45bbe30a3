"""Stop strings: which wins, where the text is cut, what is held back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.stop import StopBuffer, find_stop

TEXTS = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("text", "num_new", "stops", "expected"),
    [
        ("Hello world<stop>", 6, ["<stop>"], ("<stop>", 11)),
        ("Hello world", 5, ["goodbye"], None),
        ("one two", 3, ["one"], None),  # completed before the new characters
        ("one two", 3, ["e t"], ("e t", 2)),  # begins before them, completes in them
        ("abcdef", 6, ["def", "bc"], ("bc", 1)),  # completes first, though listed last
        ("abcd", 4, ["abcd", "bc"], ("bc", 1)),  # begins later, completes first
        ("abc", 3, ["c", "bc"], ("c", 2)),  # both complete at once: the one listed first
        ("ab", 2, [], None),
    ],
)
def test_earliest_completing_stop_wins(text, num_new, stops, expected):
    assert find_stop(text, num_new, stops) == expected


def test_included_stop_stays():
    assert find_stop("one<stop>tail", 10, ["<stop>"], include=True) == ("<stop>", 9)


def test_holds_back_what_could_begin_a_stop():
    buffer = StopBuffer(["wxyz"], include=False)
    assert buffer.push("abcdef") == ("abc", None)
    assert buffer.push("gw") == ("de", None)
    assert buffer.push("xyz!") == ("fg", "wxyz")


def test_included_stop_holds_nothing_back():
    buffer = StopBuffer(["wxyz"], include=True)
    assert buffer.push("abw") == ("abw", None)
    assert buffer.push("xyz!") == ("xyz", "wxyz")


def test_text_before_min_tokens_is_not_searched_but_may_begin_a_stop():
    buffer = StopBuffer(["bc"], include=False)
    assert buffer.push("abc", searched=False)[1] is None
    assert buffer.push("b", searched=False)[1] is None
    assert buffer.push("cd")[1] == "bc"


def _whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule over the whole text: the first position at which some stop is complete."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(TEXTS, STOPS, st.lists(st.integers(1, 5), max_size=40))
def test_any_cut_into_deltas_gives_the_whole_texts_answer(text, stops, sizes):
    buffer, given_out, found, at = StopBuffer(stops, include=False), "", None, 0
    for size in [*sizes, len(text)]:
        delta, at = text[at : at + size], at + size
        out, found = buffer.push(delta)
        given_out += out
        if found is not None:
            break
    else:
        given_out += buffer.finish()
    assert (given_out, found) == _whole(text, stops)


@given(TEXTS, STOPS)
def test_no_part_of_a_stop_is_ever_given_out_early(text, stops):
    """What is out before the end is a prefix of the final text."""
    expected, _ = _whole(text, stops)
    buffer, given_out = StopBuffer(stops, include=False), ""
    for character in text:
        out, found = buffer.push(character)
        given_out += out
        assert expected.startswith(given_out)
        if found is not None:
            return
