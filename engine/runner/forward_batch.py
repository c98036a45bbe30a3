"""One step's decision as tensors: a flat batch of tokens, no padding a sequence.

`build_batch` makes any batch in fresh memory. `BatchBuilder` gives the same batches, those of pure decode steps in
memory that it keeps: right after a step the caches hold weights, and every call into numpy or torch is dear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.step import StepMetadata


class BatchItem(NamedTuple):
    """One sequence's part of a step.

    token_ids: tokens to run, at positions `[start, start + len(token_ids))`.
    start: tokens already computed.
    block_ids: the sequence's blocks by position, enough for every token up to this step's last.
    wants_logits: whether the last token's logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of S sequences.

    token_ids, positions: `[T]` int64.
    metadata: slots, block tables and lengths (see StepMetadata).
    logits_rows: `[R]` int64, rows of the batch whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: StepMetadata
    logits_rows: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    def placed(self, place: Callable[[Tensor], Tensor]) -> ForwardBatch:
        """The same batch with every tensor where `place` puts it."""
        metadata = self.metadata
        return ForwardBatch(
            token_ids=place(self.token_ids),
            positions=place(self.positions),
            metadata=StepMetadata(
                slot_mapping=place(metadata.slot_mapping),
                block_tables=place(metadata.block_tables),
                query_start=metadata.query_start,
                seq_lens=metadata.seq_lens,
            ),
            logits_rows=place(self.logits_rows),
        )


class BatchBuilder:
    """Builds the batches of one engine, one at a time: a batch is valid until the next call."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._decode: _DecodeMemory | None = None

    def build(self, items: Sequence[BatchItem]) -> ForwardBatch:
        """What `build_batch` answers."""
        if not all(len(item.token_ids) == 1 and item.wants_logits for item in items):
            return build_batch(items, self._block_size)
        shape = (len(items), max(item.start for item in items) // self._block_size + 1)
        if self._decode is None or self._decode.shape != shape:
            self._decode = _DecodeMemory(*shape)
        return self._decode.fill(items, self._block_size)


class _DecodeMemory:
    """Memory of steps in which each of S sequences runs one token and wants its logits."""

    def __init__(self, num_sequences: int, max_blocks: int) -> None:
        self.shape = (num_sequences, max_blocks)
        self._rows = np.empty((3, num_sequences), dtype=np.int64)
        self._tables = np.zeros(self.shape, dtype=np.int32)
        self._held: list[Sequence[int]] = [()] * num_sequences  # what each row of the tables says
        self._token_ids, self._positions, self._slots = map(torch.from_numpy, self._rows)
        self._block_tables = torch.from_numpy(self._tables)
        self._logits_rows = torch.arange(num_sequences)
        self._query_start = tuple(range(num_sequences + 1))

    def fill(self, items: Sequence[BatchItem], block_size: int) -> ForwardBatch:
        """The batch of these items, over this memory."""
        starts = [item.start for item in items]
        slots = []
        for row, item in enumerate(items):
            position, offset = divmod(item.start, block_size)
            self._tell_blocks(row, item.block_ids[: position + 1], position + 1)
            slots.append(item.block_ids[position] * block_size + offset)
        self._rows[:] = [item.token_ids[0] for item in items], starts, slots
        return ForwardBatch(
            token_ids=self._token_ids,
            positions=self._positions,
            metadata=StepMetadata(
                slot_mapping=self._slots,
                block_tables=self._block_tables,
                query_start=self._query_start,
                seq_lens=tuple([start + 1 for start in starts]),
            ),
            logits_rows=self._logits_rows,
        )

    def _tell_blocks(self, row: int, held: Sequence[int], count: int) -> None:
        """Make one row of the tables these blocks and 0 after them, if it is not."""
        if self._held[row] == held:
            return
        assert len(held) == count, "every token of a step has a block"
        self._tables[row, :count] = held
        self._tables[row, count:] = 0
        self._held[row] = held


def build_batch(items: Sequence[BatchItem], block_size: int) -> ForwardBatch:
    """Lay the items end to end."""
    counts = np.array([len(item.token_ids) for item in items])
    query_start = (0, *np.cumsum(counts).tolist())
    seq_lens = tuple(item.start + len(item.token_ids) for item in items)
    block_tables = _block_tables(items, seq_lens, block_size)
    token_ids = [token for item in items for token in item.token_ids]
    positions = np.concatenate(
        [np.arange(i.start, end) for i, end in zip(items, seq_lens, strict=True)]
    )
    blocks = block_tables[np.repeat(np.arange(len(items)), counts), positions // block_size]
    slots = blocks.astype(np.int64) * block_size + positions % block_size
    wanted = [
        end - 1 for item, end in zip(items, query_start[1:], strict=True) if item.wants_logits
    ]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.from_numpy(positions),
        metadata=StepMetadata(
            slot_mapping=torch.from_numpy(slots),
            block_tables=torch.from_numpy(block_tables),
            query_start=query_start,
            seq_lens=seq_lens,
        ),
        logits_rows=torch.tensor(wanted, dtype=torch.int64),
    )


def _block_tables(
    items: Sequence[BatchItem], seq_lens: Sequence[int], block_size: int
) -> npt.NDArray[np.int32]:
    """`[S, max_blocks]`, each row the blocks that hold the sequence, 0 after them."""
    counts = [-(-length // block_size) for length in seq_lens]
    tables = np.zeros((len(items), max(counts)), dtype=np.int32)
    for row, (item, count) in enumerate(zip(items, counts, strict=True)):
        assert len(item.block_ids) >= count, "every token of a step has a block"
        tables[row, :count] = item.block_ids[:count]
    return tables
