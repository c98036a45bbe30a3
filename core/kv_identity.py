"""What must be equal for KV to be exchanged between two workers.

KVIdentity enters the root of every hash chain and every record in the index, so KV of different models, numeric
recipes or adapters never meets. What may differ, because a plan converts it, is in `core.kv_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from core.canonical import pack_fields


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The shape of one KV group of the whole model, before ranks divide it.

    kind: the group's kind, as in `core.kv_layout.GroupKind`.
    num_layers: layers in the group.
    num_kv_heads: KV heads of the model.
    head_dim: elements of one head's K.
    window: tokens a sliding window looks back, 0 for full attention.
    """

    kind: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """Equal on both sides, or no KV is exchanged.

    model_digest: hex digest of the weights' content.
    weight_format: how weights are held while computing (`float32`, `bfloat16`, `gguf` ...).
    activation_dtype: precision of activations.
    adapter_digest: hex digest of the adapter, empty for the base model.
    group_shapes: shapes of the model's KV groups.
    """

    model_digest: str
    weight_format: str
    activation_dtype: str
    adapter_digest: str
    group_shapes: tuple[GroupShape, ...]

    def canonical_bytes(self) -> bytes:
        """The same bytes in every process for equal identities, different ones otherwise."""
        shapes = [
            pack_fields([s.kind, s.num_layers, s.num_kv_heads, s.head_dim, s.window])
            for s in self.group_shapes
        ]
        head = [self.model_digest, self.weight_format, self.activation_dtype, self.adapter_digest]
        return pack_fields([*head, *shapes])


def identity_differences(ours: KVIdentity, theirs: KVIdentity) -> list[str]:
    """The fields in which two identities differ, each with both values; empty when KV may be exchanged."""
    names = [field.name for field in fields(KVIdentity)]
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    return [f"{name}: ours {a!r}, theirs {b!r}" for name, a, b in pairs if a != b]
