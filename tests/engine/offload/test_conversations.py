"""Thirty-two conversations at once over a tenth of the pool they need, with tiers below it: not a bit differs.

The host kernels give a row the same bits whatever surrounds it, so a run that evicts, loads and preempts has the very
tokens and log-probabilities of one that never does.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engine.config import EngineConfig
from engine.messages import AddRequest, ChoiceOutput
from engine.offload.loads import LoadSide
from engine.offload_config import OffloadConfig
from engine.runner.model_runner import ModelRunner
from tests.support.engines import AssembledEngine, make_request, turn_until
from tests.support.tiny_models import save_folder, tiny_model

NUM_CONVERSATIONS = 32
NUM_TURNS = 3
VOCAB_SIZE = 128
NUM_BLOCKS = 480
"""More than all conversations together ever hold: 15 blocks each."""

TOKENS_PER_S = 10.0
"""What computing is taken to do: less than any tier gives back."""

MIB = 1 / 1024

Answers = dict[tuple[int, int], list[ChoiceOutput]]


class Turn(NamedTuple):
    """What a user adds, and how the answer is sampled."""

    tokens: list[int]
    sampling: dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", num_hidden_layers=2, vocab_size=VOCAB_SIZE)
    return save_folder(model, tmp_path_factory.mktemp("model"))


def make_conversations() -> list[list[Turn]]:
    """Half of them begin with one of two system prompts; some are greedy, most are not."""
    chance = random.Random(3)

    def words(count: int) -> list[int]:
        return [chance.randrange(3, VOCAB_SIZE) for _ in range(count)]

    systems = [words(40), words(53)]
    conversations = []
    for number in range(NUM_CONVERSATIONS):
        opening = systems[number % 4] if number % 4 < 2 else words(40)
        turns = []
        for turn in range(NUM_TURNS):
            sampling = {
                "seed": 100 * number + turn,
                "temperature": chance.choice([0.0, 0.7, 1.2]),
                "logprobs": 2,
                "max_tokens": chance.randrange(8, 24),
                "ignore_eos": True,
            }
            turns.append(
                Turn([*(opening if not turn else []), *words(chance.randrange(5, 30))], sampling)
            )
        conversations.append(turns)
    return conversations


def hold(engine: AssembledEngine, conversations: list[list[Turn]], order: random.Random) -> Answers:
    """All conversations at once, each user answering as soon as they are answered; what was said, by name and turn."""
    answers: Answers = {}
    histories: list[list[int]] = [[] for _ in conversations]
    due = list(range(len(conversations)))
    open_turns: dict[int, int] = {}
    turns_done = [0] * len(conversations)
    engine.outputs.clear()
    while due or open_turns:
        order.shuffle(due)
        while due and order.random() < 0.7:
            number = due.pop()
            turn = turns_done[number]
            histories[number] += conversations[number][turn].tokens
            request = make_request(
                f"{number}.{turn}", histories[number], **conversations[number][turn].sampling
            )
            engine.inbox.post(AddRequest(request))
            open_turns[number] = turn
        engine.turn(0.001)
        for number, turn in list(open_turns.items()):
            name = f"{number}.{turn}"
            if engine.finish_reasons(name):
                assert engine.finish_reasons(name) == {0: "length"}
                del open_turns[number]
                histories[number] += engine.tokens(name)
                answers[number, turn] = engine.outputs[name]  # type: ignore[index]
                turns_done[number] += 1
                if turns_done[number] < NUM_TURNS:
                    due.append(number)
    turn_until(engine.is_idle, engine)
    return answers


def bits(answers: Answers) -> dict[tuple[int, int], list[Any]]:
    """Every token with all that was said of its probability."""
    return {
        name: [
            (token, entry.logprob, entry.rank, entry.top_token_ids, entry.top_logprobs)
            for output in outputs
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
        for name, outputs in answers.items()
    }


def make_engine(folder: Path, num_blocks: int, **offload: Any) -> AssembledEngine:
    config = EngineConfig(
        str(folder),
        kernel_backend="cpu",
        num_threads=1,
        core_ledger="none",
        ipc_dir="none",
        max_model_len=240,
        num_blocks=num_blocks,
        max_num_seqs=32,
        max_num_batched_tokens=96,
        offload=OffloadConfig(**offload),
    )
    return AssembledEngine(config)


@pytest.mark.parametrize(("store", "num_rounds"), [("eager", 10), ("lazy", 3)])
def test_rounds_over_a_tenth_of_the_pool_equal_one_that_never_evicts(
    store: str,
    num_rounds: int,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A tier that is found slower than computing would be declined: on a busy machine that is chance.
    monkeypatch.setattr(ModelRunner, "measure_prefill_rate", lambda *_: TOKENS_PER_S)
    monkeypatch.setattr(LoadSide, "note_step", lambda *_: None)
    conversations = make_conversations()
    with torch.inference_mode():
        large = make_engine(folder, NUM_BLOCKS)
        expected = bits(hold(large, conversations, random.Random(0)))
        assert large.stats.preemptions_total == 0
        large.close()
        # The pool holds the longest conversation three times; the host a third of all, so the disk has a part too.
        small = make_engine(
            folder,
            NUM_BLOCKS // 10,
            store=store,
            size=0.6 * MIB,
            disk_dir=str(tmp_path),
            disk_size=2 * MIB,
        )
        try:
            for number in range(num_rounds):
                assert bits(hold(small, conversations, random.Random(number))) == expected
            host, disk = small.stats.tiers
            assert small.stats.preemptions_total > 0
            assert small.stats.tier_hits_total > 1000
            assert host.loaded_blocks_total > 0
            assert disk.loaded_blocks_total > 0
            assert host.evicted_blocks_total > 0
            assert not small.stats.integrity_violations_total
        finally:
            small.close()
