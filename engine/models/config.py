"""What a decoder-only model is, in numbers: read from a model's own files, used by everything else."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ModelLoadError
from core.kv_identity import GroupShape
from core.kv_layout import GroupKind, KVGroup, SlotFormat
from engine.models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model.

    architecture: a name of `engine.models.registry`.
    num_layers: decoder layers.
    hidden_size: elements of a row between layers.
    intermediate_size: inner elements of the feed-forward part.
    num_heads: query heads.
    num_kv_heads: key and value heads; divides num_heads.
    head_dim: elements of one head.
    vocab_size: rows of the embedding and of the head.
    max_position: longest sequence the model was made for.
    norm_epsilon: added to the mean square in RMS norms.
    rope: how positions rotate queries and keys.
    is_tied: whether the head is the embedding.
    layer_windows: a layer's sliding window in tokens, None for full attention; one entry a layer.
    has_qkv_bias, has_output_bias, has_mlp_bias: which products add a bias.
    has_qk_norm: whether queries and keys are normalised a head.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_epsilon: float
    rope: RopeConfig
    is_tied: bool
    layer_windows: tuple[int | None, ...]
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE_FIELDS:
            if getattr(self, name) < 1:
                raise ModelLoadError(
                    f"model config: {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"model config: num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"model config: head_dim must be even, got {self.head_dim}")
        assert len(self.layer_windows) == self.num_layers, "one window entry a layer"

    @property
    def common_window(self) -> int | None:
        """The sliding window that all layers share, None when any layer sees everything or windows differ."""
        return self.layer_windows[0] if len(set(self.layer_windows)) == 1 else None

    def kv_groups(self, dtype: str) -> tuple[KVGroup, ...]:
        """The KV groups of the whole model, holding KV as `dtype` (a key of KV_DTYPES).

        Layers of mixed windows form one full-attention group: they keep everything and windows only mask.
        """
        window = self.common_window
        group = KVGroup(
            kind=GroupKind.FULL_ATTENTION if window is None else GroupKind.SLIDING_WINDOW,
            layers=tuple(range(self.num_layers)),
            num_kv_heads=self.num_kv_heads,
            slot=SlotFormat.of(dtype, self.head_dim),
            window=window,
        )
        return (group,)

    def group_shapes(self) -> tuple[GroupShape, ...]:
        """The shapes of `kv_groups`, as a KVIdentity names them."""
        kind = GroupKind.FULL_ATTENTION if self.common_window is None else GroupKind.SLIDING_WINDOW
        window = self.common_window or 0
        return (GroupShape(kind, self.num_layers, self.num_kv_heads, self.head_dim, window),)


_POSITIVE_FIELDS = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_position",
)
