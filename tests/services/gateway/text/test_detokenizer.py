"""Detokenising one token at a time gives the text of all tokens, and never half a character."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.gateway.text.detokenizer import (
    ByteLevelDetokenizer,
    WindowDetokenizer,
    make_detokenizer,
)
from services.gateway.text.vocabulary import Vocabulary
from tests.support.text_bundles import demo_bundle, small_bundle

TEXT = "aé 👩‍🚀 𝒳 ไทย 歪. naïve \U0001f468‍\U0001f469‍\U0001f467"


def vocabulary_of(bundle: dict[str, bytes]) -> Vocabulary:
    described = bundle["tokenizer.json"].decode()
    return Vocabulary(Tokenizer.from_str(described), json.loads(described))


def sentence_piece_like() -> Vocabulary:
    """`▁` for spaces and byte fallback, as Llama 2 and Mistral have it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁world", "lo", "h", "e", "l", "o", "é", "▁歪"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: place for place, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return Vocabulary(tokenizer, json.loads(tokenizer.to_str()))


SMALL = vocabulary_of(small_bundle())
DEMO = vocabulary_of(demo_bundle())
PIECES = sentence_piece_like()


def run(vocabulary: Vocabulary, ids: list[int], skip: bool) -> list[str]:
    detokenizer = make_detokenizer(vocabulary, skip_special=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def whole(vocabulary: Vocabulary, ids: list[int], skip: bool) -> str:
    """The full decode, less a character that the last token left unfinished."""
    text = vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)
    data = b"".join(
        vocabulary.token_bytes(i) for i in ids if not (skip and i in vocabulary.special_ids)
    )
    return text[:-1] if _ends_unfinished(data) else text


def _ends_unfinished(data: bytes) -> bool:
    """Whether some further bytes would complete a last character."""
    for length in (1, 2, 3):
        tail = data[-length:]
        if tail and tail[0] >= 0xC2:
            try:
                tail.decode()
            except UnicodeDecodeError as error:
                return error.reason == "unexpected end of data"
    return False


@pytest.mark.parametrize("vocabulary", [SMALL, DEMO], ids=["small", "demo"])
@given(data=st.data())
def test_random_tokens_give_the_full_decode(vocabulary, data):
    ids = data.draw(st.lists(st.integers(0, vocabulary.size - 1), max_size=40))
    skip = data.draw(st.booleans())
    assert "".join(run(vocabulary, ids, skip)) == whole(vocabulary, ids, skip)


@pytest.mark.parametrize("vocabulary", [SMALL, DEMO, PIECES], ids=["small", "demo", "pieces"])
def test_every_prefix_of_a_text_is_whole_characters(vocabulary):
    if vocabulary is PIECES:
        ids = [vocabulary.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in TEXT.encode()]
    else:
        ids = vocabulary.tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert "".join(run(vocabulary, ids, True)) == TEXT
    for length in range(len(ids)):
        deltas = run(vocabulary, ids[:length], True)
        assert TEXT.startswith("".join(deltas))
        assert not any("\ufffd" in delta for delta in deltas)


@given(st.lists(st.sampled_from(["▁hello", "▁world", "lo", "▁", "é", "▁歪", "</s>"]), max_size=20))
def test_pieces_that_look_at_neighbours_give_the_full_decode(names):
    ids = [PIECES.tokenizer.token_to_id(name) for name in names]
    deltas = run(PIECES, ids, True)
    assert "".join(deltas) == PIECES.tokenizer.decode(ids, skip_special_tokens=True)


def test_the_byte_level_path_is_taken_where_it_is_exact():
    assert isinstance(make_detokenizer(DEMO, skip_special=True), ByteLevelDetokenizer)
    assert isinstance(make_detokenizer(PIECES, skip_special=True), WindowDetokenizer)


def test_bytes_that_nothing_can_complete_are_shown_as_soon_as_they_are_known():
    bad, letter = SMALL.tokenizer.token_to_id("ÿ"), SMALL.tokenizer.token_to_id("a")
    assert SMALL.token_bytes(bad) == b"\xff"
    assert run(SMALL, [bad, bad, letter], True) == ["\ufffd", "\ufffd", "a", ""]


def test_endless_invalid_bytes_do_not_grow_the_window():
    detokenizer = WindowDetokenizer(PIECES, skip_special=True)
    bad = PIECES.tokenizer.token_to_id("<0xFF>")
    text = "".join(detokenizer.push(bad) for _ in range(200))
    assert set(text) == {"\ufffd"}
    assert len(detokenizer._window) < 20


def test_special_tokens_leave_no_text_unless_asked_for():
    ids = [SMALL.tokenizer.token_to_id(name) for name in ("<|im_start|>", "a", "<|im_end|>")]
    assert "".join(run(SMALL, ids, True)) == "a"
    assert "".join(run(SMALL, ids, False)) == "<|im_start|>a<|im_end|>"


def test_a_token_that_is_no_whole_character_is_named_by_its_bytes():
    first, *_ = SMALL.tokenizer.encode("👩", add_special_tokens=False).ids
    assert SMALL.token_text(first).startswith("bytes:\\xf0")
    assert SMALL.token_bytes(first)[:1] == b"\xf0"


def test_an_unknown_id_has_no_bytes():
    assert SMALL.token_bytes(10**6) == b""
