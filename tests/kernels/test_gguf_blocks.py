"""Every block format against the `gguf` package's own dequantiser, on random bytes."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gguf_formats import FORMAT_BY_NAME, FORMATS, BlockFormat
from kernels.reference.gguf_blocks import dequantize
from tests.support.poison import poisoned_memory
from tests.support.random_weights import QUANTIZED_FORMATS, random_bytes


def expected_values(raw: np.ndarray, block_format: BlockFormat) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType(block_format.type_id)
    return torch.from_numpy(gguf.dequantize(raw, kind).astype(np.float32))


@pytest.mark.parametrize("block_format", FORMATS, ids=lambda f: f.name)
@given(num_rows=st.integers(1, 6), blocks_a_row=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_equals_the_gguf_package_to_the_bit(
    block_format: BlockFormat, num_rows: int, blocks_a_row: int, seed: int
) -> None:
    raw = random_bytes(block_format, num_rows, blocks_a_row, seed)
    with poisoned_memory():
        actual = dequantize(torch.from_numpy(raw), block_format, torch.float32)
    assert torch.equal(actual, expected_values(raw, block_format))


@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
@pytest.mark.parametrize("half", [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF])
def test_scales_at_the_edges_of_float16(name: str, half: int) -> None:
    """Zeros of both signs, subnormals, the largest: in every float16 field of a block at once."""
    block_format = FORMAT_BY_NAME[name]
    raw = random_bytes(block_format, 2, 1)
    ordinary = raw.copy()
    field = np.array([half], dtype=np.uint16).view(np.uint8)
    for offset in half_offsets(block_format):
        raw[:, offset : offset + 2] = field
    assert not np.array_equal(raw, ordinary)
    actual = dequantize(torch.from_numpy(raw), block_format, torch.float32)
    assert torch.equal(actual, expected_values(raw, block_format))


def half_offsets(block_format: BlockFormat) -> list[int]:
    """Where a block's scale (and minimum) lie: at its end in three K formats, at its start elsewhere."""
    last = block_format.block_bytes - 2
    return {"Q2_K": [last - 2, last], "Q3_K": [last], "Q6_K": [last]}.get(
        block_format.name, [0, 2] if block_format.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]
    )


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_gguf_package_quantises_reads_back_close(name: str) -> None:
    """Real blocks of real numbers: the layout is understood end to end, not only byte by byte."""
    values = np.random.default_rng(3).standard_normal((8, 96)).astype(np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    actual = dequantize(torch.from_numpy(raw), FORMAT_BY_NAME[name], torch.float32).numpy()
    steps = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127}[name]
    spread = np.abs(values).max() * (2 if name.endswith("_1") else 1)
    assert np.abs(actual - values).max() < spread / steps


@pytest.mark.parametrize("block_format", FORMATS, ids=lambda f: f.name)
def test_table_equals_the_gguf_package(block_format: BlockFormat) -> None:
    kind = gguf.GGMLQuantizationType(block_format.type_id)
    assert kind.name == block_format.name
    assert gguf.GGML_QUANT_SIZES[kind] == (block_format.block_elements, block_format.block_bytes)


def test_the_formats_that_are_served() -> None:
    assert (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    ) == QUANTIZED_FORMATS


def test_rows_are_decoded_independently_of_chunking() -> None:
    block_format = FORMAT_BY_NAME["Q4_1"]
    raw = torch.from_numpy(random_bytes(block_format, num_rows=4100, blocks_a_row=1))
    whole = dequantize(raw, block_format, torch.float32)
    assert torch.equal(whole[2047:2050], dequantize(raw[2047:2050], block_format, torch.float32))


def test_converts_to_the_asked_dtype() -> None:
    block_format = FORMAT_BY_NAME["Q8_0"]
    raw = torch.from_numpy(random_bytes(block_format, num_rows=2, blocks_a_row=2))
    exact = dequantize(raw, block_format, torch.float32)
    assert torch.equal(dequantize(raw, block_format, torch.bfloat16), exact.bfloat16())
