"""What a client asked, frozen at the gateway.

A Request is token ids and numbers only: text, templates and stop strings stay in the gateway. Its seed is always
set, so that a split, preempted or migrated run draws the same random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.errors import InvalidRequest
from core.ids import RequestId

MAX_CHOICES = 128
MAX_LOGPROBS = 20
REPETITION_PENALTY_RANGE = (1e-6, 1e6)
"""Beyond it a float32 logit could leave the finite numbers."""
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
SEED_BITS = 64
MAX_COUNT = 2**32 - 1
"""Token ids and token counts are 32 bits, unsigned, in hashes and on the wire."""
MAX_PRIORITY = 2**31 - 1
MAX_DEADLINE_MS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends. Validated on construction; errors name field, value, limit.

    seed: key of the counter-based generator, in [0, 2**64).
    n: independent choices.
    temperature: 0 is greedy.
    top_k: 0 keeps all.
    top_p: kept probability mass, in (0, 1].
    min_p: least probability relative to the most probable token, in [0, 1].
    presence_penalty, frequency_penalty: subtracted for tokens already in the output, in [-2, 2].
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output,
        within REPETITION_PENALTY_RANGE.
    max_tokens: most output tokens a choice, at least 1.
    min_tokens: least output tokens before an end or stop token may be chosen.
    stop_token_ids: tokens that end the sequence, beside the model's own end tokens.
    ignore_eos: whether the model's end tokens do not end the sequence.
    logprobs: alternatives reported a token; None reports nothing, 0 only the chosen token.
    logit_bias: added to logits, as (token id, bias in [-100, 100]) pairs.
    """

    seed: int
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check_range("seed", self.seed, 0, 2**SEED_BITS - 1)
        _check_range("n", self.n, 1, MAX_CHOICES)
        _check_range("max_tokens", self.max_tokens, 1, MAX_COUNT)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_distribution()
        self._check_token_ids()

    def _check_distribution(self) -> None:
        """What reshapes probabilities. Every comparison is false for NaN, so NaN is refused everywhere."""
        _check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_range("top_k", self.top_k, 0, MAX_COUNT)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must be in (0, 1], got {self.top_p}", param="top_p")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTY_RANGE)

    def _check_token_ids(self) -> None:
        """Ids that index logits: a negative one would count from the end of the vocabulary."""
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids", token_id, 0, MAX_COUNT)
        for token_id, bias in self.logit_bias:
            _check_range("logit_bias", token_id, 0, MAX_COUNT)
            _check_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always chosen."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request as every process sees it.

    id: unique in the cluster.
    model: served model name.
    prompt_token_ids: the prompt, at least one token; whether an id is in the vocabulary is the gateway's to check.
    sampling: how to choose tokens.
    output_token_ids: tokens already generated, a list a choice, for a run that another worker began.
    deadline_ms: remaining time when the request was sent, None for no limit; never an absolute time.
    priority: lower runs first under the priority policy.
    cache_salt: enters the hash root, so that only requests with the same salt share KV.
    trace_parent: W3C traceparent header of the request, empty for none.
    """

    id: RequestId
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[tuple[int, ...], ...] = ()
    deadline_ms: int | None = None
    priority: int = 0
    cache_salt: str = ""
    trace_parent: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidRequest("prompt must hold at least one token, got none", param="prompt")
        _check_range("prompt", min(self.prompt_token_ids), 0, MAX_COUNT)
        _check_range("prompt", max(self.prompt_token_ids), 0, MAX_COUNT)
        if self.deadline_ms is not None:
            _check_range("deadline_ms", self.deadline_ms, 0, MAX_DEADLINE_MS)
        _check_range("priority", self.priority, -MAX_PRIORITY - 1, MAX_PRIORITY)
        if not self.cache_salt.isascii() and _has_surrogate(self.cache_salt):
            raise InvalidRequest("cache_salt must be valid Unicode text", param="cache_salt")


def _has_surrogate(text: str) -> bool:
    """Whether a lone surrogate, which JSON can carry, keeps the text from having bytes."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], got {value}", param=name)
