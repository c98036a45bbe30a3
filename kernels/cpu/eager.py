"""Operations one at a time on tensors: what a program does, what comes after it, and code that records nothing.

Every function has the meaning of its namesake in `kernels.ops`. Inputs are float32 with contiguous rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import blocks, sampling
from kernels.cpu.arguments import arguments_of
from kernels.cpu.host_program import HostProgram
from kernels.cpu.lowering import Node, QuantBuffer, host_parts
from kernels.cpu.packing import pack
from kernels.cpu.places import Buffer, Place
from kernels.cpu.quant_memory import LEAST_ROWS, QuantMemory
from kernels.cpu.structs import ROWS_TOKENS, Instruction, MergePartials, Op, QuantRows, Rows, Step
from kernels.cpu.team import Team
from kernels.kv_view import KVView
from kernels.recording import Recording
from kernels.step import StepMetadata
from kernels.weights import Weight
from kernels.workspace import Workspace


class _Tensors:
    """Memory whose buffers are tensors of their own."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = max(num_rows, LEAST_ROWS)
        self._tensors: dict[int, Tensor] = {}
        self._quants: dict[int, QuantMemory] = {}
        self._buffers: list[Buffer] = []

    def place(self, tensor: Tensor) -> Place:
        """Where a tensor `[rows, width]` or `[rows, vectors, width]` lies."""
        assert tensor.dtype == torch.float32, "rows are float32"
        assert tensor.stride(-1) == 1, "a row's elements follow each other"
        buffer = Buffer(tensor.stride(0), ROWS_TOKENS, 0, 0)
        self._buffers.append(buffer)
        self._tensors[id(buffer)] = tensor
        vectors = tensor.shape[1] if tensor.dim() == 3 else 1
        assert vectors == 1 or tensor.stride(1) == tensor.shape[2], "vectors follow each other"
        return Place(buffer, 0, tensor.shape[-1], vectors)

    def rows(self, place: Place | None) -> Rows:
        """See Memory.rows."""
        if place is None:
            return Rows()
        base = self._tensors[id(place.buffer)].data_ptr()
        return Rows(base + 4 * place.column, place.buffer.width)

    def quant_rows(self, buffer: QuantBuffer | None) -> QuantRows:
        """See Memory.quant_rows."""
        if buffer is None:
            return QuantRows()
        if id(buffer) not in self._quants:
            self._quants[id(buffer)] = QuantMemory(self._num_rows, buffer.width)
        return self._quants[id(buffer)].rows(buffer.width)


class Eager:
    """The operations on one team."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """`[T, H]`."""
        (part,) = host_parts(weight)
        out = torch.empty(token_ids.shape[0], weight.shape[1])
        memory = _Tensors(len(out))
        node = Node(Op.EMBED, ROWS_TOKENS, {"out": memory.place(out)}, {"weight": part})
        self._run([node], memory, Step(num_tokens=len(out), token_ids=token_ids.data_ptr()))
        return out

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """`[T, H]` or `[T, heads, D]`, as hidden."""
        out = torch.empty(hidden.shape)
        memory = _Tensors(len(out))
        places = {"hidden": memory.place(hidden), "out": memory.place(out)}
        self._one(Op.NORM, places, memory, len(out), weight=weight, epsilon=epsilon)
        return out

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """(normed, sum); the sum is in the memory of `residual`."""
        out = torch.empty(hidden.shape)
        memory = _Tensors(len(out))
        places = {"hidden": memory.place(hidden), "residual": memory.place(residual)}
        places["out"] = memory.place(out)
        self._one(Op.NORM, places, memory, len(out), weight=weight, epsilon=epsilon)
        return out, residual

    def linear(self, inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """`[T, N]`."""
        packed = pack(weight)
        out = torch.empty(inputs.shape[0], packed.shape[0])
        memory = _Tensors(len(out))
        source = memory.place(inputs)
        quantised = QuantBuffer(inputs.shape[1], ROWS_TOKENS, 0, 0)
        nodes, first = [], 0
        if any(part.is_quantised for part in host_parts(packed)):
            nodes.append(Node(Op.QUANTISE, ROWS_TOKENS, {"inputs": source}, quantised=quantised))
        for part in host_parts(packed):
            place = memory.place(out[:, first : first + part.native.num_rows])
            constants = {"weight": part, "bias": bias, "first_row": first}
            places = {"inputs": source, "out": place}
            own = quantised if part.is_quantised else None
            nodes.append(Node(Op.PRODUCT, ROWS_TOKENS, places, constants, own))
            first += part.native.num_rows
        self._run(nodes, memory, Step(num_tokens=len(out)))
        return out

    def rope_angles(
        self,
        positions: Tensor,
        frequencies: Tensor,
        factor: float,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, `[T, D/2]` each."""
        cos, sin = (torch.empty(len(positions), len(frequencies)) for _ in range(2))
        memory = _Tensors(len(cos))
        places = {"cos": memory.place(cos), "sin": memory.place(sin)}
        node = Node(Op.ANGLES, ROWS_TOKENS, places, {"frequencies": frequencies, "factor": factor})
        self._run([node], memory, Step(num_tokens=len(cos), positions=positions.data_ptr()))
        return cos, sin

    def rope(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[T, heads, D]`."""
        out = torch.empty(heads.shape)
        memory = _Tensors(len(out))
        tensors = {"heads": heads, "cos": cos, "sin": sin, "out": out}
        self._one(Op.ROPE, {name: memory.place(t) for name, t in tensors.items()}, memory, len(out))
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`[T, N]`."""
        return self._gated(gate_up, is_gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """`[T, N]`."""
        return self._gated(gate_up, is_gelu=True)

    def _gated(self, gate_up: Tensor, is_gelu: bool) -> Tensor:
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        memory = _Tensors(len(out))
        places = {"gate_up": memory.place(gate_up), "out": memory.place(out)}
        self._one(Op.GATED, places, memory, len(out), is_gelu=is_gelu)
        return out

    def write_kv(self, key: Tensor, value: Tensor, layer: KVView, metadata: StepMetadata) -> None:
        """Into the pool."""
        memory = _Tensors(len(key))
        places = {"key": memory.place(key), "value": memory.place(value)}
        node = Node(Op.WRITE_KV, ROWS_TOKENS, places, {"layer": layer})
        slots = metadata.slot_mapping.data_ptr()
        self._run([node], memory, Step(num_tokens=len(key), slots=slots))

    def paged_attention(
        self,
        query: Tensor,
        layer: KVView,
        metadata: StepMetadata,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`[T, Hq, D]`."""
        out = torch.empty(query.shape)
        memory = _Tensors(len(out))
        places = {"query": memory.place(query), "out": memory.place(out)}
        constants = {"layer": layer, "scale": scale, "window": window, "soft_cap": soft_cap}
        constants["sinks"] = sinks
        nodes = [Node(op, ROWS_TOKENS, places, constants) for op in (Op.ATTEND, Op.MERGE)]
        starts = np.asarray(metadata.query_start, dtype=np.int64)
        lengths = np.asarray(metadata.seq_lens, dtype=np.int64)
        step = Step(
            num_tokens=len(out),
            num_sequences=len(lengths),
            tables=metadata.block_tables.data_ptr(),
            table_stride=metadata.block_tables.stride(0),
            query_start=starts.ctypes.data,
            seq_lens=lengths.ctypes.data,
        )
        self._run(nodes, memory, step)
        return out

    def take_rows(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """`[R, H]`."""
        return hidden.index_select(0, rows)

    def argmax(self, logits: Tensor) -> Tensor:
        """int64 `[rows]`, the lowest id among equals."""
        out = torch.empty(len(logits), dtype=torch.int64)
        memory = _Tensors(len(out))
        self._one(Op.ARGMAX, {"inputs": memory.place(logits)}, memory, len(out), out=out)
        return out

    def uniforms(
        self,
        seeds: Sequence[int],
        positions: Sequence[int],
        choices: Sequence[int],
        purpose: int = 0,
    ) -> Tensor:
        """float64 `[rows]`."""
        return sampling.uniforms(self._team, seeds, positions, choices, purpose)

    def draw(
        self,
        logits: Tensor,
        uniforms: Tensor,
        temperatures: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        workspace: Workspace,
    ) -> Tensor:
        """int64 `[rows]`. The threads have memory of their own: the workspace stays unused."""
        settings = (temperatures, top_k, top_p, min_p)
        return sampling.draw(self._team, logits, uniforms, *settings)

    def token_logprobs(
        self,
        logits: Tensor,
        rows: Sequence[int],
        token_ids: Sequence[int],
        num_top: Sequence[int],
        workspace: Workspace,
    ) -> list[tuple[float, int, list[int], list[float]]]:
        """An answer for each of `rows`. The workspace stays unused."""
        return sampling.token_logprobs(self._team, logits, rows, token_ids, num_top)

    def copy_blocks(self, pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Inside the pool."""
        blocks.copy_blocks(self._team, pool, pairs)

    def gather_blocks(self, pool: Tensor, block_ids: Sequence[int]) -> Tensor:
        """`[n, block_bytes]`."""
        return blocks.gather_blocks(self._team, pool, block_ids)

    def scatter_blocks(self, staging: Tensor, pool: Tensor, block_ids: Sequence[int]) -> None:
        """Into the pool."""
        blocks.scatter_blocks(self._team, staging, pool, block_ids)

    def convert_kv(
        self,
        source: KVView,
        source_blocks: Sequence[int],
        destination: KVView,
        destination_blocks: Sequence[int],
    ) -> None:
        """Into the destination's pool."""
        given = (source, source_blocks, destination, destination_blocks)
        blocks.convert_kv(self._team, *given)

    def merge_partials(self, outputs: Tensor, log_sums: Tensor) -> Tensor:
        """`[T, Hq, D]`."""
        assert outputs.dtype == log_sums.dtype == torch.float32, "partials are float32"
        outputs, log_sums = outputs.contiguous(), log_sums.contiguous()
        num_partials, num_rows, num_heads, head_dim = outputs.shape
        assert log_sums.shape == outputs.shape[:3], "a log-sum for each vector"
        out = torch.empty(num_rows, num_heads, head_dim)
        addresses = (outputs.data_ptr(), log_sums.data_ptr(), out.data_ptr())
        arguments = MergePartials(*addresses, num_partials, num_heads, head_dim)
        self._team.run_alone(Op.MERGE_PARTIALS, arguments, num_rows)
        return out

    def compile_step(self, recording: Recording) -> HostProgram:
        """See `kernels.ops.compile_step`."""
        return HostProgram(recording, self._team)

    def _one(
        self, op: Op, places: dict[str, Place], memory: _Tensors, num_rows: int, **constants: Any
    ) -> None:
        self._run([Node(op, ROWS_TOKENS, places, constants)], memory, Step(num_tokens=num_rows))

    def _run(self, nodes: list[Node], memory: _Tensors, step: Step) -> None:
        arguments = [arguments_of(node, memory) for node in nodes]
        instructions = (Instruction * len(nodes))()
        for instruction, node, own in zip(instructions, nodes, arguments, strict=True):
            instruction.op, instruction.row_count = node.op, node.row_count
            instruction.arguments = ctypes.addressof(own)
        self._team.run(instructions, len(nodes), step)
