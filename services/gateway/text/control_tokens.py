"""Keeps words of a client from becoming control tokens of the model.

A message that contains the text `<|im_end|>` must be read as those ten characters, or a client could close its turn and
forge another speaker's. Only the template may write control tokens. So before rendering each control text inside
client strings is broken by a mark; after rendering, whole control texts are therefore the template's own. They are
exchanged for aliases, the marks are removed, and the text is encoded by a twin of the tokenizer that knows the control
tokens by their aliases only. Pre-tokenisation and normalisation are the twin's, so they see the whole text at once.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from core.errors import InvalidRequest, ModelLoadError

_MARK = "\ufdd0"
_OPEN, _CLOSE = "\ufdd1", "\ufdd2"
"""Unicode noncharacters: never in text that is meant for others, and refused in client strings that need marks."""


class ControlTokenGuard:
    """Marks control texts in client strings, and encodes rendered text in which some are marked."""

    def __init__(
        self, tokenizer_json: Mapping[str, Any], added_token_ids: Mapping[str, int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._ids = dict(added_token_ids)
        texts = sorted((text for text in self._ids if len(text) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._twin: Tokenizer | None = None

    def mark(self, value: Any) -> tuple[Any, bool]:
        """`value` with every control text in its strings broken, and whether there was any."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            marked = {key: self.mark(item) for key, item in value.items()}
            return {k: item for k, (item, _) in marked.items()}, any(f for _, f in marked.values())
        if isinstance(value, list):
            items = [self.mark(item) for item in value]
            return [item for item, _ in items], any(found for _, found in items)
        return value, False

    def encode(self, rendered: str) -> list[int]:
        """The token ids of a rendered prompt in which client control texts are marked."""
        assert self._pattern is not None
        twin = self._twin = self._twin or self._make_twin()
        aliased = self._pattern.sub(lambda found: self._alias(found[0]), rendered)
        text = aliased.replace(_MARK, "")
        (encoded,) = twin.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    @staticmethod
    def unmark(rendered: str) -> str:
        """The rendered prompt as people should read it."""
        return rendered.replace(_MARK, "")

    def _mark_text(self, text: str) -> tuple[str, bool]:
        if self._pattern is None or self._pattern.search(text) is None:
            return text, False
        if any(mark in text for mark in (_MARK, _OPEN, _CLOSE)):
            message = "messages: U+FDD0 to U+FDD2 may not stand beside control tokens in one text"
            raise InvalidRequest(message, param="messages")
        # A control text may overlap another one's beginning, so break until none is left.
        while self._pattern.search(text) is not None:
            text = self._pattern.sub(lambda found: found[0][0] + _MARK + found[0][1:], text)
        return text, True

    def _alias(self, control_text: str) -> str:
        return f"{_OPEN}{self._ids[control_text]}{_CLOSE}"

    def _make_twin(self) -> Tokenizer:
        """The tokenizer with every control token renamed to its alias, ids unchanged."""
        described = copy.deepcopy(dict(self._tokenizer_json))
        aliases = {text: self._alias(text) for text in self._ids if len(text) > 1}
        for token in described.get("added_tokens") or []:
            token["content"] = aliases.get(token["content"], token["content"])
        model = described["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {aliases.get(text, text): i for text, i in vocabulary.items()}
        elif isinstance(vocabulary, list):
            model["vocab"] = [[aliases.get(text, text), score] for text, score in vocabulary]
        if model.get("unk_token") in aliases:
            model["unk_token"] = aliases[model["unk_token"]]
        described["post_processor"] = None
        twin = Tokenizer.from_str(json.dumps(described))
        for text, alias in aliases.items():
            if twin.token_to_id(alias) != self._ids[text]:
                raise ModelLoadError(f"the tokenizer gives {text!r} no fixed id")
        return twin
