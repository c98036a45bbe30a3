"""One engine in this process, driven through its inbox as a front would."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence

from core.ids import RequestId
from core.request import Request, SamplingParams
from engine.assembly import assemble
from engine.channel import Inbox
from engine.config import EngineConfig
from engine.messages import AddRequest, StepDone, ToFront


class InProcessEngine:
    """Runs batches of greedy requests to their end."""

    def __init__(self, model: str, num_threads: int, core_ledger: str = "none") -> None:
        self._inbox = Inbox()
        self._answers: dict[str, list[int]] = defaultdict(list)
        self._open: set[str] = set()
        self._num_started = 0
        # Prompts repeat from round to round: without a prefix cache every round does the same work.
        config = EngineConfig(
            model=model,
            device="cpu",
            num_threads=num_threads,
            core_ledger=core_ledger,
            enable_prefix_caching=False,
        )
        self._core = assemble(config, self._inbox, self._hear)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Greedy answers of exactly max_tokens tokens, all prompts at once."""
        names = []
        for prompt in prompts:
            self._num_started += 1
            names.append(f"r{self._num_started}")
            params = SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            self._open.add(names[-1])
            self._inbox.post(
                AddRequest(Request(RequestId(names[-1]), "bench", tuple(prompt), params))
            )
        while self._open:
            self._core.turn()
        return [self._answers.pop(name) for name in names]

    def close(self) -> None:
        """Let go of pool and movers."""
        self._core.close()

    def _hear(self, message: ToFront) -> None:
        if not isinstance(message, StepDone):
            return
        for output in message.outputs:
            self._answers[output.request_id] += output.token_ids
            if output.finish_reason:
                self._open.discard(output.request_id)


def limit_threads(num_threads: int) -> None:
    """Thread budget and passive waiting, before torch is imported."""
    os.environ.update(
        OMP_NUM_THREADS=str(num_threads),
        OMP_WAIT_POLICY="PASSIVE",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
        TMPDIR=tempfile.gettempdir(),
    )
