"""Which blocks with content begin as a wanted one does, though they do not end so.

A block is found by its hash only where all of its tokens are wanted. Where only the first few are, their KV is as good:
it follows from the tokens before. So blocks are also kept by the hash in front of them and their first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from core.block_hash import BlockHash
from engine.kvcache.chain import BlockContent

_MAX_TRIED = 16


class Beginnings:
    """The contents of one KV group's blocks by how they begin, each content once."""

    def __init__(self) -> None:
        self._contents: dict[tuple[BlockHash, int], dict[BlockHash, BlockContent]] = {}
        self._places: dict[BlockHash, tuple[BlockHash, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, content: BlockContent) -> None:
        """A block with a content of this name is findable now, and none was."""
        place = (content.parent, content.token_ids[0])
        self._contents.setdefault(place, {})[content.key] = content
        self._places[content.key] = place

    def remove(self, name: BlockHash) -> None:
        """No block with a content of this name is findable any more."""
        place = self._places.pop(name)
        same = self._contents[place]
        del same[name]
        if not same:
            del self._contents[place]

    def longest(
        self, parent: BlockHash, token_ids: Sequence[int]
    ) -> tuple[BlockContent | None, int]:
        """What shares most of its first tokens with `token_ids` behind `parent`, and how many those are.

        Of many contents that begin with the same token only the latest few are tried: the time is bounded.
        """
        best: BlockContent | None = None
        most = 0
        same = self._contents.get((parent, token_ids[0]), {})
        for content in islice(reversed(same.values()), _MAX_TRIED):
            count = _num_equal(content.token_ids, token_ids)
            if count > most:
                best, most = content, count
        return best, most


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """How many leading elements are equal."""
    limit = min(len(some), len(others))
    return next((at for at in range(limit) if some[at] != others[at]), limit)
