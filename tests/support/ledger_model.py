"""A model that costs next to nothing and forgives nothing, for engines that are run ten thousand times.

What it writes into a slot of the pool depends on the token and on the slot before; what it says next is a digest of
every byte that the sequence's blocks hold. So one wrong, missing or late byte of KV changes the answer, and the right
answer is known without any pool: `ledger_answer`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from core.kv_identity import GroupShape
from core.kv_layout import GroupKind, KVGroup, KVLayout, SlotFormat
from core.request import Request
from engine.kvcache.storage import Storage
from engine.runner.forward_batch import ForwardBatch
from engine.sampler.rows import SampledToken, SampleRow

VOCAB_SIZE = 97
NUM_LAYERS = 3
_HEAD_DIM = 2
_GROUP = KVGroup(
    GroupKind.FULL_ATTENTION, tuple(range(NUM_LAYERS)), 1, SlotFormat.of("float32", _HEAD_DIM)
)
GROUP_SHAPES = (GroupShape(_GROUP.kind.value, NUM_LAYERS, 1, _HEAD_DIM, 0),)

Words = npt.NDArray[np.uint32]


def ledger_layout(block_size: int) -> KVLayout:
    """One group of few layers with one small head."""
    return KVLayout(block_size, (_GROUP,))


def chain(token_ids: Iterable[int], previous: int = 0) -> list[int]:
    """The value of each position, from that of the position before the first."""
    values = []
    for token_id in token_ids:
        previous = zlib.crc32(token_id.to_bytes(4, "little"), previous)
        values.append(previous)
    return values


def layer_words(values: Sequence[int], layer: int) -> Words:
    """What one layer of these positions holds: [num_positions, K or V, head_dim]."""
    base = np.array(values, dtype=np.uint32) * np.uint32(2 * layer + 3)
    places = np.arange(2 * _HEAD_DIM, dtype=np.uint32).reshape(2, _HEAD_DIM)
    return base[:, None, None] + places


def token_after(held: Words, choice: int) -> int:
    """The next token of a choice. held: [num_layers, num_positions, K or V, head_dim]."""
    return zlib.crc32(choice.to_bytes(4, "little"), zlib.crc32(held.tobytes())) % VOCAB_SIZE


def ledger_answer(request: Request) -> list[list[int]]:
    """The right tokens of each choice, to their full length."""
    answers = []
    for choice in range(request.sampling.n):
        values, output = chain(request.prompt_token_ids), list[int]()
        while len(output) < request.sampling.max_tokens:
            held = np.stack([layer_words(values, layer) for layer in range(NUM_LAYERS)])
            output.append(token_after(held, choice))
            values += chain(output[-1:], values[-1])
        answers.append(output)
    return answers


class LedgerRunner:
    """`ModelRunner` for the ledger: its "logits" are what each wanted row has read."""

    def __init__(self, layout: KVLayout, storage: Storage) -> None:
        words = storage.tensor.numpy().view(np.uint32)
        # [num_blocks, num_layers, K or V, block_size, head_dim]
        self._words = words.reshape(-1, NUM_LAYERS, 2, layout.block_size, _HEAD_DIM)
        self._block_size = layout.block_size

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, each pair (source, destination) in order."""
        for source, destination in pairs:
            self._words[destination] = self._words[source]

    def forward(
        self, batch: ForwardBatch, on_layers: Callable[[int, int], None] | None = None
    ) -> list[Words]:
        """Write a layer of every sequence, announce it, go on; then read."""
        values = self._values(batch)
        blocks, offsets = np.divmod(batch.metadata.slot_mapping.numpy(), self._block_size)
        for layer in range(NUM_LAYERS):
            self._words[blocks, layer, :, offsets] = layer_words(values, layer)
            if on_layers is not None:
                on_layers(layer, 1)
        wanted = set(batch.logits_rows.tolist())
        ends = batch.metadata.query_start[1:]
        return [self._read(batch, row) for row, end in enumerate(ends) if end - 1 in wanted]

    def _values(self, batch: ForwardBatch) -> list[int]:
        """The chain of each sequence's tokens, going on from what its blocks hold."""
        metadata, values = batch.metadata, list[int]()
        token_ids = batch.token_ids.tolist()
        ends = metadata.query_start[1:]
        for row, (first, end) in enumerate(zip(metadata.query_start, ends, strict=False)):
            start = metadata.seq_lens[row] - (end - first)
            values += chain(token_ids[first:end], self._value_at(batch, row, start - 1))
        return values

    def _value_at(self, batch: ForwardBatch, row: int, position: int) -> int:
        if position < 0:
            return 0
        block = int(batch.metadata.block_tables[row, position // self._block_size])
        word = int(self._words[block, 0, 0, position % self._block_size, 0])
        return word * pow(3, -1, 2**32) % 2**32  # layer 0 holds three times the value

    def _read(self, batch: ForwardBatch, row: int) -> Words:
        length = batch.metadata.seq_lens[row]
        table = batch.metadata.block_tables[row, : -(-length // self._block_size)].numpy()
        held = self._words[table].transpose(1, 0, 3, 2, 4)  # layers first, then positions
        return np.ascontiguousarray(held.reshape(NUM_LAYERS, -1, 2, _HEAD_DIM)[:, :length])


class LedgerSampler:
    """`Sampler` for the ledger."""

    def sample(self, logits: Sequence[Words], rows: Sequence[SampleRow]) -> list[SampledToken]:
        """One token for each of `rows`."""
        return [SampledToken(token_after(logits[row.logits_row], row.choice)) for row in rows]
