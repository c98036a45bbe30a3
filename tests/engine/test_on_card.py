"""Everything of an engine that runs on a card, on a card that is pretended: kernels interpreted, sides kept apart.

What lies on the wrong side fails here as it would there, and so does what is read before it was waited for.
"""

from __future__ import annotations

import tests.support.triton_device  # isort: skip  # noqa: F401  first: it chooses the interpreter

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.errors import ConfigError
from core.request import Request, SamplingParams
from core.worker_info import Role
from engine.config import EngineConfig
from engine.loading.load import load_model
from engine.loading.sources import resolve_source
from engine.messages import AddRequest
from engine.sampler.rows import SampleRow
from engine.sampler.sampler import Sampler
from kernels import ops, reference
from kvtransfer.transports.choice import Senders
from tests.support.engines import AssembledEngine, Wire, make_request, turn_until
from tests.support.poison import poisoned_memory
from tests.support.scenes import answer, run_to_end, submit
from tests.support.tiny_gguf import VOCAB_SIZE as GGUF_VOCAB_SIZE
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import save_folder, tiny_model
from tests.support.triton_device import IS_INTERPRETED

pytest.importorskip("triton", reason="needs the extra `triton`, which exists for Linux only")

from tests.support.pretend_card import CARD, Card, CardTensor, pretend_card

pytestmark = pytest.mark.skipif(
    not IS_INTERPRETED, reason="on a card gpu-check serves a model through the whole worker"
)
VOCAB_SIZE = 128


@pytest.fixture
def card() -> Iterator[Card]:
    with poisoned_memory(), pretend_card() as card:
        yield card


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms on heads, grouped queries, two layers."""
    model = tiny_model("qwen3", num_hidden_layers=2, vocab_size=VOCAB_SIZE)
    return save_folder(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers whose weights stay in blocks of eight bits on the card."""
    sizes = {"vocab_size": GGUF_VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96}
    model = tiny_model("llama", num_hidden_layers=2, num_attention_heads=4, **sizes)
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "m.gguf", quantization="Q8_0")


@contextmanager
def engine(model: Path, **changes: Any) -> Iterator[AssembledEngine]:
    defaults = {"max_model_len": 128, "num_blocks": 24, "max_num_batched_tokens": 24}
    config = EngineConfig(str(model), **{**defaults, "max_num_seqs": 8, **changes})
    assembled = AssembledEngine(config)
    try:
        yield assembled
    finally:
        assembled.close()


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill rate is of no interest where kernels are interpreted."""
    monkeypatch.setattr("engine.runner.model_runner._FIRST_PROBE_TOKENS", 1)
    monkeypatch.setattr("engine.runner.model_runner._LARGEST_PROBE_TOKENS", 2)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


# A chunk ends inside a block; the second prompt begins with the first one, whose blocks both sides hold by then; its
# choices share a partly filled tail, which the first to write copies.
REQUESTS = (
    make_request("a", prompt(42), max_tokens=4),
    make_request("b", [*prompt(42), 7, 9], max_tokens=3, n=2, temperature=0.8, logprobs=2),
)


def run(alone: AssembledEngine, request: Request) -> list[list[int]]:
    """Tokens, a list a choice, of an engine that computes everything itself."""
    alone.inbox.post(AddRequest(request))
    turn_until(lambda: len(alone.finish_reasons(request.id)) == request.sampling.n, alone)
    return [alone.tokens(request.id, choice) for choice in range(request.sampling.n)]


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize("kind", ["folder", "gguf_file"])
def test_a_split_request_on_the_card_has_the_tokens_of_the_reference(
    kind: str, card: Card, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Path = request.getfixturevalue(kind)
    queued_at_push: list[int] = []
    push = Senders.push

    def watched(*arguments: Any) -> None:
        queued_at_push.append(card.num_queued)
        push(*arguments)

    monkeypatch.setattr(Senders, "push", watched)
    on_card = {"device": "cuda", "layers_per_range": 1}
    with (
        engine(model, role=Role.PREFILL, **on_card) as prefill,
        engine(model, role=Role.DECODE, **on_card) as decode,
    ):
        assert prefill.kernels == decode.kernels == "triton (interpreter)"
        assert prefill.progress[0] == "kernels: triton (interpreter)"
        assert isinstance(decode.core._storage.tensor, CardTensor)
        assert decode.identity.weight_format == {"folder": "float32", "gguf_file": "gguf"}[kind]
        wire, split = Wire(decode, {"p1": prefill}), {}
        for asked in REQUESTS:
            submit(wire, asked, "p1")
            run_to_end(wire, asked)
            split[asked.id] = answer(wire, asked)
        assert decode.stats.sessions_completed_total == len(REQUESTS)
        assert decode.stats.computed_prompt_tokens_total == 0
        assert prefill.stats.cached_prompt_tokens_total == 32
        sent_blocks = 3 + 1  # of the second prompt D lacks the tail alone
        assert prefill.stats.sent_bytes_total == sent_blocks * decode.layout.block_bytes
    # One for each layer of each of three chunks that have something to send.
    assert queued_at_push == [0] * 6, "what is pushed is on the host"
    assert card.num_launches > 0
    assert card.page_locked == {}
    with engine(model, device="cpu", kernel_backend="reference") as alone:
        assert split == {asked.id: run(alone, asked) for asked in REQUESTS}


@pytest.mark.usefixtures("quick_start")
def test_half_precision_is_served_on_the_card(folder: Path, card: Card) -> None:
    """Rows, KV and KV in fewer bits, through one prompt and its answer."""
    request = make_request("r", prompt(17), max_tokens=2)
    for dtype, kv_dtype in (("bfloat16", "auto"), ("float16", "fp8_e4m3")):
        kinds = {"dtype": dtype, "kv_cache_dtype": kv_dtype}
        with engine(folder, device="cuda", **kinds) as alone:
            found = run(alone, request)
        with engine(folder, device="cpu", kernel_backend="reference", **kinds) as alone:
            assert found == run(alone, request)


def test_a_machine_without_a_card_refuses_in_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for changes, reason in (
        ({"device": "cuda"}, "--device: 'cuda' cannot run here: torch sees no CUDA device"),
        ({"kernel_backend": "triton"}, "--kernel-backend: 'triton' runs on --device cuda"),
    ):
        with pytest.raises(ConfigError, match=reason), engine(folder, **changes):
            pass


def test_the_host_kernels_are_refused_on_the_card(folder: Path, card: Card) -> None:
    reason = "--kernel-backend: 'reference' runs on --device cpu; --device is cuda"
    with (
        pytest.raises(ConfigError, match=reason),
        engine(folder, device="cuda", kernel_backend="reference"),
    ):
        pass


# ---------------------------------------------------------------- parts


def tensors_of(value: object) -> Iterator[Tensor]:
    """Every tensor inside dataclasses and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0", "F16"])
def test_every_weight_is_loaded_to_the_card(quantization: str, tmp_path: Path, card: Card) -> None:
    from kernels import triton

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes["vocab_size"] = GGUF_VOCAB_SIZE
    model = tiny_model("llama", attention_bias=True, num_attention_heads=4, **sizes)
    path = write_gguf(model, tmp_path / "m.gguf", quantization=quantization)
    ops.use_backend(triton)
    loaded = load_model(resolve_source(str(path)), "float16", "quantized", CARD)
    found = [*tensors_of(loaded.model.weights), loaded.model._frequencies]
    assert len(found) > 10
    assert all(isinstance(tensor, CardTensor) for tensor in found)


def rows() -> list[SampleRow]:
    """Every way to choose a token, two rows of logits, history and bans."""

    def row(logits_row: int, **settings: Any) -> SampleRow:
        history = {k: settings.pop(k) for k in list(settings) if k.endswith("_token_ids")}
        params = SamplingParams(**{"seed": 3, "max_tokens": 9, "temperature": 0.0, **settings})
        return SampleRow(logits_row, params, 4, 0, **history)

    return [
        row(1),
        row(0, banned_token_ids=(5, 1000)),
        row(0, allowed_token_ids=[8, 9]),
        row(1, logit_bias=((3, 4.0), (2000, 1.0))),
        row(1, repetition_penalty=1.3, prompt_token_ids=[1, 2, 2], output_token_ids=[4]),
        row(0, frequency_penalty=0.4, presence_penalty=0.1, output_token_ids=[4, 4, 6]),
        row(0, temperature=0.7, logprobs=3),
        row(1, temperature=1.2, top_k=5, top_p=0.8, min_p=0.01),
        row(1, logprobs=0),
    ]


ADJUSTMENTS = ("allow_only", "ban", "add_bias", "penalise_repetition", "penalise_frequency")


def test_the_sampler_works_where_the_logits_are(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels import triton

    adjusted: set[str] = set()

    def checked(name: str) -> Callable[..., None]:
        operation = getattr(ops, name)

        def call(row: Tensor, *arguments: Any) -> None:
            given = [x for x in arguments if isinstance(x, Tensor)]
            assert all(type(x) is type(row) for x in given), name
            adjusted.add(name)
            operation(row, *arguments)

        return call

    for name in ADJUSTMENTS:
        monkeypatch.setattr(ops, name, checked(name))
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    ops.use_backend(reference)
    expected = Sampler().sample(logits, rows())
    ops.use_backend(triton)
    adjusted.clear()
    found = Sampler().sample(logits.to(CARD), rows())
    assert adjusted == set(ADJUSTMENTS)
    assert [x.token_id for x in found] == [x.token_id for x in expected]
    for own, other in zip(found, expected, strict=True):
        assert (own.logprobs is None) == (other.logprobs is None)
        if own.logprobs is not None and other.logprobs is not None:
            assert own.logprobs.top_token_ids == other.logprobs.top_token_ids
            assert own.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)


# ---------------------------------------------------------------- the pretended card itself


def test_the_pretended_card_refuses_what_a_card_refuses(card: Card) -> None:
    from kernels import triton

    here, there = torch.ones(4), torch.ones(4, device=CARD)
    assert there.device == CARD
    assert isinstance(there + 1, CardTensor)
    assert type(there.cpu()) is Tensor
    with pytest.raises(AssertionError, match="mixes"):
        _ = here + there
    with pytest.raises(AssertionError, match="mixes"):
        _ = there[torch.tensor([0])]
    with pytest.raises(AssertionError, match="host memory only"):
        there.numpy()
    with pytest.raises(AssertionError, match="tensor of the host"):
        triton.silu_mul(here.view(1, 4))
    here.copy_(there + 1, non_blocking=True)
    assert here.tolist() == [1.0] * 4, "nobody has waited yet"
    there.tolist()
    assert here.tolist() == [2.0] * 4
    with pytest.raises(AssertionError, match="swappable"):
        there.copy_(here, non_blocking=True)
