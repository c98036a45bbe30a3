"""When a choice ends by itself."""

from __future__ import annotations

from collections.abc import Collection

from engine.sequence import Sequence

STOP, LENGTH, ABORT = "stop", "length", "abort"


def check_stop(
    sequence: Sequence, eos_token_ids: Collection[int], max_length: int
) -> tuple[str, int | None]:
    """(finish reason, stop token id) after the last token; ("", None) while the choice goes on.

    Before min_tokens no token ends a choice. An end token of the model gives no stop token id, a token of
    stop_token_ids gives itself. Reaching max_tokens, or max_length tokens in all, ends any choice.
    """
    params, num_output = sequence.sampling, sequence.num_output_tokens
    if num_output == 0:
        return "", None
    last = sequence.token_ids[-1]
    if num_output >= params.min_tokens:
        if last in eos_token_ids and not params.ignore_eos:
            return STOP, None
        if last in params.stop_token_ids:
            return STOP, last
    if num_output >= params.max_tokens or sequence.num_tokens >= max_length:
        return LENGTH, None
    return "", None
