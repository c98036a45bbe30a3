"""A node's arguments as the struct its instruction points to, once every place has an address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.cpu import structs
from kernels.cpu.lowering import Node, QuantBuffer
from kernels.cpu.packing import HostWeight
from kernels.cpu.places import Place
from kernels.cpu.structs import KvType, NativeKvView, Op, QuantRows, Rows
from kernels.kv_view import KVView

_KV_TYPES = {
    torch.float32: KvType.F32,
    torch.float16: KvType.F16,
    torch.bfloat16: KvType.BF16,
    torch.float8_e4m3fn: KvType.FP8_E4M3,
    torch.float8_e5m2: KvType.FP8_E5M2,
    torch.int8: KvType.INT8,
}


class Memory(Protocol):
    """Where things lie."""

    def rows(self, place: Place | None) -> Rows:
        """Address and stride of a place; null for none."""
        ...

    def quant_rows(self, buffer: QuantBuffer | None) -> QuantRows:
        """Address of quantised rows; null for none."""
        ...


def kv_view(layer: KVView) -> NativeKvView:
    """A layer's pool as the kernels see it."""
    values, scales = layer.values, layer.scales
    blocks, heads, halves = values.stride()[:3]
    assert values.stride()[3:] == (layer.head_dim, 1), "a slot's elements follow each other"
    scale_strides = (0, 0, 0) if scales is None else scales.stride()[:3]
    return NativeKvView(
        values.data_ptr(),
        None if scales is None else scales.data_ptr(),
        blocks,
        heads,
        halves,
        *scale_strides,
        _KV_TYPES[values.dtype],
        layer.block_size,
        layer.num_kv_heads,
        layer.head_dim,
    )


def arguments_of(node: Node, memory: Memory) -> ctypes.Structure:
    """The arguments struct of one instruction. What it points to is kept alive by node and memory."""
    return _BUILDERS[node.op](node, memory)


def _floats(tensor: Tensor | None, first: int = 0) -> int | None:
    """The address of a float32 vector from element `first`."""
    if tensor is None:
        return None
    assert tensor.dtype == torch.float32, "vectors are float32"
    assert tensor.is_contiguous(), "a vector's elements follow each other"
    return tensor.data_ptr() + 4 * first


def _weight(weight: HostWeight) -> Any:
    return ctypes.pointer(weight.native)


def _embed(node: Node, memory: Memory) -> ctypes.Structure:
    return structs.Embed(_weight(node.constants["weight"]), memory.rows(node.places["out"]))


def _norm(node: Node, memory: Memory) -> ctypes.Structure:
    hidden, out = node.places["hidden"], node.places.get("out")
    return structs.Norm(
        memory.rows(hidden),
        memory.rows(node.places.get("residual")),
        _floats(node.constants["weight"]),
        memory.rows(out),
        memory.quant_rows(node.quantised),
        hidden.width,
        hidden.num_vectors,
        hidden.width,
        hidden.width,
        node.constants["epsilon"],
        0,
    )


def _product(node: Node, memory: Memory) -> ctypes.Structure:
    return structs.Product(
        _weight(node.constants["weight"]),
        memory.rows(node.places.get("inputs")),
        memory.quant_rows(node.quantised),
        _floats(node.constants["bias"], node.constants["first_row"]),
        memory.rows(node.places["out"]),
    )


def _angles(node: Node, memory: Memory) -> ctypes.Structure:
    cos, sin = memory.rows(node.places["cos"]), memory.rows(node.places["sin"])
    frequencies = node.constants["frequencies"]
    return structs.Angles(
        _floats(frequencies), cos, sin, len(frequencies), node.constants["factor"], 0
    )


def _rope(node: Node, memory: Memory) -> ctypes.Structure:
    places = [memory.rows(node.places[name]) for name in ("heads", "cos", "sin", "out")]
    return structs.Rope(*places, node.places["heads"].num_vectors, node.places["heads"].width)


def _write_kv(node: Node, memory: Memory) -> ctypes.Structure:
    key, value = memory.rows(node.places["key"]), memory.rows(node.places["value"])
    return structs.WriteKv(key, value, kv_view(node.constants["layer"]))


def _attend(node: Node, memory: Memory) -> ctypes.Structure:
    constants = node.constants
    return structs.Attend(
        memory.rows(node.places["query"]),
        memory.rows(node.places["out"]),
        kv_view(constants["layer"]),
        _floats(constants["sinks"]),
        node.places["query"].num_vectors,
        constants["window"] or 0,
        constants["scale"],
        constants["soft_cap"] or 0.0,
    )


def _gated(node: Node, memory: Memory) -> ctypes.Structure:
    return structs.Gated(
        memory.rows(node.places["gate_up"]),
        memory.rows(node.places.get("out")),
        memory.quant_rows(node.quantised),
        node.places["gate_up"].width // 2,
        node.constants["is_gelu"],
        0,
    )


def _quantise(node: Node, memory: Memory) -> ctypes.Structure:
    return structs.Quantise(memory.rows(node.places["inputs"]), memory.quant_rows(node.quantised))


def _take(node: Node, memory: Memory) -> ctypes.Structure:
    inputs, out = node.places["inputs"], node.places["out"]
    return structs.Take(memory.rows(inputs), memory.rows(out), inputs.width)


def _argmax(node: Node, memory: Memory) -> ctypes.Structure:
    inputs, out = node.places["inputs"], node.constants["out"]
    return structs.Argmax(memory.rows(inputs), out.data_ptr(), inputs.width)


def _mark(node: Node, memory: Memory) -> ctypes.Structure:
    return structs.Mark(node.constants["layer"])


_BUILDERS: dict[Op, Callable[[Node, Memory], ctypes.Structure]] = {
    Op.EMBED: _embed,
    Op.NORM: _norm,
    Op.PRODUCT: _product,
    Op.ANGLES: _angles,
    Op.ROPE: _rope,
    Op.WRITE_KV: _write_kv,
    Op.ATTEND: _attend,
    Op.MERGE: _attend,
    Op.GATED: _gated,
    Op.QUANTISE: _quantise,
    Op.TAKE: _take,
    Op.MARK: _mark,
    Op.ARGMAX: _argmax,
}
