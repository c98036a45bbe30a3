"""How KV lies in memory: groups, slot formats, slabs, runs.

A pool is `[num_blocks, block_bytes]`. A block holds, outermost first: layer, then KV head, then one opaque slab.
A slab is the K run `[block_size, head_dim]`, then the V run `[block_size, head_dim]`, then, in a format that scales
each token's head, the scales of K and those of V, `[block_size]` float32 each:

    block  = | layer 0 | layer 1 | ...                | padding to block_bytes |
    layer  = | head 0  | head 1  | ...                |
    slab   = | K slot 0 .. slot bs-1 | V slot 0 .. slot bs-1 |   (plain)
    slab   = | K slot 0 .. slot bs-1 | V slot 0 .. slot bs-1 | K scales | V scales |   (token_head_scaled)

So a whole block is one run, a range of layers of it is one run, and a head range is one run a layer. Everything
a transfer plan may convert is here; what must be equal is in `core.kv_identity`.

A layout is a worker's and speaks of the whole model. Its ranks divide layers into stages and heads into shares; the
pool of rank `stage * tensor_ranks + tensor rank` has blocks of what `KVLayout.rank_groups` names, in the same nesting.
With one rank that is all of it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from core.errors import ConfigError

PLAIN = "plain"
TOKEN_HEAD_SCALED = "token_head_scaled"
SCALE_BYTES = 4  # float32
MAX_RANKS = 1024
"""Most ranks of a worker."""


class KVDtype(NamedTuple):
    """One way to hold KV: its slot format and the bytes of one element."""

    slot_format: str
    element_bytes: int


KV_DTYPES = {
    "float32": KVDtype(PLAIN, 4),
    "bfloat16": KVDtype(PLAIN, 2),
    "float16": KVDtype(PLAIN, 2),
    "fp8_e4m3": KVDtype(PLAIN, 1),
    "fp8_e5m2": KVDtype(PLAIN, 1),
    "int8_per_token_head": KVDtype(TOKEN_HEAD_SCALED, 1),
    "fp8_per_token_head": KVDtype(TOKEN_HEAD_SCALED, 1),
}
"""Every way to hold KV, by the name that `--kv-cache-dtype` takes."""

KV_DTYPE_ALIASES = {"fp8": "fp8_e4m3"}
"""Other names users know -> the name in KV_DTYPES, which is the only one that layouts and hashes see."""


class GroupKind(StrEnum):
    """What the layers of a group have in common: how far back they look and what they keep."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    MLA_LATENT = "mla_latent"
    DRAFT = "draft"


class Run(NamedTuple):
    """Consecutive bytes inside one block."""

    offset_bytes: int
    num_bytes: int


class SlabPart(NamedTuple):
    """One of the runs that a slab is made of: a value a slot, slot after slot."""

    offset_bytes: int
    slot_bytes: int


class RankShare(NamedTuple):
    """What a rank holds of one group.

    layers: places inside the group, half-open; empty when the rank's stage has no layer of it.
    heads: the model's KV heads, half-open.
    """

    layers: range
    heads: range

    def slab_index(self, layer: int, head: int) -> int:
        """Which slab of the rank's block holds this layer (a place in the group) and head (of the model)."""
        return (layer - self.layers.start) * len(self.heads) + head - self.heads.start


@dataclass(frozen=True, slots=True)
class SlotFormat:
    """How one token's K and V of one head are stored.

    name: `plain` stores elements alone, `token_head_scaled` a scale for K and one for V with them.
    dtype: how the elements are held, a key of KV_DTYPES that belongs to this format.
    head_dim: elements of K, and of V, a head.
    """

    name: str
    dtype: str
    head_dim: int

    def __post_init__(self) -> None:
        if self.name not in (PLAIN, TOKEN_HEAD_SCALED):
            known = f"{PLAIN}, {TOKEN_HEAD_SCALED}"
            raise ConfigError(f"slot format: {self.name!r} is unknown; known: {known}")
        wanted = _kv_dtype(self.dtype).slot_format
        if self.name != wanted:
            raise ConfigError(
                f"slot format: {self.name!r} does not hold {self.dtype}; {wanted} does"
            )
        if self.head_dim < 1:
            raise ConfigError(f"head_dim: {self.head_dim} must be at least 1")

    @classmethod
    def of(cls, dtype: str, head_dim: int) -> SlotFormat:
        """The format that holds `dtype`."""
        return cls(_kv_dtype(dtype).slot_format, dtype, head_dim)

    @property
    def has_scales(self) -> bool:
        """Whether a scale a token and head is stored beside the elements."""
        return self.name == TOKEN_HEAD_SCALED

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return KV_DTYPES[self.dtype].element_bytes

    @property
    def alignment_bytes(self) -> int:
        """Bytes that a slab's start, and its scales' start, must be a multiple of."""
        return max(self.element_bytes, SCALE_BYTES) if self.has_scales else self.element_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's K and V for one head, scales included."""
        scale_bytes = SCALE_BYTES if self.has_scales else 0
        return 2 * (self.head_dim * self.element_bytes + scale_bytes)

    def scales_offset_bytes(self, block_size: int) -> int:
        """Where in a slab the scales of K begin; those of V follow them."""
        return 2 * self.head_dim * self.element_bytes * block_size

    def slab_parts(self, block_size: int) -> list[SlabPart]:
        """The runs of a slab, in order: K, V, and the scales of each where the format has them."""
        row_bytes = self.head_dim * self.element_bytes
        parts = [SlabPart(0, row_bytes), SlabPart(row_bytes * block_size, row_bytes)]
        if self.has_scales:
            scales = self.scales_offset_bytes(block_size)
            parts.append(SlabPart(scales, SCALE_BYTES))
            parts.append(SlabPart(scales + SCALE_BYTES * block_size, SCALE_BYTES))
        return parts


def _kv_dtype(name: str) -> KVDtype:
    if name not in KV_DTYPES:
        raise ConfigError(f"KV dtype: {name!r} is unknown; known: {', '.join(sorted(KV_DTYPES))}")
    return KV_DTYPES[name]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share block ids, tables and hash keys.

    kind: what the layers keep.
    layers: model layer indices, ascending; position in this tuple is the layer's place inside a block.
    num_kv_heads: KV heads that a block stores: the model's, or a rank's share of them in `KVLayout.rank_groups`.
    slot: how one token of one head is stored.
    window: tokens a sliding window looks back, None for full attention.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    num_kv_heads: int
    slot: SlotFormat
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("KV group: layers is empty; a group needs at least one layer")
        if list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"KV group: layers {self.layers} must be ascending, each once")
        if self.num_kv_heads < 1:
            raise ConfigError(f"num_kv_heads: {self.num_kv_heads} must be at least 1")
        if (self.kind is GroupKind.SLIDING_WINDOW) != (self.window is not None):
            raise ConfigError(f"window: {self.window} does not fit a group of kind {self.kind}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window: {self.window} must be at least 1")

    def slab_bytes(self, block_size: int) -> int:
        """Bytes of one head of one layer of a block."""
        return self.slot.slot_bytes * block_size

    def layer_bytes(self, block_size: int) -> int:
        """Bytes of one layer of a block."""
        return self.slab_bytes(block_size) * self.num_kv_heads

    def used_bytes(self, block_size: int) -> int:
        """Bytes of a block before padding."""
        return self.layer_bytes(block_size) * len(self.layers)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of one worker's KV. Two workers may differ here as far as a plan can convert.

    block_size: tokens (slots) in a block, a multiple of the cluster's hash block size.
    groups: the model's KV groups, all padded to the same `block_bytes`.
    order: nesting inside a block; `layer_head_slab` is the only order today.
    tensor_ranks: ranks that share the model's KV heads; beyond one a head, several ranks hold the same head.
    pipeline_ranks: stages that share the model's layers.
    wire_dtype: the KV dtype in which this worker takes in what others computed, whatever they hold it in. None: as it
        holds it itself, bit for bit, and so only from workers that hold it likewise.
    """

    block_size: int
    groups: tuple[KVGroup, ...]
    order: str = "layer_head_slab"
    tensor_ranks: int = 1
    pipeline_ranks: int = 1
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size: {self.block_size} must be at least 1")
        if not self.groups:
            raise ConfigError("KV layout: groups is empty; a layout needs at least one group")
        if self.order != "layer_head_slab":
            raise ConfigError(f"KV order: {self.order!r} is unknown; known: layer_head_slab")
        for name in ("tensor_ranks", "pipeline_ranks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(
                f"tensor_ranks * pipeline_ranks: {self.num_ranks} must be at most {MAX_RANKS}"
            )
        if self.wire_dtype is not None:
            _kv_dtype(self.wire_dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of any group, padding included, in the pool of a worker of one rank."""
        return max(group.used_bytes(self.block_size) for group in self.groups)

    @property
    def num_ranks(self) -> int:
        """Ranks of the worker."""
        return self.tensor_ranks * self.pipeline_ranks

    def wire_slot(self, group: int) -> SlotFormat:
        """How slots of a group are sent to this worker."""
        slot = self.groups[group].slot
        return slot if self.wire_dtype is None else SlotFormat.of(self.wire_dtype, slot.head_dim)

    def head_copies(self, group: int) -> int:
        """How many tensor ranks hold the same head of a group."""
        return max(1, self.tensor_ranks // self.groups[group].num_kv_heads)

    def divides_heads(self, group: int) -> bool:
        """Whether tensor ranks get equal shares of a group's heads, or heads equally many ranks."""
        num_heads = self.groups[group].num_kv_heads
        return num_heads % self.tensor_ranks == 0 or self.tensor_ranks % num_heads == 0

    def rank_share(self, group: int, rank: int) -> RankShare:
        """What a rank holds of a group, divided as vLLM divides; only where `divides_heads`."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} is not one of {self.num_ranks}"
        stage, tensor_rank = divmod(rank, self.tensor_ranks)
        layers = self.groups[group].layers
        num_heads = self.groups[group].num_kv_heads
        first_layer, end_layer = self._first_layer(stage), self._first_layer(stage + 1)
        first_head = tensor_rank * num_heads // self.tensor_ranks
        return RankShare(
            range(bisect_left(layers, first_layer), bisect_left(layers, end_layer)),
            range(first_head, first_head + max(1, num_heads // self.tensor_ranks)),
        )

    def rank_groups(self, rank: int) -> tuple[KVGroup | None, ...]:
        """The groups as blocks of one rank's pool store them; None for one of which it holds no layer."""
        shares = [self.rank_share(index, rank) for index in range(len(self.groups))]
        return tuple(
            replace(
                group,
                layers=tuple(group.layers[place] for place in share.layers),
                num_kv_heads=len(share.heads),
            )
            if share.layers
            else None
            for group, share in zip(self.groups, shares, strict=True)
        )

    def rank_block_bytes(self, rank: int) -> int:
        """Bytes of one block of any group in one rank's pool, padding included; 0 when it holds no layer."""
        groups = self.rank_groups(rank)
        return max(0 if group is None else group.used_bytes(self.block_size) for group in groups)

    def layer_run(self, group: int, first_layer: int, num_layers: int) -> Run:
        """The run of layers `[first_layer, first_layer + num_layers)` (places inside the group) of one block."""
        layer_bytes = self.groups[group].layer_bytes(self.block_size)
        last = first_layer + num_layers
        assert 0 <= first_layer < last <= len(self.groups[group].layers), (
            f"layers [{first_layer}, {last}) are not in group {group}"
        )
        return Run(first_layer * layer_bytes, num_layers * layer_bytes)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one group."""
        return -(-num_tokens // self.block_size)

    def valid_slots(self, position: int, num_tokens: int) -> int:
        """How many slots of the block at `position` are filled by a sequence of `num_tokens` tokens."""
        return max(0, min(self.block_size, num_tokens - position * self.block_size))

    def _first_layer(self, stage: int) -> int:
        """The model layer at which a stage begins. Layers left over go one each to the stages before the last one."""
        num_layers = 1 + max(group.layers[-1] for group in self.groups)
        least, num_left = divmod(num_layers, self.pipeline_ranks)
        num_plain = self.pipeline_ranks - 1 - num_left  # leading stages without one more
        return stage * least + min(max(0, stage - num_plain), num_left)


def conversion_obstacles(source: KVLayout, destination: KVLayout) -> list[str]:
    """Why no transfer plan leads from source to destination; empty when one does. Each names both values."""
    checks: dict[str, tuple[object, object]] = {"order": (source.order, destination.order)}
    if len(source.groups) != len(destination.groups):
        checks["number of groups"] = (len(source.groups), len(destination.groups))
    else:
        takes_any_dtype = destination.wire_dtype is not None
        for index, pair in enumerate(zip(source.groups, destination.groups, strict=True)):
            checks |= _group_checks(index, *pair, takes_any_dtype=takes_any_dtype)
    obstacles = [
        f"{name}: source {a}, destination {b}" for name, (a, b) in checks.items() if a != b
    ]
    return obstacles + _undivided_heads(source, destination)


def _group_checks(
    index: int, source: KVGroup, destination: KVGroup, *, takes_any_dtype: bool
) -> dict[str, tuple[object, object]]:
    """What two groups must have in common for a plan, by name."""
    checks: dict[str, tuple[object, object]] = {
        name: (getattr(source, name), getattr(destination, name))
        for name in ("kind", "layers", "num_kv_heads", "window")
    }
    checks["head_dim"] = (source.slot.head_dim, destination.slot.head_dim)
    if not takes_any_dtype:
        checks["KV dtype (wire dtype: raw)"] = (source.slot.dtype, destination.slot.dtype)
    return {f"group {index} {name}": values for name, values in checks.items()}


def _undivided_heads(source: KVLayout, destination: KVLayout) -> list[str]:
    """Where either side's heads and tensor ranks do not divide."""
    return [
        f"group {index}: {side}'s {layout.tensor_ranks} tensor ranks and "
        f"{group.num_kv_heads} KV heads do not divide"
        for side, layout in (("source", source), ("destination", destination))
        for index, group in enumerate(layout.groups)
        if not layout.divides_heads(index)
    ]


def can_convert(source: KVLayout, destination: KVLayout) -> bool:
    """Whether a transfer plan exists from source to destination (kvtransfer builds it; a test holds both equal)."""
    return not conversion_obstacles(source, destination)
