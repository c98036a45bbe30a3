"""The demo model with its blocks kept, on the host kernels, beside its dequantised weights in float32.

Inputs are rounded to 16 bits, K, V and 4-bit blocks to whole numbers, as in a worker's default: what that may cost
is said here.
"""

from __future__ import annotations

from functools import cache

from kernels import reference
from kernels.cpu.backend import HostBackend
from tests.support.accuracy import SIMPLE_ANSWER, SIMPLE_QUESTION, DemoModel, Measure

NUM_PIECES = 4
EXACT_PERPLEXITY = 131.3  # verse without punctuation; transformers' own on these weights
PERPLEXITY_TOLERANCE = 0.005
LEAST_EQUAL_ARGMAX = 0.99
LARGEST_DIVERGENCE_NATS = 1e-4


@cache
def kept_blocks() -> DemoModel:
    return DemoModel(HostBackend(2), "quantized", "float16")


def test_a_text_is_as_probable_as_in_full_precision() -> None:
    measure = Measure(DemoModel(reference, "expanded"), NUM_PIECES)
    own = measure.of(kept_blocks())
    assert measure.exact.divergence == 0.0
    assert abs(measure.exact.perplexity / EXACT_PERPLEXITY - 1) < 0.001
    assert abs(own.perplexity / measure.exact.perplexity - 1) < PERPLEXITY_TOLERANCE, own
    assert own.equal_argmax >= LEAST_EQUAL_ARGMAX, own
    assert 0.0 < own.divergence < LARGEST_DIVERGENCE_NATS, own


def test_a_simple_question_is_answered() -> None:
    assert SIMPLE_ANSWER in kept_blocks().answer(SIMPLE_QUESTION, max_tokens=24)
