"""A whole model over this backend: transformers' logits, and with batch invariance equal bits however a step is cut."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.loading.load import load_model
from engine.loading.sources import resolve_source
from kernels import ops, triton
from tests.support.tiny_models import PagedRun, reference_logits, save_folder, tiny_model
from tests.support.triton_device import IS_INTERPRETED, batch_invariance

pytestmark = pytest.mark.skipif(
    not IS_INTERPRETED, reason="on a card gpu-check serves a model through the whole worker"
)
SEQUENCES = ([5, 9, 77, 3, 20, 31, 8, 90, 101, 64, 7, 12, 5, 6, 7, 8, 9, 10], [17, 4, 99])


@contextmanager
def backend() -> Iterator[None]:
    """Operations of this process run here, for a while."""
    before = ops._active
    ops.use_backend(triton)
    try:
        yield
    finally:
        ops.use_backend(before)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("qwen3", {}), ("mistral", {"sliding_window": 7})],
)
def test_logits_equal_transformers(kind: str, changes: dict[str, int], tmp_path: Path) -> None:
    """Prefill of one sequence, then a step of the other's prefill beside a single row."""
    model = tiny_model(kind, num_hidden_layers=2, **changes)
    loaded = load_model(resolve_source(str(save_folder(model, tmp_path))), "float32", "expanded")
    first, second = SEQUENCES
    with backend():
        run = PagedRun(loaded)
        run.step([(0, first[:-1])])
        logits = run.step([(0, first[-1:]), (1, second)])
    expected = torch.stack([reference_logits(model, ids)[-1] for ids in SEQUENCES])
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


def test_bits_do_not_depend_on_company_or_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.triton.settings.INVARIANT_SPLIT_TOKENS", 32)
    model = tiny_model("llama", num_hidden_layers=2)
    loaded = load_model(resolve_source(str(save_folder(model, tmp_path))), "float32", "expanded")
    first, second = SEQUENCES

    def in_chunks(chunk: int, *, has_company: bool) -> Tensor:
        run, logits = PagedRun(loaded), torch.empty(0)
        for start in range(0, len(first), chunk):
            parts = [(0, first[start : start + chunk])]
            logits = run.step([(start + 1, second), *parts] if has_company else parts)[-1]
        return logits

    with backend(), batch_invariance():
        whole = in_chunks(len(first), has_company=False)
        assert torch.equal(in_chunks(7, has_company=False), whole)
        assert torch.equal(in_chunks(17, has_company=True), whole)
