"""Runs steps: one forward of the model over the pool, layer ranges announced while it runs.

Owns no blocks and decides nothing: it reads and writes the blocks it is told to. Only the engine thread calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from core.ids import NULL_BLOCK
from core.kv_layout import KVLayout
from engine.devices import send, wait_for
from engine.models.decoder import Model
from engine.runner.forward_batch import BatchItem, ForwardBatch, build_batch
from kernels import ops
from kernels.kv_view import KVView
from kernels.step import StepMetadata

_FIRST_PROBE_TOKENS = 64
_LARGEST_PROBE_TOKENS = 2048
_RANGES_A_MODEL = 3


class Storage(Protocol):
    """What the runner needs of a pool: its bytes, and its layers as kernels see them."""

    @property
    def tensor(self) -> Tensor:
        """`[num_blocks, block_bytes]` uint8."""
        ...

    def layer_views(self, group: int) -> list[KVView]:
        """One for each layer of a group, over the same bytes."""
        ...


class ModelRunner:
    """One model over one pool."""

    def __init__(
        self, model: Model, layout: KVLayout, storage: Storage, layers_per_range: int = 0
    ) -> None:
        """layers_per_range: layers announced together; 0 takes about a third of the model."""
        self._model, self._layout, self._storage = model, layout, storage
        self._device = storage.tensor.device
        self._num_layers = model.config.num_layers
        self.layers_per_range = layers_per_range or -(-self._num_layers // _RANGES_A_MODEL)
        self._layer_views = _views_by_layer(layout, storage, self._num_layers)
        with torch.inference_mode():
            self._program = ops.compile_step(self._step)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, each pair (source, destination) in order."""
        ops.copy_blocks(self._storage.tensor, pairs)

    def forward(
        self, batch: ForwardBatch, on_layers: Callable[[int, int], None] | None = None
    ) -> Tensor:
        """Logits `[R, vocab]` float32 of the wanted rows, valid until the next call.

        on_layers(first, count) is called during the call, perhaps on another thread, each time the KV of layers
        `[first, first + count)` is in the pool, or on a card queued to be: in order, without gaps, once each.
        """
        # In an engine's loop it is: a mode of our own costs a step some 40 us.
        if torch.is_inference_mode_enabled():
            return self._forward(batch, on_layers)
        with torch.inference_mode():
            return self._forward(batch, on_layers)

    def _forward(self, batch: ForwardBatch, on_layers: Callable[[int, int], None] | None) -> Tensor:
        if self._device.type != "cpu":
            batch = batch.placed(partial(send, device=self._device))
        on_mark = None if on_layers is None else self._range_counter(on_layers)
        return self._program.run(
            batch.token_ids, batch.positions, batch.metadata, batch.logits_rows, on_mark
        )

    def _step(
        self, token_ids: Tensor, positions: Tensor, metadata: StepMetadata, wanted: Tensor
    ) -> Tensor:
        """The whole step as operations: what the program runs."""
        hidden = self._model.forward(token_ids, positions, self._layer_views, metadata)
        return self._model.logits(ops.take_rows(hidden, wanted))

    def measure_prefill_rate(self, step_seconds: float) -> float:
        """Prompt tokens a second in steps of about `step_seconds`; they write nowhere, and warm every operation up.

        Larger steps do more tokens a second, so the rate is that of the size which the budget will have.
        """
        limit = self._model.config.max_position
        few = min(_FIRST_PROBE_TOKENS, limit)
        self._timed_step(few)  # the first run of each shape pays for set-up
        wanted = int(step_seconds * few / self._timed_step(few))
        many = min(max(wanted, few), _LARGEST_PROBE_TOKENS, limit)
        self._timed_step(many)
        return many / min(self._timed_step(many) for _ in range(2))

    def _range_counter(self, on_layers: Callable[[int, int], None]) -> Callable[[int], None]:
        """Turns marks of single layers into ranges."""
        size, last = self.layers_per_range, self._num_layers - 1

        def on_mark(layer: int) -> None:
            first = layer // size * size
            if layer == last or layer + 1 == first + size:
                on_layers(first, layer + 1 - first)

        return on_mark

    def _timed_step(self, num_tokens: int) -> float:
        """Seconds of one prompt of `num_tokens`, all of it in the null block."""
        table = [NULL_BLOCK] * self._layout.num_blocks(num_tokens)
        batch = build_batch([BatchItem([0] * num_tokens, 0, table, True)], self._layout.block_size)
        metadata = batch.metadata
        nowhere = StepMetadata(
            slot_mapping=torch.full_like(metadata.slot_mapping, -1),
            block_tables=metadata.block_tables,
            query_start=metadata.query_start,
            seq_lens=metadata.seq_lens,
        )
        blind = ForwardBatch(batch.token_ids, batch.positions, nowhere, batch.logits_rows)
        started = time.perf_counter()
        self.forward(blind)
        wait_for(self._device)
        return time.perf_counter() - started


def _views_by_layer(layout: KVLayout, storage: Storage, num_layers: int) -> list[KVView]:
    """The KV view of every model layer, whichever group it is in."""
    views: dict[int, KVView] = {}
    for number, group in enumerate(layout.groups):
        views.update(zip(group.layers, storage.layer_views(number), strict=True))
    assert sorted(views) == list(range(num_layers)), "every layer lies in exactly one group"
    return [views[layer] for layer in range(num_layers)]
