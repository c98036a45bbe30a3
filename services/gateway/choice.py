"""One choice's outputs into text: detokenised, cut at stop strings, with a reason when it ends.

Works token by token, so that what a choice counts and says never depends on how tokens were grouped into steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.gateway.text.detokenizer import make_detokenizer
from services.gateway.text.stop import StopBuffer
from services.gateway.text.vocabulary import Vocabulary
from services.rpc.v1 import baton_pb2 as pb


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a request wants its text.

    stop: strings that end a choice.
    include_stop: whether the stop string or token stays in the text.
    skip_special: whether special tokens leave no text.
    min_tokens: tokens before which no stop string counts.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token with log-probabilities. text_offset: characters of the choice's text before it."""

    token_id: int
    text_offset: int
    logprobs: pb.TokenLogprobs


@dataclass(slots=True)
class ChoiceDelta:
    """What one step added to one choice.

    finish_reason: empty while the choice runs. stop_reason: the stop string or token id that ended it.
    """

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    infos: list[TokenInfo] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None

    def add(self, later: ChoiceDelta) -> None:
        """Append what came after."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.infos += later.infos
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class ChoiceAssembler:
    """Turns the outputs of one choice into deltas until the choice ends; ignores what comes after."""

    def __init__(self, choice: int, vocabulary: Vocabulary, options: TextOptions) -> None:
        self.token_ids: list[int] = []
        self.is_finished = False
        self._choice = choice
        self._options = options
        self._detokenizer = make_detokenizer(vocabulary, skip_special=options.skip_special)
        self._stop = StopBuffer(options.stop, include=options.include_stop)
        self._num_chars = 0

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.token_ids)

    def push(self, output: pb.ChoiceOutput) -> ChoiceDelta | None:
        """The delta of one output; None when the choice has ended before."""
        if self.is_finished:
            return None
        delta = ChoiceDelta(self._choice)
        token_ids, logprobs, finish_reason = output.token_ids, output.logprobs, output.finish_reason
        hidden = -1  # the place of a token that leaves no text
        if finish_reason == "stop" and not self._options.include_stop:
            hidden = len(token_ids) - 1
        for place, token_id in enumerate(token_ids):
            if logprobs:
                delta.infos.append(TokenInfo(token_id, self._num_chars, logprobs[place]))
            text = "" if place == hidden else self._detokenizer.push(token_id)
            if self._take(delta, token_id, text):
                return delta
        if finish_reason:
            self._finish(delta, output)
        return delta

    def _take(self, delta: ChoiceDelta, token_id: int, text: str) -> bool:
        """Add one token; True when it completed a stop string."""
        self.token_ids.append(token_id)
        self._num_chars += len(text)
        delta.token_ids.append(token_id)
        given, stop = self._stop.push(text, searched=self.num_tokens > self._options.min_tokens)
        delta.text += given
        if stop is None:
            return False
        self.is_finished = True
        delta.finish_reason, delta.stop_reason = "stop", stop
        return True

    def _finish(self, delta: ChoiceDelta, output: pb.ChoiceOutput) -> None:
        given, stop = self._stop.push(self._detokenizer.finish(), searched=True)
        delta.text += given if stop is not None else given + self._stop.finish()
        self.is_finished = True
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
            return
        delta.finish_reason = output.finish_reason
        if output.HasField("stop_token_id"):
            delta.stop_reason = output.stop_token_id
