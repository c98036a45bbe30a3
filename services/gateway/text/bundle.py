"""A model's text side, built from the files that its workers hand out: no model folder, no torch.

Owns tokenizer, chat template and generation defaults of one bundle digest. Immutable after construction and shared by
all requests; encoding long texts releases the interpreter, so callers may do it in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from core.errors import ContextTooLong, InvalidRequest, ModelLoadError
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.control_tokens import ControlTokenGuard
from services.gateway.text.vocabulary import Vocabulary

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a model's generation_config says when a request says nothing; None is the API's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class TextBundle:
    """Tokenizer, chat template and generation defaults of one model."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        tokenizer_json = _json_file(files, "tokenizer.json", required=True)
        config = _json_file(files, "tokenizer_config.json")
        try:
            self.tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise ModelLoadError(f"tokenizer.json cannot be read: {error}") from None
        self.vocabulary = Vocabulary(self.tokenizer, tokenizer_json)
        self.defaults = _defaults(_json_file(files, "generation_config.json"))
        special_tokens = _special_tokens(config)
        source = _template_source(files, config)
        self._template = ChatTemplate(source, special_tokens) if source else None
        self._guard = ControlTokenGuard(tokenizer_json, self.vocabulary.added_token_ids)
        adds_bos = config.get("add_bos_token") is True
        bos = self.tokenizer.token_to_id(special_tokens.get("bos_token", "")) if adds_bos else None
        self._bos_token_id: int | None = bos

    def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int = 0) -> list[int]:
        """Token ids of a raw text, control tokens included. max_tokens: see `refuse_if_too_long`; 0 for no limit."""
        self.refuse_if_too_long(text, max_tokens)
        # The batch call lets other threads run, and keeps no offsets.
        (encoded,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        bos = self._bos_token_id
        if add_special_tokens and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        max_tokens: int = 0,
    ) -> list[int]:
        """Token ids of a conversation; control tokens come from the template alone."""
        if self._template is None:
            message = "messages: this model has no chat template; use /v1/completions"
            raise InvalidRequest(message, param="messages")
        for message_text in _strings(messages):
            self.refuse_if_too_long(message_text, max_tokens)
        (safe_messages, safe_variables), is_marked = self._guard.mark(
            [list(messages), variables or {}]
        )
        text = self._template.render(
            safe_messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=safe_variables,
        )
        self.refuse_if_too_long(text, max_tokens)
        if not is_marked:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return self._guard.encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special)

    def refuse_if_too_long(self, text: str, max_tokens: int) -> None:
        """Raise ContextTooLong when even the longest tokens could not bring `text` under `max_tokens`.

        So a text of many megabytes is refused without being tokenised.
        """
        least = len(text) // self.vocabulary.longest_token_bytes
        if 0 < max_tokens < least:
            raise ContextTooLong(
                f"This model's maximum context length is {max_tokens} tokens. However, your prompt "
                f"contains at least {least} input tokens. Please reduce the length of the input.",
                param="input_tokens",
            )


def _json_file(files: Mapping[str, bytes], name: str, *, required: bool = False) -> dict[str, Any]:
    data = files.get(name)
    if data is None:
        if required:
            raise ModelLoadError(f"the worker's model bundle has no {name}")
        return {}
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ModelLoadError(f"{name} of the worker's model bundle is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{name} of the worker's model bundle is no JSON object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in _SPECIAL_TOKEN_KEYS:
        value = config.get(key)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[key] = text
    return found


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str:
    """The default template; a file of its own wins over the one in tokenizer_config.json."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _defaults(config: Mapping[str, Any]) -> GenerationDefaults:
    """The sampling defaults of a generation_config; what is no number says nothing."""

    def number(key: str) -> float | None:
        value = config.get(key)
        return float(value) if isinstance(value, int | float) else None

    top_k = number("top_k")
    return GenerationDefaults(
        temperature=number("temperature"),
        top_p=number("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
