"""The demo model end to end: file, tokenizer, model and pool give the tokens that transformers gives."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine.loading.load import LoadedModel, load_model
from engine.loading.sources import resolve_source
from tests.support.oracle import demo_model_path, load_oracle, teacher_forced_check
from tests.support.tiny_models import PagedRun, greedy

QUESTIONS = Path(__file__).parents[2] / "data" / "mtbench" / "question.jsonl"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(resolve_source(str(demo_model_path())), "float32", "expanded")


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    tokenizer = Tokenizer.from_str(loaded.bundle["tokenizer.json"].decode())
    lines = QUESTIONS.read_text().splitlines()[:40:10]
    texts = [
        f"<|im_start|>user\n{json.loads(line)['turns'][0]}<|im_end|>\n<|im_start|>assistant\n"
        for line in lines
    ]
    return [tokenizer.encode(text).ids for text in texts]


def test_every_weight_equals_the_oracles(loaded: LoadedModel) -> None:
    state = load_oracle().state_dict()
    weights = loaded.model.weights
    assert torch.equal(weights.embedding.values, state["model.embed_tokens.weight"])
    for number, layer in enumerate(weights.layers):
        prefix = f"model.layers.{number}"
        names = [f"{prefix}.self_attn.{name}_proj.weight" for name in "qkv"]
        assert torch.equal(layer.qkv.values, torch.cat([state[name] for name in names]))
        assert torch.equal(layer.down.values, state[f"{prefix}.mlp.down_proj.weight"])


def test_greedy_tokens_equal_transformers_one_by_one(
    loaded: LoadedModel, prompts: list[list[int]]
) -> None:
    run = PagedRun(loaded, num_blocks=128)
    for sequence, prompt in enumerate(prompts[:2]):
        output = greedy(run, sequence, prompt, NUM_TOKENS, chunk=37)
        assert [m for m in teacher_forced_check(prompt, output) if not m.is_near_tie] == []


def test_greedy_tokens_equal_transformers_in_one_batch(
    loaded: LoadedModel, prompts: list[list[int]]
) -> None:
    run = PagedRun(loaded, num_blocks=128)
    outputs: list[list[int]] = [[] for _ in prompts]
    parts = list(enumerate(prompts))
    for _ in range(NUM_TOKENS):
        chosen = run.step(parts).argmax(-1).tolist()
        for output, token in zip(outputs, chosen, strict=True):
            output.append(token)
        parts = [(sequence, output[-1:]) for sequence, output in enumerate(outputs)]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert [m for m in teacher_forced_check(prompt, output) if not m.is_near_tie] == []


def test_weights_kept_in_blocks_give_the_same_tokens(
    loaded: LoadedModel, prompts: list[list[int]]
) -> None:
    kept = load_model(resolve_source(str(demo_model_path())), "float32", "quantized")
    assert kept.weight_format == "gguf"
    assert kept.model_digest == loaded.model_digest
    output = greedy(PagedRun(kept), 0, prompts[0][:40], 4, chunk=64)
    assert output == greedy(PagedRun(loaded), 0, prompts[0][:40], 4, chunk=64)


def test_a_wrong_token_is_found() -> None:
    prompt = [1, 4093, 198]
    greedy_token = int(load_oracle()(torch.tensor([prompt])).logits[0, -1].argmax())
    assert teacher_forced_check(prompt, [greedy_token]) == []
    wrong = teacher_forced_check(prompt, [greedy_token + 1])
    assert [(m.position, m.expected) for m in wrong] == [(0, greedy_token)]
