"""How near a backend's logits come to those of dequantised weights in float32, on a fixed text of the demo model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from core.kv_layout import KVLayout
from engine.kvcache.storage import allocate_pool
from engine.loading.load import load_model
from engine.loading.sources import resolve_source
from engine.runner.forward_batch import BatchItem, build_batch
from engine.runner.model_runner import ModelRunner
from kernels import ops, reference
from services.gateway.text.bundle import TextBundle
from tests.support.oracle import demo_model_path

TEXT = Path(__file__).parents[1] / "data" / "longtext" / "shakespeare_100KB.txt"
PIECE_TOKENS, BLOCK_SIZE = 512, 16
NUM_BLOCKS = 1 + PIECE_TOKENS // BLOCK_SIZE
SIMPLE_QUESTION, SIMPLE_ANSWER = "What is the capital of France?", "Paris"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Logits of a text beside full precision's.

    perplexity: of the text.
    equal_argmax: share of positions whose most probable token is the same.
    divergence: mean Kullback-Leibler divergence from full precision, in nats.
    """

    perplexity: float
    equal_argmax: float
    divergence: float


class DemoModel:
    """The demo model on one backend, its weights expanded or kept in blocks, over a pool of its own."""

    def __init__(self, backend: Any, weight_format: str, kv_dtype: str = "float32") -> None:
        ops.use_backend(backend)
        try:
            loaded = load_model(resolve_source(str(demo_model_path())), "float32", weight_format)
            layout = KVLayout(BLOCK_SIZE, loaded.config.kv_groups(kv_dtype))
            self._runner = ModelRunner(loaded.model, layout, allocate_pool(layout, NUM_BLOCKS))
        finally:
            ops.use_backend(reference)
        self._backend, self._eos_token_ids = backend, loaded.eos_token_ids
        self.text = TextBundle(loaded.bundle)

    def logits(self, token_ids: Sequence[int], start: int = 0) -> Tensor:
        """`[len(token_ids), vocab]` of one sequence's tokens from `start`, the earlier ones being in the pool."""
        item = BatchItem(token_ids, start, list(range(1, NUM_BLOCKS)), True)
        batch = build_batch([item], BLOCK_SIZE)
        ops.use_backend(self._backend)
        try:
            return self._runner.forward(replace(batch, logits_rows=torch.arange(len(token_ids))))
        finally:
            ops.use_backend(reference)

    def answer(self, question: str, max_tokens: int) -> str:
        """The greedy answer to a chat of one question."""
        step = self.text.encode_chat([{"role": "user", "content": question}])
        start = 0
        told: list[int] = []
        while len(told) < max_tokens and not set(told) & set(self._eos_token_ids):
            told.append(int(self.logits(step, start)[-1].argmax()))
            start += len(step)
            step = told[-1:]
        return self.text.decode(told, skip_special=True)

    def pieces(self, num_pieces: int) -> list[list[int]]:
        """The text's first tokens, PIECE_TOKENS at a time."""
        length = num_pieces * PIECE_TOKENS
        ids = self.text.encode(TEXT.read_text()[: 8 * length], add_special_tokens=False)
        assert len(ids) >= length, "the text is long enough"
        return [ids[i : i + PIECE_TOKENS] for i in range(0, length, PIECE_TOKENS)]


class Measure:
    """Full precision's log-probabilities of the text, and how others compare with them."""

    def __init__(self, exact: DemoModel, num_pieces: int) -> None:
        self._pieces = exact.pieces(num_pieces)
        self._expected = list(self._log_probabilities(exact))
        self.exact = self._compare(self._expected)

    def of(self, model: DemoModel) -> Accuracy:
        """Compare a model with full precision."""
        return self._compare(self._log_probabilities(model))

    def _log_probabilities(self, model: DemoModel) -> Iterator[Tensor]:
        """`[PIECE_TOKENS, vocab]` a piece."""
        return (model.logits(piece).log_softmax(-1) for piece in self._pieces)

    def _compare(self, log_probabilities: Iterable[Tensor]) -> Accuracy:
        num_equal, divergence, loss = 0, 0.0, 0.0
        rows = zip(self._pieces, log_probabilities, self._expected, strict=True)
        for piece, own, expected in rows:
            num_equal += int((own.argmax(-1) == expected.argmax(-1)).sum())
            divergence += float(kl_div(own, expected, reduction="sum", log_target=True))
            loss -= float(own[:-1].gather(1, torch.tensor(piece[1:])[:, None]).sum())
        num_pieces = len(self._pieces)
        num_tokens = num_pieces * PIECE_TOKENS
        perplexity = math.exp(loss / (num_tokens - num_pieces))  # a piece's first token is given
        return Accuracy(perplexity, num_equal / num_tokens, divergence / num_tokens)
