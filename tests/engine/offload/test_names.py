"""Blocks of several hash blocks are told by all their hashes, for as long as a tier has them."""

from __future__ import annotations

from core.block_hash import BlockHash
from engine.kvcache.chain import BlockContent
from engine.offload.names import BlockNames
from kvtransfer.tiers.base import BlockKey
from kvtransfer.tiers.connector import KVConnector

ONE, TWO, THREE = (BlockHash(bytes([n] * 16)) for n in (1, 2, 3))


def test_a_block_is_told_by_all_its_hashes_until_it_is_forgotten() -> None:
    names = BlockNames()
    names.note(BlockContent((ONE, TWO), BlockHash(bytes(16)), (5,) * 32))
    assert names.hashes([BlockKey(TWO), BlockKey(THREE)]) == (ONE, TWO, THREE)
    names.forget_unless(BlockKey(TWO), KVConnector({}, lambda event: None, 1))
    assert names.hashes([BlockKey(TWO)]) == (TWO,)


def test_other_groups_are_not_told() -> None:
    assert BlockNames().hashes([BlockKey(ONE, 1), BlockKey(TWO, 0)]) == (TWO,)


def test_where_a_block_is_one_hash_block_nothing_is_remembered() -> None:
    names = BlockNames()
    names.note(BlockContent((ONE,), BlockHash(bytes(16)), (5,) * 16))
    assert names._inner == {}
