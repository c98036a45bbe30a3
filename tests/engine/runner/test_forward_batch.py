"""A step as tensors: rows, slots, tables and the rows whose logits are wanted."""

import pytest
from torch import Tensor

from engine.runner.forward_batch import BatchItem, build_batch


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
