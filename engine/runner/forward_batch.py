"""One step's decision as tensors: a flat batch of tokens, no padding a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.step import StepMetadata


@dataclass(frozen=True, slots=True)
class BatchItem:
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
