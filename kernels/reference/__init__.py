"""The operations of `kernels.ops` in plain torch: the specification, and the only backend that needs nothing built."""

from kernels.reference.attention import paged_attention
from kernels.reference.cache import copy_blocks, write_kv
from kernels.reference.elementwise import add_rms_norm, rms_norm, rope, silu_mul
from kernels.reference.packing import pack
from kernels.reference.products import embedding, linear

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "embedding",
    "linear",
    "pack",
    "paged_attention",
    "rms_norm",
    "rope",
    "silu_mul",
    "write_kv",
]
