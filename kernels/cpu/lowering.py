"""Recorded calls to the host's instructions.

What is decided here: which buffers share memory, and where the quantised copy of a product's inputs is made. It is
made by the operation that gave the inputs (norm or gate) where that is possible, and the plain rows are then not
stored at all when nobody else reads them. And whether a step of many rows joins its row-wise operations (team.h): that
needs tiles that a thread is done with soon, so it is for models whose products are small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kernels.cpu.packing import HostStack, HostWeight, pack
from kernels.cpu.places import BufferTable, Place
from kernels.cpu.structs import ROWS_TOKENS, Op
from kernels.recording import Call, Recording
from kernels.weights import Weight

LEAST_JOINED, MOST_JOINED = 32, 112
"""Rows that a thread takes through joined operations: they share the reading of weights and fit its cache."""
_MOST_PRODUCTS, _MOST_PRODUCTS_ELSEWHERE = {"amx": 256 << 20, "avx512": 128 << 20}, 32 << 20
"""Multiplications of a tile of joined operations: about a millisecond, after which a thread may give its core back."""
_CUTS = ("paged_attention", "take_rows")


@dataclass(slots=True, eq=False)
class QuantBuffer:
    """Quantised rows of `width` columns, made by call `first` and used until call `last`.

    Those whose lives do not meet may lie in the same memory: `slot` numbers the pieces. is_own: whether that is
    the threads' own.
    """

    width: int
    row_count: int
    first: int
    last: int
    slot: int = -1
    is_own: bool = False


@dataclass(slots=True)
class QuantSlot:
    """Memory for quantised rows of up to `width` columns."""

    width: int
    is_own: bool


@dataclass(slots=True, eq=False)
class Node:
    """One instruction before addresses are known. places, constants by the fields of its arguments."""

    op: Op
    row_count: int
    places: dict[str, Place] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    quantised: QuantBuffer | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """A program for any number of rows.

    nodes: its instructions.
    quants: the pieces of memory for quantised rows.
    row_floats, own_floats: floats of shared and of a thread's own memory that one row needs.
    output: where the last result lies.
    most_joined: rows that may be taken together through a phase's row-wise operations; 0: they are not joined.
    """

    nodes: list[Node]
    quants: list[QuantSlot]
    row_floats: int
    own_floats: int
    output: Place
    most_joined: int


def host_parts(weight: Weight) -> tuple[HostWeight, ...]:
    """The packed matrices behind a weight, in the order of their rows; one that is not packed yet is packed now."""
    packed = pack(weight).packed
    if isinstance(packed, HostStack):
        return packed.parts
    assert isinstance(packed, HostWeight), "weights are packed by this backend"
    return (packed,)


def lower(recording: Recording, variant: str) -> Lowered:
    """The program for a variant of the kernels. Raises ConfigError for a call that the host cannot run."""
    return _Lowering(recording, variant).run()


class _Lowering:
    def __init__(self, recording: Recording, variant: str) -> None:
        self._recording = recording
        self._most_products = _MOST_PRODUCTS.get(variant, _MOST_PRODUCTS_ELSEWHERE)
        self._table = BufferTable()
        self._nodes: list[Node] = []
        self._quants: list[QuantBuffer] = []
        self._quant_of: dict[int, QuantBuffer] = {}  # id of a buffer -> its quantised copy
        self._maker: dict[int, Node] = {}  # id of a buffer -> the node that can quantise it
        self._plain_uses: dict[int, int] = {}  # id of a buffer -> reads of its plain rows
        self._at = 0
        self._phases: list[int] = []  # of each call
        self._products: dict[int, int] = {}  # of each phase, for one row

    def run(self) -> Lowered:
        phase, has_written = 0, False
        for at, call in enumerate(self._recording.calls):
            self._at = at
            cuts = call.name in _CUTS
            # A mark waits for KV that is written before it: there the team cuts as well (team.cpp).
            phase += cuts or (call.name == "mark" and has_written)
            has_written = call.name == "write_kv" or (has_written and phase == self._phases[-1])
            self._phases.append(phase)
            phase += cuts
            getattr(self, f"_{call.name}")(call)
        output = self._use(self._recording.output)
        self._drop_unread_rows()
        most_joined = min(
            self._most_products // max(self._products.values(), default=1), MOST_JOINED
        )
        if most_joined < LEAST_JOINED:
            self._phases, most_joined = [], 0
        slots = self._assign_slots()
        row_floats, own_floats = self._table.assign(self._phases)
        return Lowered(self._nodes, slots, row_floats, own_floats, output, most_joined)

    def _assign_slots(self) -> list[QuantSlot]:
        slots: list[QuantSlot] = []
        ends: list[int] = []
        for buffer in sorted(self._quants, key=lambda b: b.first):
            buffer.is_own = self._is_own(buffer)
            first, last = buffer.first, buffer.last
            if self._phases and not buffer.is_own:
                first, last = self._phases[first], self._phases[last]
            free = [
                number
                for number, (slot, end) in enumerate(zip(slots, ends, strict=True))
                if end < first and slot.is_own == buffer.is_own
            ]
            buffer.slot = free[0] if free else len(slots)
            if not free:
                slots.append(QuantSlot(0, buffer.is_own))
                ends.append(0)
            slots[buffer.slot].width = max(slots[buffer.slot].width, buffer.width)
            ends[buffer.slot] = last
        return slots

    def _is_own(self, buffer: QuantBuffer) -> bool:
        if not self._phases or buffer.row_count != ROWS_TOKENS:
            return False
        return self._phases[buffer.first] == self._phases[buffer.last]

    def _drop_unread_rows(self) -> None:
        for node in self._nodes:
            if node.quantised is None or node.op not in (Op.NORM, Op.GATED):
                continue
            out = node.places["out"]
            if not self._plain_uses.get(id(out.buffer)):
                del node.places["out"]
                self._table.buffers.remove(out.buffer)

    def _use(self, tensor: Tensor) -> Place:
        place = self._table.use(tensor, self._at)
        self._plain_uses[id(place.buffer)] = self._plain_uses.get(id(place.buffer), 0) + 1
        return place

    def _define(self, tensor: Tensor) -> Place:
        return self._table.define(tensor, self._at)

    def _add(self, op: Op, row_count: int, places: dict[str, Place], **constants: Any) -> Node:
        node = Node(op, row_count, places, constants)
        self._nodes.append(node)
        return node

    def _can_quantise(self, place: Place, node: Node) -> None:
        self._maker[id(place.buffer)] = node

    # ---- calls

    def _embedding(self, call: Call) -> None:
        assert call.arguments["token_ids"] is self._recording.token_ids, "embeds the step's tokens"
        (weight,) = host_parts(call.arguments["weight"])
        out = self._define(call.results[0])
        self._add(Op.EMBED, out.buffer.row_count, {"out": out}, weight=weight)

    def _rms_norm(self, call: Call) -> None:
        hidden = self._use(call.arguments["hidden"])
        out = self._define(call.results[0])
        node = self._norm(call, {"hidden": hidden, "out": out})
        if out.num_vectors == 1:
            self._can_quantise(out, node)

    def _add_rms_norm(self, call: Call) -> None:
        hidden, residual = (
            self._use(call.arguments["hidden"]),
            self._use(call.arguments["residual"]),
        )
        out = self._define(call.results[0])
        node = self._norm(call, {"hidden": hidden, "residual": residual, "out": out})
        self._can_quantise(out, node)

    def _norm(self, call: Call, places: dict[str, Place]) -> Node:
        weight, epsilon = call.arguments["weight"], call.arguments["epsilon"]
        return self._add(
            Op.NORM, places["out"].buffer.row_count, places, weight=weight, epsilon=epsilon
        )

    def _linear(self, call: Call) -> None:
        inputs = self._table.use(call.arguments["inputs"], self._at)
        out = self._define(call.results[0])
        bias, first = call.arguments["bias"], 0
        for part in host_parts(call.arguments["weight"]):
            num_rows = part.native.num_rows
            places = {"out": Place(out.buffer, out.column + first, num_rows, 1)}
            quantised = None
            if part.is_quantised:
                quantised = self._quantised(call.arguments["inputs"], inputs)
            else:
                places["inputs"] = self._use(call.arguments["inputs"])
            constants = {"weight": part, "bias": bias, "first_row": first}
            node = self._add(Op.PRODUCT, out.buffer.row_count, places, **constants)
            node.quantised = quantised
            first += num_rows
            if out.buffer.row_count == ROWS_TOKENS:
                phase = self._phases[self._at]
                done = self._products.get(phase, 0) + num_rows * part.native.num_columns
                self._products[phase] = done

    def _quantised(self, tensor: Tensor, place: Place) -> QuantBuffer:
        """The quantised copy of a product's inputs, made now or by the node that gave them."""
        key = id(place.buffer)
        if key not in self._quant_of:
            maker = self._maker.get(key)
            first = self._at if maker is None else place.buffer.first
            buffer = QuantBuffer(place.width, place.buffer.row_count, first, self._at)
            if maker is None:
                inputs = self._use(tensor)
                maker = self._add(Op.QUANTISE, place.buffer.row_count, {"inputs": inputs})
            maker.quantised = buffer
            self._quants.append(buffer)
            self._quant_of[key] = buffer
        buffer = self._quant_of[key]
        buffer.last = self._at
        return buffer

    def _rope_angles(self, call: Call) -> None:
        assert call.arguments["positions"] is self._recording.positions, "the step's positions"
        cos, sin = self._define(call.results[0]), self._define(call.results[1])
        frequencies, factor = call.arguments["frequencies"], call.arguments["factor"]
        places = {"cos": cos, "sin": sin}
        self._add(Op.ANGLES, cos.buffer.row_count, places, frequencies=frequencies, factor=factor)

    def _rope(self, call: Call) -> None:
        places = {name: self._use(call.arguments[name]) for name in ("heads", "cos", "sin")}
        places["out"] = self._define(call.results[0])
        self._add(Op.ROPE, places["out"].buffer.row_count, places)

    def _silu_mul(self, call: Call) -> None:
        self._gated(call, is_gelu=False)

    def _gelu_mul(self, call: Call) -> None:
        self._gated(call, is_gelu=True)

    def _gated(self, call: Call, is_gelu: bool) -> None:
        gate_up = self._use(call.arguments["gate_up"])
        out = self._define(call.results[0])
        places = {"gate_up": gate_up, "out": out}
        node = self._add(Op.GATED, out.buffer.row_count, places, is_gelu=is_gelu)
        self._can_quantise(out, node)

    def _write_kv(self, call: Call) -> None:
        places = {name: self._use(call.arguments[name]) for name in ("key", "value")}
        layer = call.arguments["layer"]
        self._add(Op.WRITE_KV, places["key"].buffer.row_count, places, layer=layer)

    def _paged_attention(self, call: Call) -> None:
        places = {"query": self._use(call.arguments["query"])}
        places["out"] = self._define(call.results[0])
        names = ("layer", "scale", "window", "soft_cap", "sinks")
        constants = {name: call.arguments[name] for name in names}
        for op in (Op.ATTEND, Op.MERGE):
            self._add(op, places["out"].buffer.row_count, dict(places), **constants)

    def _take_rows(self, call: Call) -> None:
        assert call.arguments["rows"] is self._recording.wanted, "takes the step's wanted rows"
        places = {"inputs": self._use(call.arguments["hidden"])}
        places["out"] = self._define(call.results[0])
        self._add(Op.TAKE, places["out"].buffer.row_count, places)

    def _mark(self, call: Call) -> None:
        self._add(Op.MARK, 0, {}, layer=call.arguments["layer"])
