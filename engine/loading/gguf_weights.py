"""Weights of a GGUF file under Hugging Face names, expanded or kept in blocks.

Files of some architectures hold the rows of q and k so that neighbouring elements of a head rotate together; models
here rotate element i with i + D/2, so those rows are put back in that order at load (rows only: blocks run along
columns and are not touched).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from core.canonical import pack_fields
from core.errors import ModelLoadError
from engine.loading.gguf_file import GgufFile, TensorEntry
from kernels.reference.gguf_blocks import dequantize
from kernels.weights import BlockWeight, DenseWeight

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rope frequencies, part of the config rather than of the weights."""


def hugging_face_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, None when it has none."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{suffix}"
    return None


def half_split_rows(rows: Tensor, num_heads: int) -> Tensor:
    """Rows `[num_heads * D, ...]` from neighbour order (0, D/2, 1, D/2 + 1, ...) to 0, 1, ... D - 1 in each head."""
    head_dim = rows.shape[0] // num_heads
    pairs = rows.reshape(num_heads, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


class GgufWeights:
    """A WeightSource over an open GGUF file, which it closes."""

    def __init__(
        self,
        file: GgufFile,
        dtype: torch.dtype,
        keep_blocks: bool,
        interleaved_heads: dict[str, int],
    ) -> None:
        """interleaved_heads: heads of `q_proj` and `k_proj` when their rows are in neighbour order, else empty."""
        self._file, self._dtype, self._keep_blocks = file, dtype, keep_blocks
        self._interleaved_heads = interleaved_heads
        self._entries = _rename(file)

    def names(self) -> Iterable[str]:
        """See WeightSource.names."""
        return self._entries.keys()

    def matrix(self, name: str) -> DenseWeight | BlockWeight:
        """See WeightSource.matrix. Only matrices of quantised formats stay in blocks."""
        entry = self._entries[name]
        raw = self._reordered(name, self._file.raw(entry.name))
        if self._keep_blocks and entry.block_format.block_elements > 1:
            return BlockWeight(raw.clone(), entry.block_format, self._dtype)
        return DenseWeight(dequantize(raw, entry.block_format, self._dtype))

    def vector(self, name: str) -> Tensor:
        """See WeightSource.vector."""
        entry = self._entries[name]
        raw = self._file.raw(entry.name)
        values = dequantize(raw, entry.block_format, self._dtype).flatten()
        return self._reordered(name, values)

    def digest(self) -> str:
        """See WeightSource.digest."""
        state = xxhash.xxh3_128()
        for name, entry in sorted(self._file.tensors.items()):
            state.update(pack_fields([name, entry.block_format.name, *entry.shape]))
            state.update(self._file.raw(name).numpy().data)
        return state.hexdigest()

    def close(self) -> None:
        """See WeightSource.close."""
        self._file.close()

    def _reordered(self, name: str, rows: Tensor) -> Tensor:
        num_heads = self._interleaved_heads.get(name.split(".")[-2])
        return rows if num_heads is None else half_split_rows(rows, num_heads)


def _rename(file: GgufFile) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for name, entry in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        renamed = hugging_face_name(name)
        if renamed is None:
            raise ModelLoadError(
                f"{file.path}: tensor {name} belongs to no known part of the model"
            )
        entries[renamed] = entry
    return entries
