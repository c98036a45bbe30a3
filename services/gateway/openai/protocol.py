"""Request bodies of the OpenAI-shaped API: names, types, limits and defaults, as clients and OpenAPI see them.

Fields that this server does not know are accepted and kept aside; `unsupported` looks through them. Values that may
be large or of several shapes (messages, prompts, stop strings) are checked by hand where they are used, so that the
error names the exact place.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from core.request import MAX_CHOICES, MAX_LOGPROBS

_Finite = Field(allow_inf_nan=False)
Number = Annotated[float, _Finite]


class Body(BaseModel):
    """Any request body."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(Body):
    """What a stream carries beside text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingBody(Body):
    """What chat and completions share."""

    model: str | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = 0.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = 0.0
    repetition_penalty: Annotated[Number, Field(ge=1e-6, le=1e6)] | None = None
    logit_bias: dict[str, Number] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: SkipValidation[str | list[str] | None] = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 0
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = 0
    request_id: Annotated[str, Field(max_length=256)] | None = None
    return_tokens_as_token_ids: bool | None = False
    return_token_ids: bool | None = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    user: Any = None


class TemplateBody(Body):
    """What fills a chat template."""

    messages: SkipValidation[list[dict[str, Any]]]
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatBody(SamplingBody, TemplateBody):
    """POST /v1/chat/completions."""

    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = False
    parallel_tool_calls: bool | None = True


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = True


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: SkipValidation[list[dict[str, Any]] | None] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1_000_000)]
