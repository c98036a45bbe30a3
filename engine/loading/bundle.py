"""The files that text handling needs: tokenizer, chat template, generation config. Held as bytes, sent to gateways."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

BUNDLE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""What is taken of a model folder, as far as it is there."""


def bundle_digest(bundle: Mapping[str, bytes]) -> str:
    """sha256 hex over (name, length, content) of the files in order of their names."""
    state = hashlib.sha256()
    for name in sorted(bundle):
        content = bundle[name]
        state.update(f"{len(name)}:{name}{len(content)}:".encode())
        state.update(content)
    return state.hexdigest()
