"""Prompts of /v1/completions: one or many, texts or token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.errors import InvalidRequest
from services.gateway.models import ServedModel
from services.gateway.openai.validation import check_type


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. text: as the client wrote it, None where it gave token ids."""

    token_ids: list[int]
    text: str | None = None


def read_prompts(
    value: Any,
    model: ServedModel,
    *,
    add_special_tokens: bool,
    most: int,
    refuses_long: bool = True,
) -> list[Prompt]:
    """The prompts of a request, each with at least one token; InvalidRequest names the place of what is wrong.

    refuses_long: whether a text that cannot fit the model is refused before it is tokenised.
    """
    limit = model.max_model_len if refuses_long else 0
    return [
        _prompt(path, item, model, add_special_tokens, limit) for path, item in _items(value, most)
    ]


def _items(value: Any, most: int) -> list[tuple[str, Any]]:
    """Each prompt with its path."""
    if isinstance(value, str):
        return [("prompt", value)]
    check_type("prompt", value, list, "a text, a list of texts or a list of token ids")
    if not value:
        raise InvalidRequest("prompt must not be empty, got a list of 0 entries", param="prompt")
    if isinstance(value[0], int):
        return [("prompt", value)]
    if len(value) > most:
        raise InvalidRequest(
            f"prompt must hold at most {most} prompts, got {len(value)}", param="prompt"
        )
    return [(f"prompt[{place}]", item) for place, item in enumerate(value)]


def _prompt(
    path: str, item: Any, model: ServedModel, add_special_tokens: bool, limit: int
) -> Prompt:
    if isinstance(item, str):
        ids = model.text.encode(item, add_special_tokens=add_special_tokens, max_tokens=limit)
        prompt = Prompt(ids, item)
    else:
        check_type(path, item, list, "a text or a list of token ids")
        _check_token_ids(path, item, model.text.vocabulary.size)
        prompt = Prompt(item)
    if not prompt.token_ids:
        raise InvalidRequest(f"{path} must give at least one token, got none", param="prompt")
    return prompt


def _check_token_ids(path: str, ids: list[Any], size: int) -> None:
    for place, token_id in enumerate(ids):
        check_type(f"{path}[{place}]", token_id, int, "a token id")
        if not 0 <= token_id < size:
            message = f"{path}[{place}] must be in [0, {size - 1}], got {token_id}"
            raise InvalidRequest(message, param="prompt")
