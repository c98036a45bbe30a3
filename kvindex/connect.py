"""Which index a config asks for."""

from __future__ import annotations

from kvindex.base import PrefixIndex
from kvindex.config import IndexConfig
from kvindex.memory import MemoryIndex


def connect_index(config: IndexConfig) -> PrefixIndex:
    """The index of `config.redis_url`, or one of this process alone where it is empty. Connects when first used."""
    if not config.redis_url:
        return MemoryIndex()
    from kvindex.redis_index import RedisIndex

    return RedisIndex(config)
