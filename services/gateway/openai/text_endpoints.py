"""POST /tokenize and /detokenize, GET /v1/models: what needs no worker's time."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from core.errors import InvalidRequest, ModelNotFound
from services.gateway.asgi import JsonResponse
from services.gateway.config import GatewayConfig
from services.gateway.models import ServedModel
from services.gateway.openai.endpoints import read_checked
from services.gateway.openai.messages import normalise_messages, template_variables
from services.gateway.openai.prepare import Resolver, template_ending
from services.gateway.openai.protocol import DetokenizeBody, TokenizeBody
from services.gateway.openai.unsupported import refuse_unsupported
from services.gateway.openai.validation import parse_body
from services.gateway.state import GatewayState

_LONGEST_TEXT_FACTOR = 8
"""/tokenize counts texts that are too long for the model as well, up to this many times its length."""


async def tokenize(state: GatewayState, http: HttpRequest) -> Response:
    """POST /tokenize."""
    return JsonResponse(await read_checked(state, http, partial(_tokenize, state.config)))


async def detokenize(state: GatewayState, http: HttpRequest) -> Response:
    """POST /detokenize."""
    return JsonResponse(await read_checked(state, http, _detokenize))


def list_models(state: GatewayState) -> Response:
    """GET /v1/models."""
    models = state.directory.models().values()
    return JsonResponse({"object": "list", "data": [_model_card(model) for model in models]})


def show_model(state: GatewayState, name: str) -> Response:
    """GET /v1/models/{name}."""
    model = state.directory.models().get(name)
    if model is None:
        raise ModelNotFound(f"The model `{name}` does not exist.", param="model")
    return JsonResponse(_model_card(model))


def _model_card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "baton",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "permission": [],
    }


def _tokenize(config: GatewayConfig, data: bytes, resolve: Resolver) -> dict[str, Any]:
    body = parse_body(data, TokenizeBody)
    refuse_unsupported(body.model_extra, is_chat=body.messages is not None)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt or messages is required, and not both", param="prompt")
    model = resolve(body.model)
    token_ids = _token_ids(config, body, model)
    strings = (
        [model.text.vocabulary.token_text(i) for i in token_ids] if body.return_token_strs else None
    )
    return {
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "tokens": token_ids,
        "token_strs": strings,
    }


def _token_ids(config: GatewayConfig, body: TokenizeBody, model: ServedModel) -> list[int]:
    limit = model.max_model_len * _LONGEST_TEXT_FACTOR
    if body.messages is None:
        adds = body.add_special_tokens is not False
        return model.text.encode(body.prompt or "", add_special_tokens=adds, max_tokens=limit)
    adds_prompt, continues = template_ending(
        body.add_generation_prompt, body.continue_final_message, body
    )
    return model.text.encode_chat(
        normalise_messages(body.messages, config.max_messages),
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
        variables=template_variables(body.chat_template_kwargs),
        add_special_tokens=bool(body.add_special_tokens),
        max_tokens=limit,
    )


def _detokenize(data: bytes, resolve: Resolver) -> dict[str, Any]:
    body = parse_body(data, DetokenizeBody)
    model = resolve(body.model)
    size = model.text.vocabulary.size
    for place, token_id in enumerate(body.tokens):
        if token_id >= size:
            message = f"tokens[{place}] must be in [0, {size - 1}], got {token_id}"
            raise InvalidRequest(message, param="tokens")
    return {"prompt": model.text.decode(body.tokens)}
