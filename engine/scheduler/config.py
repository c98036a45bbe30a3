"""What the scheduler is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from core.block_hash import HashRoot
from core.errors import ConfigError

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and rules of one scheduler.

    block_size: tokens in a block.
    max_num_batched_tokens: tokens in one step.
    max_num_seqs: sequences in one step, and choices running at once.
    max_model_len: most tokens of prompt and output together.
    eos_token_ids: the model's own end tokens.
    vocab_size: token ids must be below; 0 does not check.
    policy: `fcfs` by arrival, or `priority`: lower value first, then arrival.
    hash_root: where hash chains begin; None turns prefix caching off.
    """

    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int = 0
    policy: str = "fcfs"
    hash_root: HashRoot | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.policy not in POLICIES:
            raise ConfigError(
                f"--scheduling-policy: {self.policy!r} is unknown; known: {', '.join(POLICIES)}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens: {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs ({self.max_num_seqs})"
            )
