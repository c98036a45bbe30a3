"""Tokenizers built from GGUF metadata: SmolLM2's stated rules on real prompts, other kinds on small vocabularies."""

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer

from engine.loading.bundle import bundle_digest
from engine.loading.gguf_file import GgufFile
from engine.loading.gguf_tokenizer import build_bundle
from tests.support.oracle import demo_model_path
from tests.support.tiny_gguf import CHAT_TEMPLATE, VOCAB_SIZE, byte_tokens, write_gguf
from tests.support.tiny_models import tiny_model

QUESTIONS = Path(__file__).parents[2] / "data" / "mtbench" / "question.jsonl"
GPT2_WORDS = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
ODD_TEXTS = [
    "",
    " ",
    "a\r\nb\tc\n\n  d",
    "12345 and 3.14159, year 2024",
    "caf\u00e9 vs cafe\u0301",
    "emoji 🙂👩‍👩‍👧 and 中文 عربى हिन्दी",
    "don't we'll I'D",
    "x" * 300,
    "\u00a0\u2003 wide spaces",
    "tab\t\tand   runs    of spaces",
    "<|im_start|>user\nhi<|im_end|>\n",
    "1<|im_end|>2",
    "\u0660\u0661 Arabic digits, \u00bd a half, \u2163",
]


@pytest.fixture(scope="module")
def bundle() -> dict[str, bytes]:
    with GgufFile(demo_model_path()) as file:
        return build_bundle(file)


@pytest.fixture(scope="module")
def tokenizer(bundle: dict[str, bytes]) -> Tokenizer:
    return Tokenizer.from_str(bundle["tokenizer.json"].decode())


@pytest.fixture(scope="module")
def texts() -> list[str]:
    questions = [json.loads(line)["turns"] for line in QUESTIONS.read_text().splitlines()]
    return [turn for turns in questions for turn in turns] + ODD_TEXTS


class StatedTokenizer:
    """SmolLM2's tokenizer from its description: control tokens, single digits, GPT-2's words, ranked merges."""

    def __init__(self, definition: dict[str, Any]) -> None:
        self.vocabulary: dict[str, int] = definition["model"]["vocab"]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(definition["model"]["merges"])}
        self.special = {entry["content"]: entry["id"] for entry in definition["added_tokens"]}
        self.bytes = byte_tokens()

    def encode(self, text: str) -> list[int]:
        pattern = "(" + "|".join(re.escape(content) for content in self.special) + ")"
        ids: list[int] = []
        for piece in re.split(pattern, text):
            if piece in self.special:
                ids.append(self.special[piece])
            else:
                ids += [i for part in regex.split(r"(\p{N})", piece) for i in self._words(part)]
        return ids

    def _words(self, text: str) -> list[int]:
        return [
            self.vocabulary[symbol]
            for word in GPT2_WORDS.findall(text)
            for symbol in self._merge([self.bytes[byte] for byte in word.encode()])
        ]

    def _merge(self, symbols: list[str]) -> list[str]:
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]
        return symbols


@pytest.mark.public_case("B46")
def test_token_ids_follow_the_stated_rules(
    bundle: dict[str, bytes], tokenizer: Tokenizer, texts: list[str]
) -> None:
    stated = StatedTokenizer(json.loads(bundle["tokenizer.json"]))
    for text in texts:
        assert tokenizer.encode(text).ids == stated.encode(text), text


def test_decoding_gives_the_text_back(tokenizer: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_random_text_survives(tokenizer: Tokenizer) -> None:
    source = random.Random(5)
    alphabet = "ab \n\t0123.,;é中🙂'"
    for _ in range(200):
        text = "".join(source.choices(alphabet, k=source.randint(0, 60)))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_digit_is_a_token(tokenizer: Tokenizer) -> None:
    encoding = tokenizer.encode("In 1969, 384400 km")
    digits = [token for token in encoding.tokens if any(c.isdigit() for c in token)]
    assert "".join(digits) == "1969384400"
    assert all(len(token) == 1 for token in digits)


def test_control_tokens_are_single_and_special(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"


def test_known_ids_of_a_chat_prompt(tokenizer: Tokenizer) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    assert tokenizer.encode(prompt).ids == [
        1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198,
    ]  # fmt: skip


def test_nothing_is_put_around_a_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hi", add_special_tokens=True).ids == tokenizer.encode("hi").ids
    assert len(tokenizer.encode("").ids) == 0


def test_text_files_of_the_demo_model(bundle: dict[str, bytes]) -> None:
    assert sorted(bundle) == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads(bundle["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["add_bos_token"] is False
    assert config["model_max_length"] == 8192
    assert config["chat_template"].encode() == bundle["chat_template.jinja"]
    assert "<|im_start|>assistant" in config["chat_template"]
    generation = json.loads(bundle["generation_config.json"])
    assert generation == {"bos_token_id": 1, "eos_token_id": [2]}


def test_the_bundle_is_the_same_in_every_process(bundle: dict[str, bytes]) -> None:
    with GgufFile(demo_model_path()) as file:
        assert bundle_digest(build_bundle(file)) == bundle_digest(bundle)


def small_bundle(
    tmp_path: Path, pre_tokenizer: str = "smollm", **metadata: Any
) -> dict[str, bytes]:
    model = tiny_model("llama", vocab_size=VOCAB_SIZE)
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    path = write_gguf(model, tmp_path / "m.gguf", pre_tokenizer=pre_tokenizer, metadata=keys)
    with GgufFile(path) as file:
        return build_bundle(file)


def small_tokenizer(tmp_path: Path, pre_tokenizer: str = "smollm", **metadata: Any) -> Tokenizer:
    return Tokenizer.from_str(
        small_bundle(tmp_path, pre_tokenizer, **metadata)["tokenizer.json"].decode()
    )


_GPT2_END = ["Ġcd", "'ll", "ĠÃ©", "!!", "ĊĊ"]
_LLAMA3_END = ["Ġcd", "'ll", "ĠÃ©", "!!ĊĊ"]


@pytest.mark.parametrize(
    ("pre_tokenizer", "words"),
    [
        ("smollm", ["ab", "1", "2", "3", "4", *_GPT2_END]),
        ("gpt-2", ["ab", "1234", *_GPT2_END]),
        ("default", ["ab", "1234", *_GPT2_END]),
        ("llama-bpe", ["ab", "123", "4", *_LLAMA3_END]),
        ("qwen2", ["ab", "1", "2", "3", "4", *_LLAMA3_END]),
    ],
)
def test_named_pre_tokenizers_split_as_their_models_do(
    pre_tokenizer: str, words: list[str], tmp_path: Path
) -> None:
    splitter = small_tokenizer(tmp_path, pre_tokenizer).pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str("ab1234 cd'll é!!\n\n")] == words


def test_accents_are_composed_for_qwen_only(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    (tmp_path / "a").mkdir()
    qwen = small_tokenizer(tmp_path / "a", "qwen2")
    assert qwen.encode(composed).ids == qwen.encode(decomposed).ids
    (tmp_path / "b").mkdir()
    smollm = small_tokenizer(tmp_path / "b", "smollm")
    assert smollm.encode(composed).ids != smollm.encode(decomposed).ids


def test_merges_apply_in_their_order(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(tmp_path)
    assert tokenizer.encode("hello world").tokens == ["hello", "Ġw", "or", "l", "d"]
    assert tokenizer.encode("12").tokens == ["1", "2"]  # split before any merge


def test_user_defined_tokens_match_whole_but_are_not_special(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(tmp_path)
    ids = tokenizer.encode("a<tool>b").ids
    assert 3 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"


def test_first_and_last_token_when_the_model_wants_them(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(tmp_path, add_bos_token=True, add_eos_token=True)
    ids = tokenizer.encode("a").ids
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert tokenizer.encode("a", add_special_tokens=False).ids == ids[1:-1]


def test_llama3_files_begin_texts_unless_they_say_otherwise(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert small_tokenizer(tmp_path / "a", "llama-bpe").encode("a").ids[0] == 1
    (tmp_path / "b").mkdir()
    silent = small_tokenizer(tmp_path / "b", "llama-bpe", add_bos_token=False)
    assert silent.encode("a").ids[0] != 1


@pytest.mark.public_case("B45")
def test_ends_of_text_turn_and_message(tmp_path: Path) -> None:
    bundle = small_bundle(tmp_path, eot_token_id=0, eom_token_id=9)
    assert json.loads(bundle["generation_config.json"])["eos_token_id"] == [2, 0, 9]


def test_chat_template_reaches_both_files(tmp_path: Path) -> None:
    bundle = small_bundle(tmp_path)
    assert bundle["chat_template.jinja"].decode() == CHAT_TEMPLATE
    assert json.loads(bundle["tokenizer_config.json"])["chat_template"] == CHAT_TEMPLATE


def sentence_piece_metadata() -> dict[str, Any]:
    """A small SentencePiece vocabulary: unknown, controls, 256 bytes, characters and pieces by score."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(pieces)
    words = ["▁t", "he", "▁the", "er", "in", "▁a", "ing", "▁the" + "re"]
    characters = [*"▁abcdefghijklmnopqrstuvwxyz"]
    ranked = [(piece, float(-rank)) for rank, piece in enumerate([*words, *characters])]
    for piece, score in reversed(ranked):  # so that the order of ids is not that of scores
        pieces.append(piece)
        types.append(1)
        scores.append(score)
    return {
        "model": "llama",
        "pre": None,
        "tokens": pieces,
        "token_type": types,
        "scores": scores,
        "merges": None,
        "unknown_token_id": 0,
    }


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(tmp_path, **sentence_piece_metadata())
    assert tokenizer.encode("the ring").tokens == ["<s>", "▁the", "▁", "r", "ing"]
    assert tokenizer.encode("her", add_special_tokens=False).tokens == ["▁", "he", "r"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("the ring", "a  é 🙂 there", "", "in\nthe"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_sentence_piece_equals_merging_the_best_pair_again_and_again(tmp_path: Path) -> None:
    metadata = sentence_piece_metadata()
    tokenizer = small_tokenizer(tmp_path, **metadata)
    ranks = dict(zip(metadata["tokens"], metadata["scores"], strict=True))
    source = random.Random(2)
    for _ in range(100):
        text = "".join(source.choices("herhering ta", k=source.randint(1, 25)))
        symbols = list("▁" + text.replace(" ", "▁"))
        while True:
            pairs = [a + b for a, b in pairwise(symbols)]
            known = [pair for pair in pairs if pair in ranks]
            if not known:
                break
            best = max(known, key=lambda pair: ranks[pair])
            at = pairs.index(best)
            symbols[at : at + 2] = [best]
        assert tokenizer.encode(text, add_special_tokens=False).tokens == symbols, text


def test_sentence_piece_without_a_leading_space(tmp_path: Path) -> None:
    metadata = {**sentence_piece_metadata(), "add_space_prefix": False}
    tokenizer = small_tokenizer(tmp_path, **metadata)
    assert tokenizer.encode("in", add_special_tokens=False).tokens == ["in"]
    assert tokenizer.decode(tokenizer.encode(" in").ids) == " in"


def test_bundle_digest_covers_names_lengths_and_contents() -> None:
    digests = {
        bundle_digest(bundle)
        for bundle in ({}, {"a": b""}, {"a": b"b"}, {"ab": b""}, {"a": b"", "b": b""}, {"b": b"a"})
    }
    assert len(digests) == 6
    assert bundle_digest({"a": b"1", "b": b"2"}) == bundle_digest({"b": b"2", "a": b"1"})
