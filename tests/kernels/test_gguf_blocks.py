"""Every block format against the `gguf` package's own dequantiser, on random bytes."""

import gguf
import numpy as np
import pytest
import torch

from kernels.gguf_formats import FORMAT_BY_NAME, FORMATS, BlockFormat
from kernels.reference.gguf_blocks import dequantize

_HALF_OFFSETS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}


def random_rows(block_format: BlockFormat, num_rows: int, blocks_a_row: int) -> np.ndarray:
    """Random blocks whose float16 fields are finite."""
    generator = np.random.default_rng(7)
    if block_format.block_elements == 1:
        values = generator.standard_normal((num_rows, 64 * blocks_a_row)).astype(np.float32)
        if block_format.name == "F16":
            return values.astype(np.float16).view(np.uint8)
        return values.view(np.uint8) if block_format.name == "F32" else bfloat16_bytes(values)
    shape = (num_rows * blocks_a_row, block_format.block_bytes)
    blocks = generator.integers(0, 256, shape, dtype=np.uint8)
    has_minimum = block_format.name in ("Q4_1", "Q5_1")
    for offset in _HALF_OFFSETS.get(block_format.name, (0, 2) if has_minimum else (0,)):
        halves = generator.standard_normal((shape[0], 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def bfloat16_bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.view(np.uint16).reshape(*values.shape, 2)[..., 1]).view(
        np.uint8
    )


@pytest.mark.parametrize("block_format", FORMATS, ids=lambda f: f.name)
def test_equals_the_gguf_package(block_format: BlockFormat) -> None:
    raw = random_rows(block_format, num_rows=5, blocks_a_row=3)
    kind = gguf.GGMLQuantizationType(block_format.type_id)
    expected = torch.from_numpy(gguf.dequantize(raw, kind).astype(np.float32))
    actual = dequantize(torch.from_numpy(raw), block_format, torch.float32)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("block_format", FORMATS, ids=lambda f: f.name)
def test_table_equals_the_gguf_package(block_format: BlockFormat) -> None:
    kind = gguf.GGMLQuantizationType(block_format.type_id)
    assert kind.name == block_format.name
    assert gguf.GGML_QUANT_SIZES[kind] == (block_format.block_elements, block_format.block_bytes)


def test_rows_are_decoded_independently_of_chunking() -> None:
    block_format = FORMAT_BY_NAME["Q4_1"]
    raw = torch.from_numpy(random_rows(block_format, num_rows=4100, blocks_a_row=1))
    whole = dequantize(raw, block_format, torch.float32)
    assert torch.equal(whole[2047:2050], dequantize(raw[2047:2050], block_format, torch.float32))


def test_converts_to_the_asked_dtype() -> None:
    block_format = FORMAT_BY_NAME["Q8_0"]
    raw = torch.from_numpy(random_rows(block_format, num_rows=2, blocks_a_row=2))
    exact = dequantize(raw, block_format, torch.float32)
    assert torch.equal(dequantize(raw, block_format, torch.bfloat16), exact.bfloat16())
