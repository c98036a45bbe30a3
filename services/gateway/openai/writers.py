"""How answers look: chat and completions, whole and in pieces.

A writer belongs to one request. It makes plain dictionaries; nothing a token is validated or copied again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from services.gateway.choice import ChoiceDelta
from services.gateway.openai.logprobs import LogprobFormat


class Writer(Protocol):
    """One request's answer."""

    def whole(self, choices: Sequence[ChoiceDelta], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The stream's chunks for one delta, none when it shows nothing."""
        ...

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that carries usage alone."""
        ...


class ChatWriter:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(
        self, response_id: str, model: str, logprobs: LogprobFormat | None, *, with_token_ids: bool
    ) -> None:
        self._head = {"id": response_id, "created": int(time.time()), "model": model}
        self._logprobs = logprobs
        self._with_token_ids = with_token_ids
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[ChoiceDelta], usage: dict[str, Any]) -> dict[str, Any]:
        """See Writer."""
        body = {"object": "chat.completion", **self._head}
        return {**body, "choices": [self._choice(choice) for choice in choices], "usage": usage}

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """See Writer. A choice begins with a chunk that names its role."""
        chunks = []
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            chunks.append(self._chunk(delta.choice, {"role": "assistant", "content": ""}))
        shows_logprobs = self._logprobs is not None and bool(delta.infos)
        if not (delta.text or delta.finish_reason or shows_logprobs or self._with_token_ids):
            return chunks
        chunk = self._chunk(delta.choice, {"content": delta.text} if delta.text else {})
        choice = chunk["choices"][0]
        if self._logprobs is not None and delta.infos:
            choice["logprobs"] = self._logprobs.chat(delta.infos)
        if delta.finish_reason:
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
        if self._with_token_ids:
            choice["token_ids"] = delta.token_ids
        chunks.append(chunk)
        return chunks

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """See Writer."""
        return {"object": "chat.completion.chunk", **self._head, "choices": [], "usage": usage}

    def _choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        logprobs = self._logprobs
        choice: dict[str, Any] = {
            "index": delta.choice,
            "message": {"role": "assistant", "content": delta.text},
            "logprobs": None if logprobs is None else logprobs.chat(delta.infos),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._with_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"object": "chat.completion.chunk", **self._head, "choices": [choice]}


class CompletionWriter:
    """`text_completion`, whole and in pieces. echoes: the prompt's text before each choice, when it is echoed."""

    def __init__(
        self,
        response_id: str,
        model: str,
        logprobs: LogprobFormat | None,
        *,
        echoes: Sequence[str],
        with_token_ids: bool,
    ) -> None:
        self._head = {
            "id": response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs = logprobs
        self._echoes = echoes
        self._with_token_ids = with_token_ids
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[ChoiceDelta], usage: dict[str, Any]) -> dict[str, Any]:
        """See Writer."""
        written = [
            self._choice(choice, self._echo(choice.choice) + choice.text) for choice in choices
        ]
        return {**self._head, "choices": written, "usage": usage}

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """See Writer."""
        text = delta.text
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            text = self._echo(delta.choice) + text
        shows_logprobs = self._logprobs is not None and bool(delta.infos)
        if not (text or delta.finish_reason or shows_logprobs or self._with_token_ids):
            return []
        return [{**self._head, "choices": [self._choice(delta, text)]}]

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """See Writer."""
        return {**self._head, "choices": [], "usage": usage}

    def _choice(self, delta: ChoiceDelta, text: str) -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None and delta.infos:
            logprobs = self._logprobs.completion(delta.infos, len(self._echo(delta.choice)))
        choice: dict[str, Any] = {
            "index": delta.choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason or None,
            "stop_reason": delta.stop_reason,
        }
        if self._with_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""
