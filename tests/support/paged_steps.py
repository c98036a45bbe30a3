"""Random ragged steps over a poisoned pool, and the dense attention they must equal.

The pool is a real one, of three layers of which the middle one is used; whatever no test wrote holds NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor

from core.kv_layout import KV_DTYPES, GroupKind, KVGroup, KVLayout, SlotFormat
from engine.kvcache.storage import PoolStorage
from kernels import ops
from kernels.kv_view import KVView
from kernels.step import StepMetadata
from kvtransfer.pool_memory import PoolMemory
from tests.support.kv_codec import decode
from tests.support.poison import POISON_BYTE

LAYER = 1  # of three, so that a block has bytes before and after it
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """Sequences (context before the step, rows in the step) and the attention's parameters.

    kv_dtype: how the pool holds KV. dtype: of queries, keys and values.
    """

    sequences: tuple[tuple[int, int], ...]
    num_kv_heads: int = 2
    group_size: int = 3
    head_dim: int = 8
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    kv_dtype: str = "float32"
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


def cases(
    kv_dtypes: Sequence[str] = tuple(KV_DTYPES),
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    head_dims: Sequence[int] = (4, 8, 32),
    max_context: int = 200,
) -> st.SearchStrategy[Case]:
    """Any mix of prefill and decode rows, heads, windows, soft caps and sinks."""
    rows = st.sampled_from([1, 1, 1, 2, 15, 16, 17, 40])
    sequence = st.tuples(st.integers(0, max_context), rows)
    return st.builds(
        Case,
        sequences=st.lists(sequence, min_size=1, max_size=7).map(tuple),
        num_kv_heads=st.integers(1, 3),
        group_size=st.integers(1, 4),
        head_dim=st.sampled_from(head_dims),
        block_size=st.sampled_from([16, 16, 32, 64]),
        window=st.none() | st.integers(1, 80),
        soft_cap=st.none() | st.just(5.0),
        has_sinks=st.booleans(),
        kv_dtype=st.sampled_from(kv_dtypes),
        dtype=st.sampled_from(dtypes),
        seed=st.integers(0, 2**31),
    )


def make_pool(case: Case, num_blocks: int) -> PoolStorage:
    """A poisoned pool of three layers in the case's format."""
    slot = SlotFormat.of(case.kv_dtype, case.head_dim)
    group = KVGroup(GroupKind.FULL_ATTENTION, (0, 1, 2), case.num_kv_heads, slot)
    layout = KVLayout(case.block_size, (group,))
    memory = PoolMemory(num_blocks, layout.block_bytes)
    storage = PoolStorage(layout, num_blocks, memory)
    memory.close()  # nobody closes the pool of a property test; its mapping ends with it
    storage.tensor.fill_(POISON_BYTE)
    return storage


class Step:
    """One step, its context already in the pool, its own rows not yet; blocks lie in random places."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        lengths = [before + rows for before, rows in case.sequences]
        self.tables, num_blocks = _block_tables(lengths, case.block_size, case.seed)
        self.storage = make_pool(case, num_blocks)
        self.layer: KVView = self.storage.layer_views(0)[LAYER]
        self.metadata = self._metadata([(before, rows) for before, rows in case.sequences])
        heads, dim = case.num_kv_heads, case.head_dim
        self.keys = [self.random(length, heads, dim) for length in lengths]
        self.values = [self.random(length, heads, dim) for length in lengths]
        self.query = self.random(self.metadata.query_start[-1], case.num_heads, dim)
        self.sinks = None
        if case.has_sinks:
            self.sinks = 2 * torch.randn(case.num_heads, generator=self.generator)
        context = self._metadata([(0, before) for before, _ in case.sequences])
        befores = [slice(0, before) for before, _ in case.sequences]
        ops.write_kv(*self._rows(befores), self.layer, context)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.case.dtype)

    def write_step(self) -> None:
        """Put the step's own K and V into the pool."""
        own = [slice(before, before + rows) for before, rows in self.case.sequences]
        ops.write_kv(*self._rows(own), self.layer, self.metadata)

    def attend(self) -> Tensor:
        case = self.case
        return ops.paged_attention(
            self.query,
            self.layer,
            self.metadata,
            case.scale,
            case.window,
            case.soft_cap,
            self.sinks,
        )

    def expected(self) -> Tensor:
        """Attention over the numbers that the pool holds, decoded from its bytes."""
        held = decode(self.layer, self.case.kv_dtype).transpose(0, 3, 2, 1, 4)
        held = held.reshape(-1, 2, self.case.num_kv_heads, self.case.head_dim)  # by slot
        slots = [self.slots(s, range(length)) for s, length in enumerate(self.metadata.seq_lens)]
        return self._dense([held[s, 0] for s in slots], [held[s, 1] for s in slots])

    def expected_unrounded(self) -> Tensor:
        """Attention over the numbers before they were stored."""
        keys = [k.double().numpy() for k in self.keys]
        return self._dense(keys, [v.double().numpy() for v in self.values])

    def slots(self, sequence: int, positions: Sequence[int] | range) -> npt.NDArray[np.int64]:
        """Where positions of a sequence lie."""
        size = self.case.block_size
        places = np.asarray(positions, dtype=np.int64)
        return self.tables[sequence].numpy()[places // size].astype(np.int64) * size + places % size

    def poison_unseen(self) -> None:
        """Make every slot a NaN that no row of this step may see, those outside windows included."""
        seen: set[int] = set()
        for sequence, (before, rows) in enumerate(self.case.sequences):
            first = 0 if self.case.window is None else max(0, before + 1 - self.case.window)
            seen |= set(self.slots(sequence, range(first, before + rows)).tolist())
        size = self.case.block_size
        for slot in set(range(self.layer.num_blocks * size)) - seen:
            block, offset = divmod(slot, size)
            if self.layer.scales is None:
                self.layer.values[block, :, :, offset] = float("nan")
            else:
                self.layer.scales[block, :, :, offset] = float("nan")

    def _rows(self, ranges: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """K and V of a range of each sequence, `[rows, Hkv, D]`."""
        pairs = list(zip(self.keys, self.values, ranges, strict=True))
        return torch.cat([k[r] for k, _, r in pairs]), torch.cat([v[r] for _, v, r in pairs])

    def _metadata(self, sequences: Sequence[tuple[int, int]]) -> StepMetadata:
        starts = [0]
        for _, rows in sequences:
            starts.append(starts[-1] + rows)
        slots = [
            self.slots(sequence, range(before, before + rows))
            for sequence, (before, rows) in enumerate(sequences)
        ]
        lengths = tuple(before + rows for before, rows in sequences)
        mapping = torch.from_numpy(np.concatenate(slots))
        return StepMetadata(mapping, self.tables, tuple(starts), lengths)

    def _dense(self, keys: Sequence[Array], values: Sequence[Array]) -> Tensor:
        """Row by row over exactly the positions a row sees, in float64: keys and values `[length, Hkv, D]`."""
        sinks = None if self.sinks is None else self.sinks.double().numpy()
        query = self.query.double().numpy()
        rows = []
        for sequence, (before, num_rows) in enumerate(self.case.sequences):
            for row in range(num_rows):
                position = before + row
                seen = slice(
                    max(0, position + 1 - (self.case.window or position + 1)), position + 1
                )
                own = query[self.metadata.query_start[sequence] + row]
                rows.append(
                    self._dense_row(own, keys[sequence][seen], values[sequence][seen], sinks)
                )
        return torch.from_numpy(np.stack(rows))

    def _dense_row(self, query: Array, keys: Array, values: Array, sinks: Array | None) -> Array:
        keys, values = (x.repeat(self.case.group_size, axis=1) for x in (keys, values))
        scores = np.einsum("hd,lhd->hl", query, keys) * self.case.scale
        if self.case.soft_cap is not None:
            scores = self.case.soft_cap * np.tanh(scores / self.case.soft_cap)
        weights = np.exp(scores)
        total = weights.sum(-1) + (0 if sinks is None else np.exp(sinks))
        return np.einsum("hl,lhd->hd", weights / total[:, None], values)


def _block_tables(lengths: Sequence[int], block_size: int, seed: int) -> tuple[Tensor, int]:
    """`[sequences, most blocks]` int32 of distinct blocks in no order, 0 behind them; and blocks of the pool."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    order = random.Random(seed).sample(range(1, num_blocks), num_blocks - 1)
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor(order[:count])
        order = order[count:]
    return tables, num_blocks
