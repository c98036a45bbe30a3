"""Identifiers that must not be mixed up, as distinct types."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""One client request, unique in a cluster; choices share it."""

WorkerId = NewType("WorkerId", str)
"""One KV pool's worker, stable over restarts."""

Epoch = NewType("Epoch", int)
"""One incarnation of a worker process: 63 random bits, so that a restart never repeats one."""

SessionId = NewType("SessionId", int)
"""One transfer of one request's KV: 63 random bits."""

BlockId = NewType("BlockId", int)
"""Index of a physical block in one pool; 0 is the null block."""

Generation = NewType("Generation", int)
"""How often a physical block has been allocated: the fence against late writers."""

NULL_BLOCK = BlockId(0)
"""The block that stands for "nothing here"; never written, never freed."""
