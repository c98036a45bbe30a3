"""A step as tensors: rows, slots, tables and the rows whose logits are wanted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.runner.forward_batch import BatchBuilder, BatchItem, ForwardBatch, build_batch

BLOCK_SIZE = 4


def test_items_lie_end_to_end() -> None:
    batch = build_batch(
        [
            BatchItem(token_ids=[5, 6, 7], start=14, block_ids=[3, 9], wants_logits=False),
            BatchItem(token_ids=[8], start=32, block_ids=[4, 2, 7, 1], wants_logits=True),
            BatchItem(token_ids=[1, 2], start=0, block_ids=[6], wants_logits=True),
        ],
        block_size=16,
    )
    assert batch.num_tokens == 6
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 1, 2]
    assert batch.positions.tolist() == [14, 15, 16, 32, 0, 1]
    assert batch.metadata.query_start == (0, 3, 4, 6)
    assert batch.metadata.seq_lens == (17, 33, 2)
    slots = [3 * 16 + 14, 3 * 16 + 15, 9 * 16, 7 * 16, 6 * 16, 6 * 16 + 1]
    assert batch.metadata.slot_mapping.tolist() == slots
    assert batch.metadata.block_tables.tolist() == [[3, 9, 0], [4, 2, 7], [6, 0, 0]]
    assert batch.logits_rows.tolist() == [3, 5]


def test_every_tensor_of_a_step_is_placed_once() -> None:
    batch = build_batch([BatchItem([5, 6], 15, [3, 9], wants_logits=True)], block_size=16)
    placed: list[Tensor] = []

    def place(tensor: Tensor) -> Tensor:
        placed.append(tensor)
        return tensor + 100

    moved = batch.placed(place)
    tensors = [
        (b.token_ids, b.positions, b.metadata.slot_mapping, b.metadata.block_tables, b.logits_rows)
        for b in (batch, moved)
    ]
    assert [id(tensor) for tensor in placed] == [id(tensor) for tensor in tensors[0]]
    assert all(bool((b == a + 100).all()) for a, b in zip(*tensors, strict=True))
    assert (moved.metadata.query_start, moved.metadata.seq_lens) == ((0, 2), (17,))
    assert moved.metadata.derived is not batch.metadata.derived


def test_a_step_that_wants_no_logits() -> None:
    batch = build_batch([BatchItem([1, 2], 0, [1], wants_logits=False)], block_size=16)
    assert batch.logits_rows.tolist() == []


def test_a_token_without_a_block_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="every token of a step has a block"):
        build_batch([BatchItem([1], 16, [1], wants_logits=True)], block_size=16)


def as_plain(batch: ForwardBatch) -> list[object]:
    tensors = (
        batch.token_ids,
        batch.positions,
        batch.metadata.slot_mapping,
        batch.metadata.block_tables,
        batch.logits_rows,
    )
    values = [(tensor.dtype, tensor.tolist()) for tensor in tensors]
    return [*values, batch.metadata.query_start, batch.metadata.seq_lens]


@st.composite
def items(draw: st.DrawFn) -> BatchItem:
    """Mostly one token more of a sequence, over blocks that other steps' sequences may hold as well."""
    num_tokens = draw(st.sampled_from([1, 1, 1, 1, 1, 3]))
    start = draw(st.integers(0, 20))
    num_blocks = (start + num_tokens - 1) // BLOCK_SIZE + 1 + draw(st.integers(0, 1))
    return BatchItem(
        token_ids=draw(st.lists(st.integers(0, 9), min_size=num_tokens, max_size=num_tokens)),
        start=start,
        block_ids=draw(st.lists(st.integers(1, 3), min_size=num_blocks, max_size=num_blocks)),
        wants_logits=draw(st.sampled_from([True, True, True, False])),
    )


@given(st.lists(st.lists(items(), min_size=1, max_size=3), min_size=1, max_size=6))
def test_kept_memory_says_what_fresh_memory_says_step_after_step(
    steps: list[list[BatchItem]],
) -> None:
    builder = BatchBuilder(BLOCK_SIZE)
    for step in steps:
        assert as_plain(builder.build(step)) == as_plain(build_batch(step, BLOCK_SIZE))


def test_a_block_that_is_replaced_in_its_table_is_seen() -> None:
    builder, blocks = BatchBuilder(BLOCK_SIZE), [3, 5]
    builder.build([BatchItem([1], 5, blocks, wants_logits=True)])
    blocks[1] = 7  # the copy of a tail that others hold too
    batch = builder.build([BatchItem([1], 6, blocks, wants_logits=True)])
    assert batch.metadata.block_tables.tolist() == [[3, 7]]
    assert batch.metadata.slot_mapping.tolist() == [7 * BLOCK_SIZE + 2]


def test_kept_memory_also_refuses_a_token_without_a_block() -> None:
    with pytest.raises(AssertionError, match="every token of a step has a block"):
        BatchBuilder(BLOCK_SIZE).build([BatchItem([1], 4, [1], wants_logits=True)])
