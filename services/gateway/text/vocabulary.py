"""What each token id stands for as bytes and as text, for one tokenizer.

Byte-level vocabularies (GPT-2 and its descendants) name each byte by a printable character; a token's bytes do not
depend on its neighbours, so one table serves streams, log-probabilities and offsets. Other vocabularies
(SentencePiece with `▁` and `<0x0A>`) have per-token bytes too, but their decoder looks at neighbours, so streams of
theirs are decoded by the tokenizer itself (see `detokenizer`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def _byte_of_character() -> Mapping[str, int]:
    """The byte that each printable stand-in of a byte-level vocabulary means."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return table


class Vocabulary:
    """The tokens of one tokenizer. Immutable; shared by all requests of a model."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.is_byte_level = _decodes_bytes(tokenizer_json.get("decoder"))
        self._bytes: dict[int, bytes] = {}
        added = tokenizer.get_added_tokens_decoder()
        self.added_token_ids = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.longest_token_bytes = max(
            (len(name.encode()) for name in tokenizer.get_vocab(with_added_tokens=True)), default=1
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; empty for an id without a token."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._compute_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """A token alone, for log-probabilities: its text, or `bytes:\\xe6...` when it is no whole character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _compute_bytes(self, token_id: int) -> bytes:
        name = self.tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if self.is_byte_level:
            table = _byte_of_character()
            values = [table.get(character) for character in name]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else name.encode()
        byte = _BYTE_TOKEN.fullmatch(name)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return name.replace("▁", " ").encode()


def _decodes_bytes(decoder: Any) -> bool:
    """Whether this decoder section concatenates bytes token by token."""
    if not isinstance(decoder, Mapping):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders") or []
        return len(parts) == 1 and _decodes_bytes(parts[0])
    return decoder.get("type") == "ByteLevel"
