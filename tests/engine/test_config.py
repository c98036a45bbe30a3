"""What an engine is told about its KV: names that are accepted, the one name that follows from them."""

import pytest

from core.errors import ConfigError
from core.kv_layout import KV_DTYPES
from engine.config import EngineConfig


@pytest.mark.parametrize("name", KV_DTYPES)
def test_every_kv_dtype_may_be_asked_for_by_its_name(name: str) -> None:
    assert EngineConfig("m", kv_cache_dtype=name).kv_dtype == name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_auto_is_the_type_of_activations(dtype: str) -> None:
    assert EngineConfig("m", dtype=dtype).kv_dtype == dtype


def test_fp8_is_the_format_with_more_mantissa() -> None:
    assert EngineConfig("m", kv_cache_dtype="fp8").kv_dtype == "fp8_e4m3"


@pytest.mark.parametrize("name", ["int8", "fp8_e3m4", "plain", ""])
def test_an_unknown_kv_dtype_is_answered_with_those_that_exist(name: str) -> None:
    known = ", ".join(["auto", *KV_DTYPES, "fp8"])
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype: '{name}' is unknown; known: {known}"):
        EngineConfig("m", kv_cache_dtype=name)


def test_an_unknown_device_is_answered_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="--device: 'cuda:1' is unknown; known: auto, cpu, cuda"):
        EngineConfig("m", device="cuda:1")


def test_activations_are_not_quantised() -> None:
    with pytest.raises(ConfigError, match="--dtype: 'fp8_e4m3' is unknown"):
        EngineConfig("m", dtype="fp8_e4m3")
