"""Reads the documented GGUF container: metadata and tensor table parsed, tensor data left in the mapped file.

Every length and offset of the file is checked before it is used, so that a damaged or truncated file is refused with
one sentence. Nothing of a file is executed, and no tensor data is copied here.
"""

from __future__ import annotations

import mmap
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from core.errors import ModelLoadError
from kernels.gguf_formats import FORMAT_BY_TYPE_ID, FORMATS, BlockFormat

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"} | {
    10: "<Q",
    11: "<q",
    12: "<d",
}

MetadataValue = int | float | bool | str | list["MetadataValue"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of the tensor table. shape: outermost first, as torch counts; offset: from the file's start."""

    name: str
    shape: tuple[int, ...]
    block_format: BlockFormat
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file: `metadata`, `tensors`, and raw tensor bytes as views of the mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped = _map(path)
        try:
            cursor = _Cursor(self._mapped, path)
            self.metadata, num_tensors = _read_metadata(cursor)
            self.tensors = _read_tensor_table(cursor, num_tensors, self._alignment(), path)
        except ModelLoadError:
            self.close()
            raise

    def raw(self, name: str) -> Tensor:
        """Bytes of one tensor, `[rows, row_bytes]` uint8 (one row for a vector). Valid while the file is open."""
        entry = self.tensors[name]
        with memoryview(self._mapped) as whole:
            data = np.frombuffer(whole, np.uint8, entry.num_bytes, entry.offset)
        rows = entry.num_bytes // entry.block_format.row_bytes(entry.shape[-1])
        return _as_tensor(data).view(rows, -1)

    def close(self) -> None:
        """Unmap the file once no view of it is left; views keep it mapped until they go."""
        try:
            self._mapped.close()
        except BufferError:
            return

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _damaged(self.path, f"general.alignment is {alignment!r}, not a positive number")
        return alignment


def _as_tensor(data: np.ndarray) -> Tensor:  # type: ignore[type-arg]
    """A tensor over read-only memory. Nobody writes to weights, so torch's warning about that is not wanted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise _damaged(path, "it is empty") from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error


def _damaged(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: damaged GGUF file: {reason}")


class _Cursor:
    """Reads forward through the mapped file, never past its end."""

    def __init__(self, mapped: mmap.mmap, path: Path) -> None:
        self.mapped, self.path = mapped, path
        self.position, self.size = 0, len(mapped)

    def fail(self, reason: str) -> ModelLoadError:
        return _damaged(self.path, reason)

    def take(self, num_bytes: int, what: str) -> int:
        """Step over `num_bytes` and return where they start."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.fail(
                f"truncated in {what}: {num_bytes} bytes needed at {start}, file ends at {self.size}"
            )
        self.position = start + num_bytes
        return start

    def number(self, layout: str, what: str) -> int | float | bool:
        start = self.take(struct.calcsize(layout), what)
        value: int | float | bool = struct.unpack_from(layout, self.mapped, start)[0]
        return value

    def count(self, layout: str, what: str) -> int:
        return int(self.number(layout, what))

    def string(self, what: str) -> str:
        length = self.count("<Q", what)
        start = self.take(length, what)
        try:
            return self.mapped[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def strings(self, count: int, what: str) -> list[MetadataValue]:
        """`count` strings; the loop of `string` unrolled, since vocabularies hold 100,000 of them."""
        mapped, position, size = self.mapped, self.position, self.size
        unpack = struct.Struct("<Q").unpack_from
        values: list[MetadataValue] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(mapped, position)[0]
                if position > size:
                    break
                values.append(mapped[start:position].decode())
        except struct.error:
            position = size + 1
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None
        if position > size:
            raise self.fail(f"truncated in {what}: entry {len(values)} of {count} ends past {size}")
        self.position = position
        return values

    def value(self, kind: int, what: str) -> MetadataValue:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise self.fail(f"{what} has unknown value type {kind}")
        return self.number(_SCALARS[kind], what)

    def array(self, what: str) -> list[MetadataValue]:
        kind, count = self.count("<I", what), self.count("<Q", what)
        if kind == _STRING:
            return self.strings(count, what)
        if kind == _ARRAY:
            return [self.array(what) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.fail(f"{what} is an array of unknown value type {kind}")
        layout = _SCALARS[kind]
        start = self.take(count * struct.calcsize(layout), what)
        return list(struct.unpack_from(f"<{count}{layout[1]}", self.mapped, start))


def _read_metadata(cursor: _Cursor) -> tuple[dict[str, MetadataValue], int]:
    """(metadata, number of tensors)."""
    start = cursor.take(len(_MAGIC), "the magic")
    magic = cursor.mapped[start : start + len(_MAGIC)]
    if magic != _MAGIC:
        raise cursor.fail(f"it begins with {magic!r}, not {_MAGIC!r}")
    version = cursor.count("<I", "the version")
    if version not in _VERSIONS:
        known = ", ".join(str(v) for v in _VERSIONS)
        raise ModelLoadError(f"{cursor.path}: GGUF version {version} is unknown; known: {known}")
    num_tensors, num_values = cursor.count("<Q", "the header"), cursor.count("<Q", "the header")
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_values):
        key = cursor.string("a metadata key")
        metadata[key] = cursor.value(cursor.count("<I", key), key)
    return metadata, num_tensors


def _read_tensor_table(
    cursor: _Cursor, num_tensors: int, alignment: int, path: Path
) -> dict[str, TensorEntry]:
    rows = [_read_tensor_row(cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, shape, block_format, offset in rows:
        if name in tensors:
            raise _damaged(path, f"tensor {name} is listed twice")
        entry = _tensor_entry(name, shape, block_format, data_start + offset, path)
        if entry.offset + entry.num_bytes > cursor.size:
            raise _damaged(
                path,
                f"truncated in tensor {name}: its data ends at {entry.offset + entry.num_bytes}, "
                f"the file at {cursor.size}",
            )
        tensors[name] = entry
    return tensors


def _read_tensor_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockFormat, int]:
    name = cursor.string("a tensor name")
    num_dimensions = cursor.count("<I", f"tensor {name}")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {num_dimensions} dimensions")
    sizes = [cursor.count("<Q", f"tensor {name}") for _ in range(num_dimensions)]
    type_id = cursor.count("<I", f"tensor {name}")
    offset = cursor.count("<Q", f"tensor {name}")
    if type_id not in FORMAT_BY_TYPE_ID:
        known = ", ".join(block_format.name for block_format in FORMATS)
        raise ModelLoadError(
            f"{cursor.path}: tensor {name} has unsupported type {type_id}; supported: {known}"
        )
    return name, tuple(reversed(sizes)), FORMAT_BY_TYPE_ID[type_id], offset


def _tensor_entry(
    name: str, shape: tuple[int, ...], block_format: BlockFormat, offset: int, path: Path
) -> TensorEntry:
    if min(shape) < 1 or shape[-1] % block_format.block_elements:
        raise _damaged(
            path, f"tensor {name} of shape {list(shape)} cannot hold {block_format.name} blocks"
        )
    num_bytes = block_format.row_bytes(shape[-1])
    for size in shape[:-1]:
        num_bytes *= size
    return TensorEntry(name, shape, block_format, offset, num_bytes)
