"""Block hashes: fixed vectors, recomputed here without core, and what must and must not change them."""

import hashlib
import os
import pathlib
import struct
import subprocess
import sys
from dataclasses import replace

import cbor2
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import (
    HASH_BYTES,
    BlockHash,
    HashAlgorithm,
    HashRoot,
    hash_block,
    hash_chain,
    iter_chain,
)
from core.errors import ConfigError
from core.kv_identity import GroupShape, KVIdentity

ROOT = pathlib.Path(__file__).parents[2]
IDENTITY = KVIdentity(
    model_digest="00" * 32,
    weight_format="float32",
    activation_dtype="float32",
    adapter_digest="",
    group_shapes=(GroupShape("full_attention", num_layers=30, num_kv_heads=3, head_dim=64),),
)
TOKENS = [*range(15), 49151, 2**32 - 1, *range(15), 7]  # two full blocks and one token
SALT = "tenant-a"

# Frozen: a change of any of these breaks every index and every peer of another version.
VECTORS = {
    "sha256": [
        "4f59fe3a10051db2a4e7131d90a6a132",
        "76d8cbee12e242d5fa21aeb9cd3d91ea",
        "2bdce8a45d81801025bfd11128d2c77f",
        "e012727b890db1d5b6258c49ac11a3d1",
    ],
    "sha256_cbor": [
        "afd26a4d131700408b82d1694ecb026b",
        "57b7dbfb316c2d9f1b2ffd86af3f5a68",
        "e311b550882fb884d587cc3b79f8522d",
        "d5910d13853c2b5e6a216a96abfbc9df",
    ],
    "xxhash": [
        "a769ab54d9ed10c6857e0618371697d6",
        "3e238793ca51cec1c837ed63ae6a3f14",
        "940870295a834934840b8dcac8f609cb",
        "780a06abacd82ec5d65d1407813ad9a8",
    ],
    "xxhash_cbor": [
        "e3d5c006fe09eff173160cf264639f7f",
        "0ef4a921c7370b08e7db55db71ea87da",
        "eb9e983d1553cf37b07f9ec4c8929419",
        "e311263f97ec028982d276bed1496ec9",
    ],
}


def make_root(algorithm=HashAlgorithm.SHA256, **changes):
    values = {"block_size": 16, "lossy_settings": ("kv:float32",)}
    return HashRoot.of(IDENTITY, algorithm=algorithm, **(values | changes))


def field(value):
    """One canonical field, written from the rule: type, length, bytes."""
    if isinstance(value, int):
        return b"i" + struct.pack("<I", 8) + value.to_bytes(8, "little", signed=True)
    tag, body = (b"s", value.encode()) if isinstance(value, str) else (b"b", value)
    return tag + struct.pack("<I", len(body)) + body


def digest(algorithm, data):
    if algorithm.startswith("sha256"):
        return hashlib.sha256(data).digest()[:16]
    return xxhash.xxh3_128(data).digest()


def recomputed_chain(algorithm, salt):
    """Root seed, salted root and block hashes from hashlib, xxhash and cbor2 alone."""
    shape = b"".join(map(field, ["full_attention", 30, 3, 64, 0]))
    identity = b"".join(map(field, ["00" * 32, "float32", "float32", "", shape]))
    head = b"".join(map(field, [algorithm, 1, 16, "kv:float32"]))
    seed = digest(algorithm, field(head) + field(identity))
    parent = digest(algorithm, field(seed) + field(salt))
    chain = [seed, parent]
    for start in (0, 16):
        block = TOKENS[start : start + 16]
        if algorithm.endswith("cbor"):
            body = cbor2.dumps([parent, block], canonical=True)
        else:
            body = parent + b"".join(token.to_bytes(4, "little") for token in block)
        parent = digest(algorithm, body)
        chain.append(parent)
    return chain


# ---------------------------------------------------------------- vectors


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_fixed_vectors(algorithm):
    root = make_root(algorithm)
    chain = [root.seed, root.salted(SALT), *hash_chain(root, TOKENS, SALT)]
    assert [link.hex() for link in chain] == VECTORS[algorithm.value]


@pytest.mark.parametrize("algorithm", HashAlgorithm)
@pytest.mark.parametrize("salt", ["", SALT, "ü"])
def test_an_independent_computation_agrees(algorithm, salt):
    root = make_root(algorithm)
    chain = [root.seed, root.salted(salt), *hash_chain(root, TOKENS, salt)]
    assert chain == recomputed_chain(algorithm.value, salt)


def test_cbor_of_a_block_is_the_plain_rfc_encoding():
    parent = BlockHash(bytes(range(16)))
    body = bytes.fromhex("8250" + parent.hex() + "830018181a00010000")
    expected = hashlib.sha256(body).digest()[:16]
    assert hash_block(HashAlgorithm.SHA256_CBOR, parent, [0, 24, 65536]) == expected


def test_another_process_with_another_hash_seed_agrees():
    code = (
        "from tests.core.test_block_hash import *\n"
        "print([h.hex() for h in hash_chain(make_root(HashAlgorithm.XXHASH_CBOR), TOKENS, SALT)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1234"}
    command = [sys.executable, "-c", code]
    output = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == str(VECTORS["xxhash_cbor"][2:])


# ---------------------------------------------------------------- chains


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.sampled_from(HashAlgorithm))
def test_a_chain_has_one_hash_a_full_block(token_ids, algorithm):
    chain = hash_chain(make_root(algorithm), token_ids)
    assert len(chain) == len(token_ids) // 16
    assert all(len(link) == HASH_BYTES for link in chain)


@given(st.lists(st.integers(0, 99), min_size=48, max_size=48), st.data())
def test_a_changed_token_changes_its_block_and_all_after_it(token_ids, data):
    position = data.draw(st.integers(0, 47))
    changed = [*token_ids]
    changed[position] += 1
    before, after = (hash_chain(make_root(), ids) for ids in (token_ids, changed))
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [block < position // 16 for block in range(3)]


def test_a_chain_continues_from_a_parent():
    root = make_root()
    head, tail = hash_chain(root, TOKENS)
    assert list(iter_chain(root, TOKENS[16:], parent=head)) == [tail]


def test_equal_blocks_at_different_places_differ():
    assert len(set(hash_chain(make_root(), [5] * 64))) == 4


def test_iter_chain_hashes_no_more_than_is_asked_for():
    chain = iter_chain(make_root(), TOKENS)
    assert next(chain) == hash_chain(make_root(), TOKENS[:16])[0]


# ---------------------------------------------------------------- roots


ROOT_CHANGES = {
    "algorithm": {"algorithm": HashAlgorithm.SHA256_CBOR},
    "block size": {"block_size": 32},
    "KV dtype": {"lossy_settings": ("kv:bfloat16",)},
    "one codec more": {"lossy_settings": ("kv:float32", "wire:fp8")},
    "no settings": {"lossy_settings": ()},
}


@pytest.mark.parametrize("change", ROOT_CHANGES.values(), ids=ROOT_CHANGES)
def test_everything_a_root_covers_changes_it(change):
    assert make_root(**change).seed != make_root().seed


def test_another_identity_has_another_root():
    other = replace(IDENTITY, adapter_digest="aa")
    assert HashRoot.of(other).seed != HashRoot.of(IDENTITY).seed


def test_lossy_settings_are_a_set_not_a_sequence():
    assert make_root(lossy_settings=("b", "a")) == make_root(lossy_settings=("a", "b"))
    assert make_root(lossy_settings=("a", "b")) != make_root(lossy_settings=("ab",))


def test_salts_part_chains():
    root = make_root()
    heads = {hash_chain(root, TOKENS, salt)[0] for salt in ("", "a", "b", "a\0")}
    assert len(heads) == 4


@pytest.mark.parametrize(
    ("block_size", "seed", "message"),
    [(0, bytes(16), "0 must be at least 1"), (16, bytes(15), "15 bytes of seed must be 16")],
)
def test_a_damaged_root_is_refused(block_size, seed, message):
    with pytest.raises(ConfigError, match=message):
        HashRoot(HashAlgorithm.SHA256, block_size, seed)


# ---------------------------------------------------------------- misuse


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_that_is_no_uint32_is_refused(token_id):
    with pytest.raises(struct.error):
        hash_block(HashAlgorithm.SHA256, BlockHash(bytes(16)), [token_id])


def test_a_parent_of_another_length_is_our_mistake():
    with pytest.raises(AssertionError, match="parent of 4 bytes"):
        hash_block(HashAlgorithm.SHA256, BlockHash(b"abcd"), [1])
