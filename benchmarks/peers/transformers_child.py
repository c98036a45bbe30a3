"""Drives Hugging Face transformers' `generate`, asked by lines of JSON.

    transformers_child.py FOLDER DTYPE NUM_THREADS

No server, no batching of what arrives later, no prefix cache: one `generate` a call, over all its prompts at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

EOS_TOKEN_ID = PAD_TOKEN_ID = 2


class Clock(StoppingCriteria):
    """Notes when each step ended; stops nothing."""

    def __init__(self, num_rows: int) -> None:
        self.started_s = time.perf_counter()
        self.times_s: list[float] = []
        self._never = torch.zeros(num_rows, dtype=torch.bool)

    def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Called after every step."""
        self.times_s.append(time.perf_counter() - self.started_s)
        return self._never


@torch.inference_mode()
def ask(model: Any, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
    """Greedy answers to prompts of one length."""
    clock = Clock(len(prompts))
    ids = torch.tensor(prompts)  # [num_prompts, prompt_length]
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=None if ignore_eos else EOS_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    rows = [_until_end(row, ignore_eos) for row in answer[:, ids.shape[1] :].tolist()]
    return {
        "times": [clock.times_s[: len(row)] for row in rows],
        "counts": [list(range(1, len(row) + 1)) for row in rows],
        "ids": rows,
    }


def _until_end(row: list[int], ignore_eos: bool) -> list[int]:
    if ignore_eos or EOS_TOKEN_ID not in row:
        return row
    return row[: row.index(EOS_TOKEN_ID) + 1]


def main() -> None:
    """Serve until the input ends."""
    answers = _claim_stdout()
    folder, dtype, num_threads = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        told = ask(model, asked["prompts"], asked["max_tokens"], asked["ignore_eos"])
        print(json.dumps(told), file=answers, flush=True)


def _claim_stdout() -> TextIO:
    """Standard output for the answers alone: what libraries print goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
