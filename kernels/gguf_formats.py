"""The block formats of GGUF tensors, as numbers: type id, elements a block, bytes a block.

A quantised tensor is rows of blocks; a block holds `block_elements` consecutive elements of one row. What the bytes
mean is in `kernels.reference.gguf_blocks`. Formats that are not in the table cannot be served.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One way to store elements.

    name: the format's name in the GGUF documentation.
    type_id: its number in a GGUF tensor table.
    block_elements: elements of a row that share one block; 1 for plain types.
    block_bytes: bytes of one block.
    """

    name: str
    type_id: int
    block_elements: int
    block_bytes: int

    def row_bytes(self, num_columns: int) -> int:
        """Bytes of one row of `num_columns` elements, which must fill whole blocks."""
        assert num_columns % self.block_elements == 0, "a row holds whole blocks"
        return num_columns // self.block_elements * self.block_bytes


FORMATS = (
    BlockFormat("F32", 0, 1, 4),
    BlockFormat("F16", 1, 1, 2),
    BlockFormat("Q4_0", 2, 32, 18),
    BlockFormat("Q4_1", 3, 32, 20),
    BlockFormat("Q5_0", 6, 32, 22),
    BlockFormat("Q5_1", 7, 32, 24),
    BlockFormat("Q8_0", 8, 32, 34),
    BlockFormat("Q2_K", 10, 256, 84),
    BlockFormat("Q3_K", 11, 256, 110),
    BlockFormat("Q4_K", 12, 256, 144),
    BlockFormat("Q5_K", 13, 256, 176),
    BlockFormat("Q6_K", 14, 256, 210),
    BlockFormat("BF16", 30, 1, 2),
)

FORMAT_BY_NAME = {block_format.name: block_format for block_format in FORMATS}
FORMAT_BY_TYPE_ID = {block_format.type_id: block_format for block_format in FORMATS}
