"""What can never run is refused before it waits."""

from __future__ import annotations

from core.errors import ContextTooLong, InvalidRequest, NoCapacity
from engine.sequence import Sequence


def check_token_ids(sequence: Sequence, vocab_size: int) -> None:
    """Refuse token ids that the model does not have; vocab_size 0 refuses none."""
    if not vocab_size:
        return
    fields = {
        "prompt": sequence.token_ids,
        "stop_token_ids": sequence.sampling.stop_token_ids,
        "logit_bias": [token_id for token_id, _ in sequence.sampling.logit_bias],
    }
    for name, token_ids in fields.items():
        if not token_ids:
            continue
        for worst in (min(token_ids), max(token_ids)):
            if not 0 <= worst < vocab_size:
                message = f"{name} holds token id {worst}; the model has ids 0 to {vocab_size - 1}"
                raise InvalidRequest(message, param=name)


def check_length(sequence: Sequence, max_model_len: int, capacity_tokens: int) -> None:
    """Refuse a sequence that leaves no room for one more token in the model's context or in an empty pool."""
    num_tokens = sequence.num_tokens
    if num_tokens >= max_model_len:
        raise ContextTooLong(
            f"prompt holds {num_tokens} tokens; with one token of output at most "
            f"{max_model_len - 1} fit the maximum model length of {max_model_len}",
            param="prompt",
        )
    if num_tokens >= capacity_tokens:
        raise ContextTooLong(
            f"prompt holds {num_tokens} tokens; this worker's KV pool holds {capacity_tokens} in all",
            param="prompt",
        )


def check_blocks(num_blocks: int, num_usable: int) -> None:
    """Refuse what needs more blocks at once than the pool has."""
    if num_blocks > num_usable:
        raise NoCapacity(
            f"the request needs {num_blocks} KV blocks at once, the pool has {num_usable}"
        )
