"""One choice of one request while it runs: growing tokens, progress, blocks.

States, and who moves a sequence between them (the scheduler, always):

    WAITING         --admitted, blocks for the whole prompt-->        RUNNING
    WAITING_FOR_KV  --another worker's KV is complete-->              READY    --a place in the batch--> RUNNING
    WAITING_FOR_KV  --given up, or a tier's KV is in the pool-->      WAITING
    WAITING         --a tier has KV of it-->                          WAITING_FOR_KV
    RUNNING, READY  --no block left, the youngest gives way-->        PREEMPTED (waits again, recomputes)
    any             --stop rule, abort, session done-->               FINISHED

A request for n choices starts as one sequence with `num_choices` n; when its last prompt token is computed, n first
tokens are sampled from the one row and n - 1 forks begin, sharing all blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from core.errors import InvalidRequest
from core.request import Request, SamplingParams
from engine.kvcache.block_table import BlockTable
from engine.kvcache.chain import HashChain


class SequenceStatus(IntEnum):
    """Where a sequence is."""

    WAITING = 0
    WAITING_FOR_KV = 1
    READY = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED = 5


WAITING_STATUSES = (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
"""Of a sequence that waits for its first or its next start here."""


class Gate(IntEnum):
    """Whether a sequence may be scheduled: sessions wait for the other side's grant.

    OPEN: may run. Every sequence that is not a session has it.
    CLOSED: a session that has not been granted; it may take blocks and announce itself.
    PARKED: a session that the other side has no room for; passed over until unparked.
    """

    OPEN = 0
    CLOSED = 1
    PARKED = 2


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice. Built by `start_sequences`; changed by the scheduler only.

    request: what was asked; choices share it.
    choice: index of this choice.
    token_ids: prompt and output.
    num_prompt_tokens: how many of token_ids are the prompt.
    num_choices: choices that this sequence still stands for; 1 once it has forked.
    num_computed_tokens: tokens whose KV is in the blocks, or will be when the step that is scheduled has run.
    num_cached_tokens: prompt tokens in whole blocks whose KV was found when the sequence was first admitted.
    num_arriving_tokens: tokens whose KV another worker is asked for; 0 for a local run.
    is_session: whether this is a prompt computed for another worker.
    is_looked_up: whether tiers have been asked for its KV since it last began to wait.
    arrival: place in the order of arrival, given by the scheduler; forks share it.
    chain: hashes of its full blocks; None without prefix caching.
    forks: choices whose first token is known while the KV of the prompt is still arriving.
    """

    request: Request
    choice: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_choices: int = 1
    status: SequenceStatus = SequenceStatus.WAITING
    gate: Gate = Gate.OPEN
    is_session: bool = False
    is_looked_up: bool = False
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_arriving_tokens: int = 0
    num_preemptions: int = 0
    arrival: int = -1
    block_table: BlockTable = field(default_factory=BlockTable)
    chain: HashChain | None = None
    forks: list[Sequence] = field(default_factory=list)
    finish_reason: str = ""
    stop_token_id: int | None = None

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are chosen and when the sequence ends."""
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, here or on the worker that began the run."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens whose KV is not computed yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_waiting(self) -> bool:
        """Whether the sequence waits for its first or its next start here."""
        return self.status in WAITING_STATUSES

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.status is SequenceStatus.FINISHED

    def fork(self, choice: int, first_token_id: int) -> Sequence:
        """Another choice of the same request that goes on from here with its own token; it holds no blocks yet."""
        return Sequence(
            request=self.request,
            choice=choice,
            token_ids=[*self.token_ids, first_token_id],
            num_prompt_tokens=self.num_prompt_tokens,
            status=self.status,
            num_cached_tokens=self.num_cached_tokens,
            arrival=self.arrival,
            block_table=BlockTable(len(self.block_table.groups)),
            chain=self.chain.copy() if self.chain else None,
        )


def start_sequences(request: Request, num_groups: int = 1) -> list[Sequence]:
    """The sequences a request begins with.

    One that stands for all n choices; or, for a run that another worker began, one a choice, each with the tokens
    it has so far.
    """
    outputs = request.output_token_ids
    num_choices = request.sampling.n
    if not any(outputs):
        return [_start(request, 0, (), num_choices, num_groups)]
    if len(outputs) != num_choices:
        raise InvalidRequest(
            f"output_token_ids holds {len(outputs)} lists, but n is {num_choices}",
            param="output_token_ids",
        )
    return [_start(request, choice, tokens, 1, num_groups) for choice, tokens in enumerate(outputs)]


def _start(
    request: Request, choice: int, output: Iterable[int], num_choices: int, num_groups: int
) -> Sequence:
    prompt = request.prompt_token_ids
    return Sequence(
        request=request,
        choice=choice,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        num_choices=num_choices,
        block_table=BlockTable(num_groups),
    )
