"""What every layer of one step shares: which rows belong to which sequence, and where their KV lies."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class StepMetadata:
    """A flat batch of `num_tokens` rows from `num_sequences` sequences, in order. Immutable while the step runs.

    slot_mapping: `[num_tokens]` int64, slot (block * block_size + offset) each row's KV goes to, -1 for nowhere.
    block_tables: `[num_sequences, max_blocks]` int32, physical blocks by position; unused entries are 0.
    query_start: num_sequences + 1 row numbers; rows `[query_start[s], query_start[s + 1])` belong to sequence s.
    seq_lens: tokens of each sequence up to and including this step's; row j of sequence s stands at position
        seq_lens[s] - query_len + j.
    derived: what a backend computes from the above once a step and uses in every layer (see `once`).
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_start: tuple[int, ...]
    seq_lens: tuple[int, ...]
    derived: dict[Hashable, object] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `make()`, computed at the first call with this key."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]  # type: ignore[return-value]
