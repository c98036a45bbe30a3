"""What a transfer engine must be able to do: read another process's registered memory into ours.

An engine belongs to one end of one worker: a sender's has only memory that others read, a receiver's only memory that
it reads into. Whoever made it may use it from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy


class Read(Protocol):
    """Pieces of a peer's memory on their way into ours."""

    def is_over(self) -> bool:
        """Whether all bytes are there; looks, and does not wait.

        Raises ConnectionError when some will never be; nothing of the read writes any more then.
        """
        ...


class Peer(Protocol):
    """Another process's end, as one connection knows it."""

    def read(self, own: Sequence[int], theirs: Sequence[int], num_bytes: Sequence[int]) -> Read:
        """Begin to read pieces: from which address of the peer to which of ours, and how many bytes.

        Raises ConnectionError where that cannot begin.
        """
        ...

    def close(self) -> None:
        """Forget the peer, unless another connection knows it. Nothing of it is being read. Idempotent."""
        ...


class Engine(Protocol):
    """This process's end."""

    def register(self, memory: memoryview) -> int:
        """Let memory be read, or be read into; its address. It stays where it is until `unregister` or `close`.

        Raises TransferError where the engine will not have it.
        """
        ...

    def unregister(self, address: int) -> None:
        """Take memory back that `register` was given."""
        ...

    def describe(self) -> bytes:
        """What a peer must know to read what is registered here by now."""
        ...

    def meet(self, description: bytes, epoch: bytes) -> Peer:
        """Another end, by its own description.

        epoch: of the pool that the peer shows. Ends with the same description and another epoch are different ones.
        Raises TransferError for a description that means nothing here.
        """
        ...

    def close(self) -> None:
        """Nothing is read or written through this end after the return. Idempotent."""
        ...


EngineMaker = Callable[[], Engine]


def address_of(memory: memoryview) -> int:
    """Where memory lies in this process; of no use once it is gone."""
    address: int = numpy.frombuffer(memory, numpy.uint8).ctypes.data
    return address
