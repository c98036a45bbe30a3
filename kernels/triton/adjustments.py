"""What is done to single rows of logits before a token is chosen: torch's own operations, on the row's device.

A few ids a row, and only for requests that ask: nothing that a kernel of its own would make faster.
"""

from __future__ import annotations

from torch import Tensor

from kernels.reference import sampling


def allow_only(row: Tensor, token_ids: Tensor) -> None:
    """See `kernels.ops.allow_only`."""
    sampling.allow_only(row, token_ids.to(row.device))


def ban(row: Tensor, token_ids: Tensor) -> None:
    """See `kernels.ops.ban`."""
    sampling.ban(row, token_ids.to(row.device))


def add_bias(row: Tensor, token_ids: Tensor, bias: Tensor) -> None:
    """See `kernels.ops.add_bias`."""
    sampling.add_bias(row, token_ids.to(row.device), bias.to(row.device))


def penalise_repetition(row: Tensor, seen: Tensor, penalty: float) -> None:
    """See `kernels.ops.penalise_repetition`."""
    sampling.penalise_repetition(row, seen.to(row.device), penalty)


def penalise_frequency(
    row: Tensor, output: Tensor, frequency_penalty: float, presence_penalty: float
) -> None:
    """See `kernels.ops.penalise_frequency`."""
    sampling.penalise_frequency(row, output.to(row.device), frequency_penalty, presence_penalty)
