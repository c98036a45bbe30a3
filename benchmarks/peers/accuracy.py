"""How near each peer's greedy answers come to full precision: 50 MT-bench prompts, 64 tokens each.

The judge is transformers in fp32 on the demo file's dequantised weights, teacher-forced: every token is judged given
the answer before it, so an answer without a mismatch is what full precision would have said, and the first mismatch is
where the two part. Formats other than the file's own bear their requantisation too.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.peers import models
from benchmarks.peers.catalogue import Entry
from benchmarks.peers.peer import Peer
from benchmarks.peers.shared_machine import turn

NUM_PROMPTS, NUM_TOKENS = 50, 64
EOS_TOKEN_ID = 2
SIMPLE_QUESTION, SIMPLE_ANSWER = "What is the capital of France?", "Paris"


@dataclass(frozen=True)
class Judged:
    """One answer beside the judge's: how many tokens agree from the start, and the gap where they part.

    gap: difference of the judge's two best log-probabilities at the first mismatch; None where there is none.
    """

    num_equal: int
    num_tokens: int
    gap: float | None


def run(entries: Mapping[str, Entry], logs: Path, lock_path: str = "") -> dict[str, Any]:
    """Ask one entry after the other, judge, print and return."""
    text = ChatText()
    prompts = [text.prompt_ids(question) for question in _questions()]
    figures = {}
    for name, entry in entries.items():
        with turn(lock_path):
            peer = entry.start(name, logs)
            try:
                peer.wait_ready()
                answers = [_answer(peer, prompt) for prompt in prompts]
                simple = text.decode(_answer(peer, text.prompt_ids(SIMPLE_QUESTION)))
            finally:
                peer.process.stop()
            judged = [judge(*pair) for pair in zip(prompts, answers, strict=True)]
        figures[name] = {**sum_up(judged), "simple_answer": simple}
        print(f"  judged {name}: {figures[name]['equal_share']:.0%} equal", flush=True)
    _print(figures)
    return {"accuracy": figures, "prompts": NUM_PROMPTS, "tokens": NUM_TOKENS}


def sum_up(judged: Sequence[Judged]) -> dict[str, Any]:
    """Shares and means over all prompts."""
    from tests.support.oracle import NEAR_TIE

    equal = [row.gap is None for row in judged]
    near = [row.gap is not None and row.gap < NEAR_TIE for row in judged]
    return {
        "equal_share": sum(equal) / len(judged),
        "equal_or_near_tie_share": (sum(equal) + sum(near)) / len(judged),
        "mean_equal_prefix": statistics.fmean(row.num_equal for row in judged),
        "median_gap_where_they_part": statistics.median(
            [row.gap for row in judged if row.gap is not None] or [0.0]
        ),
        "equal_prefixes": [row.num_equal for row in judged],
    }


def judge(prompt: Sequence[int], answer: Sequence[int]) -> Judged:
    """Compare with the judge's own greedy choice."""
    from tests.support.oracle import teacher_forced_check

    mismatches = teacher_forced_check(prompt, answer)
    if not mismatches:
        return Judged(len(answer), len(answer), None)
    return Judged(mismatches[0].position, len(answer), mismatches[0].gap)


def complete(token_ids: Sequence[int]) -> list[int]:
    """An answer as all peers would state it: with the end token where it ended before its limit."""
    ids = list(token_ids)
    if len(ids) < NUM_TOKENS and ids[-1:] != [EOS_TOKEN_ID]:
        ids.append(EOS_TOKEN_ID)
    return ids


class ChatText:
    """The demo model's chat template and vocabulary, by transformers."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(models.hf_folder())

    def prompt_ids(self, question: str) -> list[int]:
        """The tokens that a chat of one question becomes."""
        told = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )
        return list(told["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Plain text."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def _questions() -> list[str]:
    from tests.support.answers import mtbench_prompts

    return mtbench_prompts(NUM_PROMPTS)


def _answer(peer: Peer, prompt: Sequence[int]) -> list[int]:
    (line,) = peer.ask([prompt], NUM_TOKENS, ignore_eos=False)
    return complete(line.token_ids)


def _print(figures: Mapping[str, Any]) -> None:
    report.print_table(
        f"greedy answers beside fp32 on the demo file's weights, {NUM_PROMPTS} prompts, {NUM_TOKENS} tokens",
        ("configuration", "equal", "equal or near tie", "equal prefix", SIMPLE_ANSWER),
        [
            (
                name,
                f"{row['equal_share']:.0%}",
                f"{row['equal_or_near_tie_share']:.0%}",
                row["mean_equal_prefix"],
                "yes" if SIMPLE_ANSWER in row["simple_answer"] else "NO",
            )
            for name, row in figures.items()
        ],
    )
