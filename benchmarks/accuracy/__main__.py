"""`make bench-accuracy`: perplexity, equal choices and divergence by precision, into results/accuracy.json."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import report
from benchmarks.accuracy.roundings import ROUNDINGS, RoundedInputs
from kernels import reference
from kernels.cpu.backend import HostBackend
from tests.support.accuracy import (
    PIECE_TOKENS,
    SIMPLE_ANSWER,
    SIMPLE_QUESTION,
    Accuracy,
    DemoModel,
    Measure,
)

_ANSWER_TOKENS = 24


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="bench-accuracy")
    parser.add_argument("--pieces", type=int, default=4, help=f"{PIECE_TOKENS} tokens each")
    parser.add_argument("--threads", type=int, default=2, help="of torch and of the host kernels")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    exact = DemoModel(reference, "expanded")
    measure = Measure(exact, options.pieces)
    backend = HostBackend(options.threads)
    models: dict[str, tuple[Any, str, str]] = {
        name: (RoundedInputs(way), "expanded", "float32") for name, way in ROUNDINGS.items()
    }
    for kv_dtype in ("float32", "float16"):
        models[f"host kernels, KV in {kv_dtype}: {backend.description}"] = (
            backend,
            "quantized",
            kv_dtype,
        )
    rows = {"float32": measure.exact}
    answers = {"float32": exact.answer(SIMPLE_QUESTION, _ANSWER_TOKENS)}
    for name, (own_backend, weight_format, kv_dtype) in models.items():
        model = DemoModel(own_backend, weight_format, kv_dtype)
        rows[name] = measure.of(model)
        answers[name] = model.answer(SIMPLE_QUESTION, _ANSWER_TOKENS)
        print(f"  measured {name}", flush=True)
    _print(rows, answers)
    figures = {name: asdict(row) | {"answer": answers[name]} for name, row in rows.items()}
    report.write("accuracy", {"tokens": options.pieces * PIECE_TOKENS, "inputs": figures})


def _print(rows: Mapping[str, Accuracy], answers: Mapping[str, str]) -> None:
    exact = rows["float32"].perplexity
    report.print_table(
        "the demo model by the precision of its products' inputs, beside float32",
        ("inputs", "perplexity", "change", "equal argmax", "divergence", SIMPLE_ANSWER),
        [
            (
                name,
                f"{row.perplexity:.4f}",
                f"{row.perplexity / exact - 1:+.3%}",
                f"{row.equal_argmax:.2%}",
                f"{row.divergence:.2e}",
                "yes" if SIMPLE_ANSWER in answers[name] else "NO",
            )
            for name, row in rows.items()
        ],
    )


if __name__ == "__main__":
    main()
