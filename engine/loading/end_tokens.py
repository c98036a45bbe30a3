"""Which tokens end an answer, from a bundle's text files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.loading.json_reader import JsonReader, parse_object


def end_token_ids(bundle: Mapping[str, bytes], config: JsonReader | None) -> tuple[int, ...]:
    """Those of generation_config.json (of config.json where it names none), and the tokenizer's own.

    A model may end a text, a turn and a message with different tokens; each of them ends an answer.
    """
    ids = _reader(bundle, "generation_config.json").token_ids("eos_token_id")
    if not ids and config is not None:
        ids = config.token_ids("eos_token_id")
    return tuple(dict.fromkeys((*ids, *_tokenizer_end(bundle))))


def _reader(bundle: Mapping[str, bytes], name: str) -> JsonReader:
    return JsonReader(name, parse_object(bundle.get(name, b"{}"), name))


def _tokenizer_end(bundle: Mapping[str, bytes]) -> tuple[int, ...]:
    """The id of the tokenizer's `eos_token`, if it names one that the vocabulary holds."""
    config = parse_object(bundle.get("tokenizer_config.json", b"{}"), "tokenizer_config.json")
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return ()
    tokenizer = parse_object(bundle["tokenizer.json"], "tokenizer.json")
    added = {entry.get("content"): entry.get("id") for entry in tokenizer.get("added_tokens") or []}
    token_id = added.get(text, _vocabulary(tokenizer).get(text))
    return (token_id,) if isinstance(token_id, int) else ()


def _vocabulary(tokenizer: Mapping[str, Any]) -> Mapping[str, Any]:
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    return vocabulary if isinstance(vocabulary, dict) else {}
