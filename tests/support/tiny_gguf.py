"""Tiny GGUF files, written by the `gguf` package from transformers models: the layout of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

VOCAB_SIZE = 320
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_USER_DEFINED = "<tool>"
_MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "Ġ Ġ", "o r", "Ċ Ċ")
_PERMUTING = frozenset({"llama"})
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins of GPT-2's byte alphabet, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(byte) for byte in printable}
    stand_ins |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [stand_ins[byte] for byte in range(256)]


def vocabulary() -> tuple[list[str], list[int]]:
    """(tokens, token types) of a byte-level BPE with three control tokens and a user-defined one."""
    tokens = [*_SPECIAL, _USER_DEFINED, *byte_tokens(), *(m.replace(" ", "") for m in _MERGES)]
    types = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    unused = VOCAB_SIZE - len(tokens)
    return tokens + [f"[unused{i}]" for i in range(unused)], types + [5] * unused


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    quantization: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """A complete file; `metadata` adds keys (`{arch}` stands for the architecture) or removes them by None."""
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, _metadata(model, pre_tokenizer) | dict(metadata or {}), architecture)
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        _add_tensor(writer, name, values.numpy(), model, architecture, quantization)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(model: PreTrainedModel, pre_tokenizer: str) -> dict[str, Any]:
    config = model.config
    tokens, types = vocabulary()
    return {
        "{arch}.block_count": config.num_hidden_layers,
        "{arch}.context_length": config.max_position_embeddings,
        "{arch}.embedding_length": config.hidden_size,
        "{arch}.feed_forward_length": config.intermediate_size,
        "{arch}.attention.head_count": config.num_attention_heads,
        "{arch}.attention.head_count_kv": config.num_key_value_heads,
        "{arch}.attention.key_length": config.head_dim,
        "{arch}.attention.value_length": config.head_dim,
        "{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_metadata(writer: gguf.GGUFWriter, values: Mapping[str, Any], architecture: str) -> None:
    for key, value in values.items():
        full = key.replace("{arch}", architecture)
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif value is not None:
            writer.add_array(full, value)


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    values: npt.NDArray[np.float32],
    model: PreTrainedModel,
    architecture: str,
    quantization: str,
) -> None:
    if architecture in _PERMUTING and ".q_proj." in name:
        values = _permuted(values, model.config.num_attention_heads)
    if architecture in _PERMUTING and ".k_proj." in name:
        values = _permuted(values, model.config.num_key_value_heads)
    kind = gguf.GGMLQuantizationType[quantization if values.ndim == 2 else "F32"]
    data = gguf.quantize(values, kind)
    writer.add_tensor(gguf_name(name), data, raw_dtype=kind)


def _permuted(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Halves of each head interleaved, as the converter does for architectures with neighbour rotation."""
    split = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def gguf_name(name: str) -> str:
    """The GGUF name of a transformers tensor."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{suffix}"
