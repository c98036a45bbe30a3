"""What the gateway may freeze into a Request, field by field: an error names field, value and limit."""

import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequest
from core.ids import RequestId
from core.request import Request, SamplingParams


def make_request(**changes):
    values = {
        "id": RequestId("r-1"),
        "model": "demo",
        "prompt_token_ids": (1, 2, 3),
        "sampling": SamplingParams(seed=7),
    }
    return Request(**(values | changes))


ACCEPTED = {
    "seed": [0, 2**64 - 1],
    "n": [1, 128],
    "temperature": [0.0, 2.0],
    "top_k": [0, 1, 2**32 - 1],
    "top_p": [1e-9, 1.0],
    "min_p": [0.0, 1.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "repetition_penalty": [1e-6, 10.0],
    "max_tokens": [1, 2**32 - 1],
    "min_tokens": [0, 16],
    "stop_token_ids": [(), (0, 2**32 - 1)],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 20],
    "logit_bias": [(), ((0, -100.0), (5, 100.0))],
}
REFUSED = {
    "seed": [-1, 2**64],
    "n": [0, -1, 129],
    "temperature": [-0.1, 2.1, math.nan, math.inf],
    "top_k": [-1, 2**32],
    "top_p": [0.0, -0.5, 1.1, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "repetition_penalty": [0.0, -1.0, 1e-38, 1e7, math.inf, math.nan],
    "max_tokens": [0, -1, 2**32],
    "min_tokens": [-1, 17],  # max_tokens is 16
    "stop_token_ids": [(-1,), (2**32,)],
    "logprobs": [-1, 21],
    "logit_bias": [((-1, 0.0),), ((2**32, 0.0),), ((1, 100.5),), ((1, -101.0),), ((1, math.nan),)],
}


def cases(table):
    return [
        pytest.param(name, value, id=f"{name}={value}") for name in table for value in table[name]
    ]


def offending(value):
    """The one bad number: of a pair, the one that is no token id or no bias."""
    if not isinstance(value, tuple):
        return value
    (entry,) = value
    if not isinstance(entry, tuple):
        return entry
    token_id, bias = entry
    return bias if 0 <= token_id < 2**32 else token_id


def test_the_tables_cover_every_field():
    names = {field.name for field in fields(SamplingParams)}
    assert set(ACCEPTED) == names
    assert set(REFUSED) == names - {"ignore_eos"}


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_limits_themselves_are_accepted(name, value):
    assert getattr(SamplingParams(**({"seed": 1} | {name: value})), name) == value


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_beyond_a_limit_the_error_names_field_and_value(name, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**({"seed": 1} | {name: value}))
    assert caught.value.param == name
    assert name in caught.value.message
    assert f"got {offending(value)}" in caught.value.message


def test_the_seed_has_no_default():
    with pytest.raises(TypeError, match="seed"):
        SamplingParams()


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-9, False), (1.0, False)])
def test_greedy_is_temperature_zero(temperature, greedy):
    assert SamplingParams(seed=1, temperature=temperature).is_greedy is greedy


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"prompt_token_ids": ()}, "prompt", "prompt must hold at least one token"),
        ({"prompt_token_ids": (1, -1)}, "prompt", "got -1"),
        ({"prompt_token_ids": (1, 2**32)}, "prompt", "got 4294967296"),
        ({"deadline_ms": -1}, "deadline_ms", "got -1"),
        ({"deadline_ms": 2**63}, "deadline_ms", "deadline_ms must be in"),
        ({"priority": 2**31}, "priority", "got 2147483648"),
        ({"priority": -(2**31) - 1}, "priority", "priority must be in"),
        ({"cache_salt": "a\ud800"}, "cache_salt", "cache_salt must be valid Unicode"),
    ],
)
def test_a_bad_request_names_its_field(changes, param, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        make_request(**changes)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": (0,)},
        {"prompt_token_ids": (2**32 - 1,)},
        {"deadline_ms": 0},
        {"priority": -(2**31)},
        {"cache_salt": "Mandant \u00fc \U0001f600"},
    ],
)
def test_the_edges_of_a_request_are_accepted(changes):
    request = make_request(**changes)
    assert all(getattr(request, name) == value for name, value in changes.items())


@given(st.text())
def test_an_accepted_salt_has_bytes(salt):
    assert make_request(cache_salt=salt).cache_salt.encode().decode() == salt


def test_the_trace_is_no_part_of_the_request():
    assert make_request(trace_parent="00-1-2-01") == make_request()


def test_a_request_is_frozen_and_hashable():
    request = make_request()
    with pytest.raises(AttributeError):
        request.model = "other"
    assert hash(request) == hash(make_request())
