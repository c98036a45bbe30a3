"""The text files of a bundle, built from a GGUF file's metadata.

A GGUF file carries vocabulary, merges or scores, token types, the name of a pre-tokenizer, and a chat template. They
become a tokenizer in the JSON format of Hugging Face's `tokenizers`, so that gateways know one format only. The
pre-tokenizer is named, not described, in the file: the table below spells out each name that can be served.
"""

from __future__ import annotations

import json
from typing import Any

from core.errors import ModelLoadError
from engine.loading.gguf_config import GgufMetadata
from engine.loading.gguf_file import GgufFile

Json = dict[str, Any]

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = (
    2,
    3,
    4,
    6,
)  # token types of the format; 1 is a plain token

_SPACE = "\u2581"  # what SentencePiece writes for a space

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def build_bundle(file: GgufFile) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, generation_config.json, and chat_template.jinja when there is one."""
    metadata = GgufMetadata(file)
    tokens = _tokens(metadata)
    bundle = {
        "tokenizer.json": _encode(_tokenizer(metadata, tokens)),
        "tokenizer_config.json": _encode(_tokenizer_config(metadata, tokens)),
        "generation_config.json": _encode(_generation_config(metadata)),
    }
    if metadata.has("tokenizer.chat_template"):
        bundle["chat_template.jinja"] = metadata.text("tokenizer.chat_template").encode()
    return bundle


def _encode(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _tokens(metadata: GgufMetadata) -> list[str]:
    tokens = [str(token) for token in metadata.list_of("tokenizer.ggml.tokens", str)]
    if not tokens:
        raise ModelLoadError("metadata lacks tokenizer.ggml.tokens: the file has no tokenizer")
    return tokens


def _token_types(metadata: GgufMetadata, num_tokens: int) -> list[int]:
    types = [int(str(kind)) for kind in metadata.list_of("tokenizer.ggml.token_type", int)]
    if types and len(types) != num_tokens:
        raise ModelLoadError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {num_tokens} tokens"
        )
    return types or [1] * num_tokens


def _tokenizer(metadata: GgufMetadata, tokens: list[str]) -> Json:
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        known = ", ".join(sorted(_BUILDERS))
        raise ModelLoadError(f"tokenizer.ggml.model: {kind!r} is unknown; known: {known}")
    types = _token_types(metadata, len(tokens))
    parts = _BUILDERS[kind](metadata, tokens, types)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "post_processor": _post_processor(metadata, tokens),
        **parts,
    }


def _added_tokens(tokens: list[str], types: list[int]) -> list[Json]:
    """Control tokens (special) and user-defined ones: matched as a whole before any splitting."""
    return [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in (_CONTROL, _UNKNOWN),
        }
        for token_id, kind in enumerate(types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _byte_pair_parts(metadata: GgufMetadata, tokens: list[str], types: list[int]) -> Json:
    """Byte-level BPE (`gpt2`): merges as they are, text mapped to printable bytes."""
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelLoadError(f"tokenizer.ggml.pre: {name!r} is unknown; known: {known}")
    merges = [str(merge).split(" ") for merge in metadata.list_of("tokenizer.ggml.merges", str)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    broken = next((m for m in merges if len(m) != 2 or "".join(m) not in vocabulary), None)
    if broken is not None:
        raise ModelLoadError(
            f"tokenizer.ggml.merges: {' '.join(broken)!r} is not a merge of tokens"
        )
    return {
        "normalizer": {"type": "NFC"} if name in _NFC_NAMES else None,
        "pre_tokenizer": _PRE_TOKENIZERS[name],
        "decoder": _byte_level(False),
        "model": _bpe_model(vocabulary, merges, ignore_merges=name in _WHOLE_WORD_NAMES),
    }


def _sentence_piece_parts(metadata: GgufMetadata, tokens: list[str], types: list[int]) -> Json:
    """SentencePiece BPE (`llama`): merges follow from scores, unknown characters fall back to byte tokens."""
    scores = [float(str(score)) for score in metadata.list_of("tokenizer.ggml.scores", float)]
    if len(scores) != len(tokens):
        raise ModelLoadError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges_by_score(tokens, types, scores, vocabulary)
    unknown = tokens[metadata.integer("tokenizer.ggml.unknown_token_id", 0)]
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps = ([{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []) + [replace]
    restore = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe_model(vocabulary, merges, unknown=unknown, byte_fallback=True),
    }


def _merges_by_score(
    tokens: list[str], types: list[int], scores: list[float], vocabulary: dict[str, int]
) -> list[list[str]]:
    """Every way to make a piece from two pieces, best score first, then by the parts' ids."""
    merges: list[tuple[float, int, int, list[str]]] = []
    plain = [i for i, kind in enumerate(types) if kind not in (_UNKNOWN, _CONTROL, _BYTE)]
    for token_id in plain:
        token = tokens[token_id]
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[token_id], left, right, [token[:cut], token[cut:]]))
    merges.sort(key=lambda merge: merge[:3])
    return [merge[3] for merge in merges]


def _bpe_model(
    vocabulary: dict[str, int],
    merges: list[list[str]],
    unknown: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def _byte_level(use_regex: bool) -> Json:
    """Bytes to printable characters; with the regex, text is first split as GPT-2 does."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> Json:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


_SINGLE_DIGITS = _sequence({"type": "Digits", "individual_digits": True}, _byte_level(True))
_LLAMA3 = _sequence(_split(_LLAMA3_SPLIT), _byte_level(False))
_QWEN2 = _sequence(_split(_QWEN2_SPLIT), _byte_level(False))

_PRE_TOKENIZERS: dict[str, Json] = {
    "default": _byte_level(True),
    "gpt-2": _byte_level(True),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_NFC_NAMES = frozenset({"qwen2", "deepseek-r1-qwen"})
_WHOLE_WORD_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3", "smaug-bpe"})
"""Pre-tokenizers whose words are looked up whole before they are merged."""

_BUILDERS = {"gpt2": _byte_pair_parts, "llama": _sentence_piece_parts}


def _adds(metadata: GgufMetadata, which: str) -> bool:
    """Whether `bos` or `eos` is put around every text: as the file says, else as its tokenizer kind does."""
    is_begin = which == "bos"
    by_kind = metadata.text("tokenizer.ggml.model") == "llama" or (
        metadata.text("tokenizer.ggml.pre", "default") in _WHOLE_WORD_NAMES
    )
    return metadata.flag(f"tokenizer.ggml.add_{which}_token", is_begin and by_kind)


def _post_processor(metadata: GgufMetadata, tokens: list[str]) -> Json | None:
    """Puts the first and last token around a text, when the model wants them."""
    names = {
        which: _special(metadata, tokens, which)
        for which in ("bos", "eos")
        if _adds(metadata, which)
    }
    special = {which: name for which, name in names.items() if name is not None}
    if not special:
        return None
    pieces: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if "bos" in special:
        pieces.insert(0, {"SpecialToken": {"id": special["bos"], "type_id": 0}})
    if "eos" in special:
        pieces.append({"SpecialToken": {"id": special["eos"], "type_id": 0}})
    pair = [*pieces, {"Sequence": {"id": "B", "type_id": 1}}]
    ids = {name: metadata.integer(f"tokenizer.ggml.{w}_token_id") for w, name in special.items()}
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": pair,
        "special_tokens": {
            name: {"id": name, "ids": [token_id], "tokens": [name]}
            for name, token_id in ids.items()
        },
    }


def _special(metadata: GgufMetadata, tokens: list[str], which: str) -> str | None:
    """The text of the token that a `..._token_id` key names, None when the file has no such key."""
    key = f"tokenizer.ggml.{which}_token_id"
    if not metadata.has(key):
        return None
    token_id = metadata.integer(key)
    if not 0 <= token_id < len(tokens):
        raise ModelLoadError(f"{key}: {token_id} is not in a vocabulary of {len(tokens)}")
    return tokens[token_id]


def _tokenizer_config(metadata: GgufMetadata, tokens: list[str]) -> Json:
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.integer("{arch}.context_length"),
        "add_bos_token": _adds(metadata, "bos"),
        "add_eos_token": _adds(metadata, "eos"),
    }
    for which, field in _SPECIAL_FIELDS.items():
        text = _special(metadata, tokens, which)
        if text is not None:
            config[field] = text
    if metadata.has("tokenizer.chat_template"):
        config["chat_template"] = metadata.text("tokenizer.chat_template")
    return config


_SPECIAL_FIELDS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


def _generation_config(metadata: GgufMetadata) -> Json:
    keys = {which: f"tokenizer.ggml.{which}_token_id" for which in ("bos", "eos", "eot", "eom")}
    ids = {which: metadata.integer(key) for which, key in keys.items() if metadata.has(key)}
    ends = [ids[which] for which in ("eos", "eot", "eom") if which in ids]
    config: Json = {"eos_token_id": list(dict.fromkeys(ends))}
    if "bos" in ids:
        config["bos_token_id"] = ids["bos"]
    return config
