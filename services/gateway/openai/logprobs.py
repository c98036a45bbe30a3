"""Log-probabilities in the two shapes of the API.

A token that is no whole character is shown as `bytes:\\xe6...`, and its true bytes are given where the shape has room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from services.gateway.choice import TokenInfo
from services.gateway.text.vocabulary import Vocabulary
from services.rpc.v1 import baton_pb2 as pb

LEAST_LOGPROB = -9999.0


class LogprobFormat:
    """Formats the log-probabilities of one request. as_ids: tokens are shown as `token_id:17`."""

    def __init__(self, vocabulary: Vocabulary, num_top: int, *, as_ids: bool) -> None:
        self._vocabulary = vocabulary
        self._num_top = num_top
        self._as_ids = as_ids

    def chat(self, infos: Iterable[TokenInfo]) -> dict[str, Any]:
        """`{"content": [...]}`, an entry a token."""
        return {"content": [self._chat_entry(info) for info in infos]}

    def completion(self, infos: Sequence[TokenInfo], first_offset: int) -> dict[str, Any]:
        """Four lists, an entry a token. first_offset: characters before the choice's own text (the echo)."""
        return {
            "text_offset": [first_offset + info.text_offset for info in infos],
            "token_logprobs": [_floor(info.logprobs.logprob) for info in infos],
            "tokens": [self._text(info.token_id) for info in infos],
            "top_logprobs": [self._top_dict(info) for info in infos],
        }

    def _chat_entry(self, info: TokenInfo) -> dict[str, Any]:
        entry = self._entry(info.token_id, info.logprobs.logprob)
        entry["top_logprobs"] = [self._entry(i, p) for i, p in self._top(info.logprobs)]
        return entry

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._vocabulary.token_bytes(token_id)
        return {"token": self._text(token_id), "logprob": _floor(logprob), "bytes": list(data)}

    def _top_dict(self, info: TokenInfo) -> dict[str, float]:
        """The best tokens and the chosen one. Of two tokens with one text the better stays."""
        found: dict[str, float] = {}
        for token_id, logprob in self._top(info.logprobs):
            found.setdefault(self._text(token_id), _floor(logprob))
        found.setdefault(self._text(info.token_id), _floor(info.logprobs.logprob))
        return found

    def _top(self, logprobs: pb.TokenLogprobs) -> Iterable[tuple[int, float]]:
        count = self._num_top
        return zip(logprobs.top_token_ids[:count], logprobs.top_logprobs[:count], strict=True)

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._vocabulary.token_text(token_id)


def _floor(logprob: float) -> float:
    """Minus infinity is no JSON. The comparison is false for NaN, too."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
