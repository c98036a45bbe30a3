"""What the next StepDone will say, and which requests are still owed an end.

A request is open from the moment it is heard until every choice has a finish reason. An open request that is aborted,
expires or fails gets exactly one end for each choice that had none.
"""

from __future__ import annotations

from collections.abc import Callable

from core.errors import DeadlineExceeded, ServeError
from core.ids import RequestId
from engine.messages import ChoiceOutput, TokenLogprobs
from engine.remote.timeline import Timeline
from engine.sampler.rows import SampledToken
from engine.scheduler.output import SequenceUpdate


class _OpenRequest:
    """Choices without an end, and the request's moments."""

    __slots__ = ("choices", "timeline", "untold")

    def __init__(self, num_choices: int) -> None:
        self.choices = set(range(num_choices))
        self.untold = set(range(num_choices))
        self.timeline = Timeline()


class Outbox:
    """Collects outputs between two StepDone messages."""

    def __init__(self) -> None:
        self._open: dict[RequestId, _OpenRequest] = {}
        self._outputs: list[ChoiceOutput] = []

    @property
    def num_open(self) -> int:
        """Requests that are still owed an end."""
        return len(self._open)

    @property
    def has_outputs(self) -> bool:
        """Whether anything waits to be told."""
        return bool(self._outputs)

    def is_open(self, request_id: RequestId) -> bool:
        """Whether the request is still owed an end."""
        return request_id in self._open

    def open(self, request_id: RequestId, num_choices: int) -> Timeline:
        """Begin a request; its timeline starts now."""
        self._open[request_id] = _OpenRequest(num_choices)
        return self._open[request_id].timeline

    def mark_scheduled(self, request_id: RequestId) -> None:
        """Note when a request first ran here."""
        if (request := self._open.get(request_id)) is not None:
            request.timeline.mark_first("scheduled")

    def add(self, update: SequenceUpdate) -> None:
        """New tokens of a choice, or its end."""
        request_id = update.sequence.request.id
        request = self._open.get(request_id)
        if request is None or update.choice not in request.choices:
            return
        self._note_moments(request, update)
        is_first = update.choice in request.untold and bool(update.tokens)
        request.untold.discard(update.choice)
        self._outputs.append(
            ChoiceOutput(
                request_id=request_id,
                choice=update.choice,
                token_ids=[token.token_id for token in update.tokens],
                logprobs=token_logprobs(update.tokens),
                finish_reason=update.finish_reason,
                stop_token_id=update.stop_token_id,
                num_cached_tokens=update.sequence.num_cached_tokens if is_first else None,
                timestamps_ms=request.timeline.moments_ms() if update.finish_reason else {},
            )
        )
        if update.finish_reason:
            self._end_choice(request_id, update.choice)

    def abort(self, request_id: RequestId) -> None:
        """End every open choice with `abort`."""
        self._end_all(
            request_id, lambda choice: ChoiceOutput(request_id, choice, finish_reason="abort")
        )

    def expire(self, request_id: RequestId) -> None:
        """End every open choice: the request's time ran out."""
        self.fail(request_id, DeadlineExceeded("the request's deadline passed before it finished"))

    def fail(self, request_id: RequestId, error: ServeError) -> None:
        """End every open choice with an error that names its kind."""
        kind, message = type(error).__name__, error.message
        self._end_all(
            request_id,
            lambda choice: ChoiceOutput(
                request_id,
                choice,
                finish_reason="error",
                error_kind=kind,
                error_message=message,
            ),
        )

    def take(self) -> list[ChoiceOutput]:
        """Everything since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _note_moments(self, request: _OpenRequest, update: SequenceUpdate) -> None:
        num_output_tokens = update.sequence.num_output_tokens
        if update.tokens:
            request.timeline.mark_first("first_token")
        if num_output_tokens >= 2:
            request.timeline.mark_first("second_token")
        if update.finish_reason:
            request.timeline.mark("finished")

    def _end_all(self, request_id: RequestId, output: Callable[[int], ChoiceOutput]) -> None:
        request = self._open.get(request_id)
        for choice in sorted(request.choices) if request else ():
            self._outputs.append(output(choice))
            self._end_choice(request_id, choice)

    def _end_choice(self, request_id: RequestId, choice: int) -> None:
        request = self._open[request_id]
        request.choices.discard(choice)
        if not request.choices:
            del self._open[request_id]


def token_logprobs(tokens: list[SampledToken]) -> list[TokenLogprobs]:
    """Log-probabilities as the front speaks of them; empty when none were asked for."""
    return [TokenLogprobs(*token.logprobs) for token in tokens if token.logprobs is not None]
