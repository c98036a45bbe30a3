"""Eviction policies, by the name that flags take."""

from __future__ import annotations

from core.errors import ConfigError
from kvtransfer.tiers.policies.arc import ArcPolicy
from kvtransfer.tiers.policies.base import EvictionPolicy, Key
from kvtransfer.tiers.policies.lru import LruPolicy

__all__ = ["DEFAULT_POLICY", "POLICIES", "ArcPolicy", "EvictionPolicy", "LruPolicy", "make_policy"]

POLICIES = ("arc", "lru")
DEFAULT_POLICY = "arc"


def make_policy(name: str, capacity: int) -> EvictionPolicy[Key]:
    """A policy for a store of `capacity` blocks."""
    if name == "arc":
        return ArcPolicy(capacity)
    if name == "lru":
        return LruPolicy(capacity)
    raise ConfigError(f"eviction policy: {name!r} is unknown; known: {', '.join(POLICIES)}")
