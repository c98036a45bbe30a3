"""Equal bits of logits: whoever else is in a step, however a prompt is cut, on one thread and on two.

The demo model, with its weights kept in blocks and expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from core.kv_layout import KVLayout
from engine.kvcache.storage import allocate_pool
from engine.loading.load import load_model
from engine.loading.sources import resolve_source
from engine.runner.forward_batch import BatchItem, build_batch
from engine.runner.model_runner import ModelRunner
from kernels import ops
from kernels.cpu.backend import HostBackend
from kernels.cpu.team import variants
from tests.support.host_kernels import assert_same_bits
from tests.support.oracle import demo_model_path

BLOCK_SIZE, NUM_BLOCKS = 16, 400
LENGTH = 150  # more than a thread takes through joined operations at once


def tokens(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 49_000, (length,), generator=generator).tolist()


PROMPT = tokens(0, LENGTH)


class Run:
    """One runner over a pool of its own; sequences take blocks from the front."""

    def __init__(self, backend: HostBackend, weight_format: str, kv_dtype: str = "float32") -> None:
        ops.use_backend(backend)
        loaded = load_model(resolve_source(str(demo_model_path())), "float32", weight_format)
        layout = KVLayout(BLOCK_SIZE, loaded.config.kv_groups(kv_dtype))
        self._runner = ModelRunner(loaded.model, layout, allocate_pool(layout, NUM_BLOCKS))
        self._next_block = 1

    def blocks(self, length: int) -> list[int]:
        first, count = self._next_block, -(-length // BLOCK_SIZE)
        self._next_block += count
        assert self._next_block <= NUM_BLOCKS
        return list(range(first, first + count))

    def step(self, items: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> Tensor:
        """Logits of the last token of each (tokens, start, blocks)."""
        batch = build_batch([BatchItem(*item, True) for item in items], BLOCK_SIZE)
        return self._runner.forward(batch).clone()

    def over_another(self) -> Tensor:
        """Last logits of PROMPT from its 40th token on, behind blocks of one that begins alike; the last is a copy."""
        other, copied = self.blocks(70), self.blocks(LENGTH)
        self.step([([*PROMPT[:40], *tokens(7, 30)], 0, other)])
        self._runner.copy_blocks([(other[2], copied[2])])
        return self.step([(PROMPT[40:], 40, [*other[:2], *copied[2:]])])[0]

    def prompt(self, chunk: int, first_blocks: Sequence[int] = ()) -> tuple[Tensor, list[int]]:
        """Last logits of PROMPT run in chunks, after what `first_blocks` hold of it already."""
        own = [*first_blocks, *self.blocks(LENGTH - len(first_blocks) * BLOCK_SIZE)]
        start, logits = len(first_blocks) * BLOCK_SIZE, torch.empty(0)
        while start < LENGTH:
            part = PROMPT[start : start + chunk]
            logits = self.step([(part, start, own)])
            start += len(part)
        return logits[0], own


CONFIGURATIONS = [
    pytest.param(variants()[0], 2, "quantized", id=f"{variants()[0]}-2-blocks"),
    pytest.param(variants()[-2 if len(variants()) > 1 else -1], 1, "quantized", id="avx2-1-blocks"),
    pytest.param(variants()[0], 2, "expanded", id=f"{variants()[0]}-2-expanded"),
]


@cache
def _expected(weight_format: str) -> Tensor:
    """The whole prompt in one step: one thread, best variant."""
    run = Run(HostBackend(1), weight_format)
    return run.prompt(LENGTH)[0]


@pytest.mark.parametrize(("variant", "num_threads", "weight_format"), CONFIGURATIONS)
def test_logits_have_the_same_bits_whatever_surrounds_them(
    variant: str, num_threads: int, weight_format: str
) -> None:
    expected = _expected(weight_format)
    run = Run(HostBackend(num_threads, variant), weight_format)
    whole, own = run.prompt(LENGTH)
    assert_same_bits(whole, expected, "whole")
    for chunk in (1, 7, 64):
        assert_same_bits(run.prompt(chunk)[0], expected, f"chunks of {chunk}")
    assert_same_bits(run.prompt(LENGTH, own[:3])[0], expected, "over a cached prefix")

    # over a block of another prompt that begins alike
    begun = run.over_another()
    assert_same_bits(begun, expected, "over another's beginning of a block")

    # among 31 others: some at their prompts, some decoding
    others = []
    for seed in range(1, 32):
        length = 1 + seed * 3 if seed % 3 == 0 else 1
        others.append((tokens(seed, length), 0, run.blocks(length)))
    mixed = run.step([*others[:15], (PROMPT, 0, run.blocks(LENGTH)), *others[15:]])
    assert_same_bits(mixed[15], expected, "prefill among 31 others")
    last = run.step([(others[-1][0], 0, run.blocks(1))])[0]
    assert_same_bits(mixed[-1], last, "the last of the others")

    # the next token, decoded alone and among others
    next_token = [int(expected.argmax())]
    room = [*own, *run.blocks(BLOCK_SIZE)]
    alone = run.step([(next_token, LENGTH, room)])[0]
    crowd = [(tokens(seed, 1), len(ids), blocks) for seed, (ids, _, blocks) in enumerate(others)]
    crowd = [item for item in crowd if item[1] % BLOCK_SIZE]  # those whose last block has room
    among = run.step([*crowd, (next_token, LENGTH, room)])[-1]
    assert_same_bits(among, alone, "decode among others")

    # preempted: everything up to here is computed again, as one prompt
    again = run.step([([*PROMPT, *next_token], 0, run.blocks(LENGTH + 1))])[0]
    assert_same_bits(again, alone, "preempted and resumed")


@pytest.mark.parametrize("kv_dtype", ["float16", "int8_per_token_head", "fp8_e4m3"])
def test_a_copied_beginning_of_a_block_is_as_good_in_every_kv_dtype(kv_dtype: str) -> None:
    run = Run(HostBackend(2, variants()[0]), "quantized", kv_dtype)
    whole, _ = run.prompt(LENGTH)
    begun = run.over_another()
    assert_same_bits(begun, whole, "over another's beginning of a block")


def test_variants_agree_on_logits() -> None:
    expected = _expected("quantized")
    for variant in variants():
        run = Run(HostBackend(2, variant), "quantized")
        assert_same_bits(run.step([(PROMPT[:9], 0, run.blocks(9))])[0], _short(), variant)
    assert expected.isfinite().all()


@cache
def _short() -> Tensor:
    run = Run(HostBackend(1), "quantized")
    return run.step([(PROMPT[:9], 0, run.blocks(9))])[0]
