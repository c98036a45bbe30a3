"""The operations of `kernels.ops` in plain torch: the specification, and the only backend that needs nothing built."""

from kernels.reference.attention import paged_attention
from kernels.reference.cache import (
    convert_kv,
    copy_blocks,
    gather_blocks,
    scatter_blocks,
    write_kv,
)
from kernels.reference.elementwise import (
    add_rms_norm,
    gelu_mul,
    rms_norm,
    rope,
    rope_angles,
    silu_mul,
    take_rows,
)
from kernels.reference.merging import merge_partials
from kernels.reference.packing import pack, pack_rows
from kernels.reference.philox import uniforms
from kernels.reference.products import embedding, linear
from kernels.reference.sampling import (
    add_bias,
    allow_only,
    argmax,
    ban,
    draw,
    penalise_frequency,
    penalise_repetition,
    token_logprobs,
)

__all__ = [
    "add_bias",
    "add_rms_norm",
    "allow_only",
    "argmax",
    "ban",
    "convert_kv",
    "copy_blocks",
    "draw",
    "embedding",
    "gather_blocks",
    "gelu_mul",
    "linear",
    "merge_partials",
    "pack",
    "pack_rows",
    "paged_attention",
    "penalise_frequency",
    "penalise_repetition",
    "rms_norm",
    "rope",
    "rope_angles",
    "scatter_blocks",
    "silu_mul",
    "take_rows",
    "token_logprobs",
    "uniforms",
    "write_kv",
]
