"""GGUF blocks for use inside kernels: an element's quant, and the scale and offset that make it a number.

`element = quant * scale + least`, two roundings in float32, which is what `kernels.reference.gguf_blocks` computes:
bit for bit, where products and sums are not fused. `block` points at the first byte of an element's block, `index` is
the element's place in it; both broadcast. Formats travel as the constexpr FORMAT, by their GGUF names.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _half(block, offset: tl.constexpr):
    """The float16 at a byte offset of each block, as float32."""
    pointer = (block + offset).to(tl.pointer_type(tl.float16), bitcast=True)
    return tl.load(pointer).to(tl.float32)


@triton.jit
def _byte(block, offset):
    """The byte at an offset of each block, as int32."""
    return tl.load(block + offset).to(tl.int32)


@triton.jit
def _signed_byte(block, offset):
    """The same of a signed byte."""
    return tl.load((block + offset).to(tl.pointer_type(tl.int8), bitcast=True)).to(tl.int32)


@triton.jit
def _bits(block, first: tl.constexpr, index):
    """Bit `index` of a string of bits, least significant first."""
    return (_byte(block, first + index // 8) >> (index % 8)) & 1


@triton.jit
def _plane_bits(block, first: tl.constexpr, index):
    """Two bits of element `index`: groups of 32 bytes, each four planes of 32 elements."""
    byte = _byte(block, first + index // 128 * 32 + index % 32)
    return (byte >> (index % 128 // 32 * 2)) & 3


@triton.jit
def _run_nibble(block, first: tl.constexpr, index, RUN: tl.constexpr):
    """Four bits of element `index`: runs of RUN bytes, the low halves of a run, then its high halves."""
    byte = _byte(block, first + index // (2 * RUN) * RUN + index % RUN)
    return (byte >> (index % (2 * RUN) // RUN * 4)) & 15


@triton.jit
def _six_bits(block, index):
    """Scale and least of run `index // 32`, six bits each, packed in the 12 bytes from the fourth on."""
    run = index // 32
    low_scale, low_least = _byte(block, 4 + run % 4), _byte(block, 8 + run % 4)
    rest = _byte(block, 12 + run % 4)
    is_early = run < 4
    scale = tl.where(is_early, low_scale & 63, (rest & 15) | ((low_scale >> 2) & 48))
    least = tl.where(is_early, low_least & 63, (rest >> 4) | ((low_least >> 2) & 48))
    return scale, least


@triton.jit
def _q3_scale(block, index):
    """The six-bit scale of run `index // 16`, as it stands for -32..31."""
    run = index // 16
    low = (_byte(block, 96 + run % 8) >> (run // 8 * 4)) & 15
    high = (_byte(block, 104 + run % 4) >> (run // 4 * 2)) & 3
    return (low | (high << 4)) - 32


@triton.jit
def quant(block, index, FORMAT: tl.constexpr):
    """The whole number that stands for element `index`: int32."""
    if FORMAT == "Q4_0":
        result = _run_nibble(block, 2, index, 16) - 8
    elif FORMAT == "Q4_1":
        result = _run_nibble(block, 4, index, 16)
    elif FORMAT == "Q5_0":
        result = (_run_nibble(block, 6, index, 16) | (_bits(block, 2, index) << 4)) - 16
    elif FORMAT == "Q5_1":
        result = _run_nibble(block, 8, index, 16) | (_bits(block, 4, index) << 4)
    elif FORMAT == "Q8_0":
        result = _signed_byte(block, 2 + index)
    elif FORMAT == "Q2_K":
        result = _plane_bits(block, 16, index)
    elif FORMAT == "Q3_K":
        missing = ((_byte(block, index % 32) >> (index // 32)) & 1) ^ 1
        result = _plane_bits(block, 32, index) - 4 * missing
    elif FORMAT == "Q4_K":
        result = _run_nibble(block, 16, index, 32)
    elif FORMAT == "Q5_K":
        high = (_byte(block, 16 + index % 32) >> (index // 32)) & 1
        result = _run_nibble(block, 48, index, 32) | (high << 4)
    else:
        tl.static_assert(FORMAT == "Q6_K", "unknown block format")
        high = _plane_bits(block, 128, index)
        result = (_run_nibble(block, 0, index, 64) | (high << 4)) - 32
    return result


@triton.jit
def scale_and_least(block, index, FORMAT: tl.constexpr):
    """What element `index` is multiplied by, and what is then added: float32, the second 0 in many formats."""
    if FORMAT == "Q4_1" or FORMAT == "Q5_1":
        scale, least = _half(block, 0), _half(block, 2)
    elif FORMAT == "Q2_K":
        both = _byte(block, index // 16)
        scale = _half(block, 80) * (both & 15).to(tl.float32)
        least = -(_half(block, 82) * (both >> 4).to(tl.float32))
    elif FORMAT == "Q3_K":
        scale = _half(block, 108) * _q3_scale(block, index).to(tl.float32)
        least = tl.zeros_like(scale)
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        quant_scale, quant_least = _six_bits(block, index)
        scale = _half(block, 0) * quant_scale.to(tl.float32)
        least = -(_half(block, 2) * quant_least.to(tl.float32))
    elif FORMAT == "Q6_K":
        scale = _half(block, 208) * _signed_byte(block, 192 + index // 16).to(tl.float32)
        least = tl.zeros_like(scale)
    else:
        scale = _half(block, 0)
        least = tl.zeros_like(scale)
    return scale, least
