"""Tokens to text, one at a time, without ever showing half a character.

Promise: the concatenated deltas of one choice are the text of all its tokens, for any cut into deltas, except that a
character which the last token left unfinished is dropped. U+FFFD appears only where the model produced bytes that no
further token could complete. The cost of a token does not grow with the text before it.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from services.gateway.text.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"
_MOST_HELD_TOKENS = 4
"""A UTF-8 character has at most four bytes: what four tokens could not complete is invalid."""


class IncrementalDetokenizer(Protocol):
    """The text of one choice as it grows."""

    def push(self, token_id: int) -> str:
        """The text that this token completes, maybe empty."""

    def finish(self) -> str:
        """What was held and will not change any more."""


def make_detokenizer(vocabulary: Vocabulary, *, skip_special: bool) -> IncrementalDetokenizer:
    """The cheapest detokenizer that is exact for this vocabulary."""
    if vocabulary.is_byte_level:
        return ByteLevelDetokenizer(vocabulary, skip_special=skip_special)
    return WindowDetokenizer(vocabulary, skip_special=skip_special)


class ByteLevelDetokenizer:
    """Concatenates token bytes through an incremental UTF-8 decoder."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._skipped = vocabulary.special_ids if skip_special else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._skipped:
            return ""
        return self._decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """Nothing: what is held is an unfinished character."""
        return ""


class WindowDetokenizer:
    """Decodes the last few tokens again with each new one, for decoders that look at neighbours.

    The window holds the tokens of the last delta (context, whose text is known) and those after it.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._skipped = vocabulary.special_ids if skip_special else frozenset()
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_context
        if text.endswith(REPLACEMENT) and num_held < _MOST_HELD_TOKENS:
            return ""
        if len(text) <= len(self._context_text):
            return ""
        delta = text[len(self._context_text) :]
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._context_text = self._decode(self._window)
        return delta

    def finish(self) -> str:
        """Whole characters that a following unfinished one held back."""
        text = self._decode(self._window)[len(self._context_text) :]
        return text.rstrip(REPLACEMENT)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
