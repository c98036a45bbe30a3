"""Compiles recorded launches for a card that is not there, and reads what the compiler says of them.

Run as a program in a process of its own, since the interpreter, which the other tests need, is chosen at import:

    python -m tests.support.triton_compiler sm_90 core        a JSON list of Resources on standard output: every kernel
    python -m tests.support.triton_compiler sm_90 all         every kernel in every variant
    python -m tests.support.triton_compiler sm_90 decode      examples whose names hold a word
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton.cards import CARDS, Card
from kernels.triton.launch import INTERPRETED, Launch, recording
from tests.support.triton_launches import CORE, EXAMPLES

_WARP_SIZE = 32
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one card.

    spill_bytes: stored and loaded. registers: of a thread. shared_bytes: of a program.
    """

    example: str
    kernel: str
    card: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: dict[str, int]


COUNTED = ("wgmma", "mma.sync", "tcgen05.mma", ".bf16.bf16", "cp.async", "e4m3x2")


def compile_launch(example: str, launch: Launch, card: Card) -> Resources:
    """One kernel as the launcher would start it there, through to machine code."""
    source = _source(launch)
    target = GPUTarget("cuda", card.capability, _WARP_SIZE)
    log = io.StringIO()
    knobs = triton.knobs
    with contextlib.redirect_stdout(log), knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # what comes from a cache says nothing
        compiled = triton.compile(source, target=target, options=launch.options)
    spills, registers = _SPILLS.search(log.getvalue()), _REGISTERS.search(log.getvalue())
    assert spills is not None, f"the compiler said nothing of {launch.kernel.__name__}"
    assert registers is not None
    text = compiled.asm["ptx"]
    return Resources(
        example=example,
        kernel=launch.kernel.__name__,
        card=card.name,
        registers=int(registers[1]),
        spill_bytes=int(spills[2]) + int(spills[3]),
        shared_bytes=int(compiled.metadata.shared),
        instructions={word: text.count(word) for word in COUNTED if word in text},
    )


def compile_examples(card: Card, selection: str) -> list[Resources]:
    """Every launch of the examples selected, each distinct kernel once."""
    done: dict[str, Resources] = {}
    for name, run in EXAMPLES.items():
        if not (selection == "all" or (selection == "core" and name in CORE) or selection in name):
            continue
        with recording(card) as launches:
            run()
        for launch in launches:
            key = _source(launch).hash() + str(launch.options)
            if key not in done:
                done[key] = compile_launch(name, launch, card)
    return list(done.values())


def _source(launch: Launch) -> ASTSource:
    """Types, constants and alignments of the arguments, as a launch on a card would specialise them."""
    names = launch.kernel.arg_names
    constants: dict[tuple[int], Any] = {}
    signature, attributes = {}, {}
    values = iter(launch.arguments)
    for index, name in enumerate(names):
        value = launch.constants[name] if name in launch.constants else next(values)
        if name in launch.constants or (isinstance(value, int) and value == 1):
            signature[name], constants[index,] = "constexpr", value
            continue
        signature[name] = triton.runtime.jit.mangle_type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int) and number % 16 == 0:
            attributes[index,] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def main() -> None:
    """Print what the compiler says for one card."""
    assert not INTERPRETED, "interpreted kernels cannot be compiled"
    name, selection = sys.argv[1:]
    (card,) = (card for card in CARDS if card.name == name)
    print(json.dumps([asdict(resources) for resources in compile_examples(card, selection)]))


if __name__ == "__main__":
    main()
