"""Fields that other servers act on and this one does not: refused by name when their value asks for something.

Ignoring them would give a client an answer to another question. A value that asks for nothing (null, an empty list, the
default) passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from core.errors import InvalidRequest
from services.gateway.http_errors import UnsupportedParameter
from services.gateway.openai.validation import shown


def _any(value: Any) -> bool:
    return value is not None


def _truthy(value: Any) -> bool:
    return bool(value)


def _not(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in neutral


def _asks_for_format(value: Any) -> bool:
    return value is not None and not (isinstance(value, Mapping) and value.get("type") == "text")


def _not_text_only(value: Any) -> bool:
    return value is not None and value != ["text"]


_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "response_format": (_asks_for_format, "only {'type': 'text'} is served"),
    "structured_outputs": (_any, "structured outputs are not served"),
    "guided_json": (_any, "structured outputs are not served"),
    "guided_regex": (_any, "structured outputs are not served"),
    "guided_choice": (_any, "structured outputs are not served"),
    "guided_grammar": (_any, "structured outputs are not served"),
    "tools": (_any, "tools are not served"),
    "tool_choice": (_not("none"), "tools are not served"),
    "functions": (_truthy, "tools are not served"),
    "function_call": (_not("none"), "tools are not served"),
    "modalities": (_not_text_only, "only text is served"),
    "audio": (_any, "only text is served"),
    "documents": (_truthy, "documents are not served; put them in messages"),
    "use_beam_search": (_truthy, "beam search is not served"),
    "best_of": (_not(1), "best_of is not served; use n"),
    "length_penalty": (_not(1, 1.0), "it belongs to beam search, which is not served"),
    "prompt_logprobs": (_any, "log-probabilities of the prompt are not served"),
    "prompt_embeds": (_any, "prompts are text or token ids"),
    "suffix": (_truthy, "filling in the middle is not served"),
    "allowed_token_ids": (_truthy, "use logit_bias"),
    "bad_words": (_truthy, "use logit_bias"),
    "logprob_token_ids": (_truthy, "use top_logprobs"),
    "repetition_detection": (_any, "repetition detection is not served"),
    "thinking_token_budget": (_any, "thinking budgets are not served"),
    "truncation_side": (_not("left"), "prompts are truncated on the left"),
    "chat_template": (_any, "templates come from the model, never from a request"),
    "kv_transfer_params": (_any, "where KV goes is decided here, never by a request"),
    "ec_transfer_params": (_any, "where tensors go is decided here, never by a request"),
    "vllm_xargs": (_truthy, "no extension arguments are known"),
    "media_io_kwargs": (_truthy, "only text is served"),
    "mm_processor_kwargs": (_truthy, "only text is served"),
}
_CHAT_ONLY: dict[str, tuple[Callable[[Any], bool], str]] = {
    "echo": (_truthy, "only /v1/completions echoes"),
}


def refuse_unsupported(extra: Mapping[str, Any] | None, *, is_chat: bool) -> None:
    """UnsupportedParameter for the first field of `extra` that asks for what is not served."""
    for name, value in (extra or {}).items():
        rule = _REFUSED.get(name) or (_CHAT_ONLY.get(name) if is_chat else None)
        if rule is None:
            continue
        if name == "tools" and value == []:
            raise InvalidRequest("tools must hold at least one tool, got an empty list", param=name)
        asks, why = rule
        if asks(value):
            raise UnsupportedParameter(
                f"{name} is not supported: {why}; got {shown(value)}", param=name
            )
