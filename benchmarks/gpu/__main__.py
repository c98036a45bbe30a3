"""`make gpu-check`: correctness and speed of the triton kernels on the card of this machine.

On a machine without one it says so in one line, writes nothing and succeeds. With one it runs the tests of the
kernels compiled, measures them beside torch's own and the copy bandwidth, serves split requests, and writes
results/gpu.json with the card's name; it fails when anything is wrong, however fast.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import torch


def main() -> int:
    """Run all steps."""
    if not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA card here; nothing was run.")
        return 0
    from benchmarks import report  # after it is known that there is something to report
    from benchmarks.gpu import attention, memory, products, serving

    device = torch.device("cuda")
    correctness = _tests()
    ceiling = memory.copy_gb_per_s(device)
    figures: dict[str, Any] = {
        "card": _card(),
        "correctness": correctness,
        "copy_gb_per_s": ceiling,
        "row_wise": memory.row_wise(device, ceiling),
        "attention": attention.run(device, ceiling),
        "products": products.run(device),
        "serving": serving.run(),
    }
    report.write("gpu", figures)
    wrong = _wrong_steps(figures)
    print(f"gpu-check: {'wrong: ' + ', '.join(wrong) if wrong else 'all right'}")
    return 1 if wrong else 0


def _card() -> dict[str, Any]:
    """What the figures were measured on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "torch": torch.__version__,
        "triton": version("triton"),
    }


def _tests() -> dict[str, Any]:
    """The tests of kernels/triton, compiled for this card instead of interpreted."""
    environment = os.environ | {"BATON_KERNEL_DEVICE": "cuda"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "pytest", "-q", "tests/kernels/triton"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    print(done.stdout[-4000:], flush=True)
    last = done.stdout.strip().splitlines()[-1:]
    return {"is_right": done.returncode == 0, "summary": " ".join(last)}


def _wrong_steps(figures: dict[str, Any]) -> list[str]:
    """Names of what ran and was not right."""
    steps = {"tests": figures["correctness"], **figures["serving"], **figures["attention"]}
    return [name for name, step in steps.items() if not step.get("is_right", True)]


if __name__ == "__main__":
    sys.exit(main())
