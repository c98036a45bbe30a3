"""Hash chains of sequences: what full blocks hold and how that is named."""

from __future__ import annotations

import pytest

from core.block_hash import HashAlgorithm, HashRoot, hash_chain
from core.errors import ConfigError
from engine.kvcache.chain import HashChain
from tests.support.kv import ROOT, keys_of

TOKENS = list(range(100, 200))


def test_contents_are_the_chain_of_the_root() -> None:
    contents = HashChain(ROOT, 16).contents(TOKENS, 6)
    assert keys_of(contents) == hash_chain(ROOT, TOKENS)
    assert contents[0].parent == ROOT.salted("")
    assert [c.parent for c in contents[1:]] == [c.key for c in contents[:-1]]
    assert contents[2].token_ids == tuple(TOKENS[32:48])


def test_a_chain_grows_with_its_sequence_and_keeps_what_it_knows() -> None:
    chain = HashChain(ROOT, 16)
    first = chain.contents(TOKENS[:40], 2)
    assert chain.contents(TOKENS, 6)[:2] == first
    assert chain.contents(TOKENS, 1) == first[:1]
    assert chain.content(TOKENS, 5) == HashChain(ROOT, 16).contents(TOKENS, 6)[5]


@pytest.mark.parametrize("known", [0, 2, 6])
def test_the_hash_in_front_of_a_position(known: int) -> None:
    chain = HashChain(ROOT, 16)
    chain.contents(TOKENS, known)
    assert chain.parent(TOKENS, 0) == ROOT.salted("")
    assert chain.parent(TOKENS, 4) == hash_chain(ROOT, TOKENS[:64])[-1]
    assert chain.parent(TOKENS, 6) == hash_chain(ROOT, TOKENS)[-1]


def test_a_block_that_is_not_full_has_no_content() -> None:
    with pytest.raises(AssertionError, match="not full"):
        HashChain(ROOT, 16).contents(TOKENS[:31], 2)


def test_salts_and_roots_keep_chains_apart() -> None:
    plain = HashChain(ROOT, 16).content(TOKENS, 0)
    other_root = HashRoot(HashAlgorithm.SHA256, 16, b"another root....")
    assert HashChain(ROOT, 16, salt="tenant").content(TOKENS, 0).key != plain.key
    assert HashChain(other_root, 16).content(TOKENS, 0).key != plain.key


def test_larger_blocks_carry_every_hash_of_the_cluster() -> None:
    """Hashes are over 16 tokens in every worker; a block of 32 is named by the second of its two."""
    contents = HashChain(ROOT, 32).contents(TOKENS, 3)
    assert keys_of(contents) == hash_chain(ROOT, TOKENS[:96])
    assert [len(content.hashes) for content in contents] == [2, 2, 2]
    assert contents[1].parent == contents[0].key == contents[0].hashes[1]


def test_block_sizes_are_multiples_of_the_hash_block_size() -> None:
    with pytest.raises(ConfigError, match="block_size: 24 must be a multiple"):
        HashChain(ROOT, 24)


def test_a_copy_goes_its_own_way() -> None:
    chain = HashChain(ROOT, 16)
    chain.contents(TOKENS, 2)
    twin = chain.copy()
    ours, theirs = [*TOKENS[:32], *[7] * 16], [*TOKENS[:32], *[8] * 16]
    assert chain.content(ours, 2).key != twin.content(theirs, 2).key
    assert chain.content(ours, 2).parent == twin.content(theirs, 2).parent
