"""A Hugging Face folder: config.json, safetensors (single or sharded), tokenizer and generation config."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.canonical import pack_fields
from core.errors import ModelLoadError
from engine.loading.bundle import BUNDLE_FILES
from engine.loading.json_reader import read_object
from kernels.weights import DenseWeight

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def read_bundle(folder: Path) -> dict[str, bytes]:
    """The bundle's files as they are. A folder without tokenizer.json cannot be served."""
    bundle = {
        name: (folder / name).read_bytes() for name in BUNDLE_FILES if (folder / name).is_file()
    }
    if "tokenizer.json" not in bundle:
        raise ModelLoadError(f"{folder}: tokenizer.json is missing")
    return bundle


class FolderWeights:
    """A WeightSource over the safetensors of a folder, read through their mapped files."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._files: dict[str, Any] = {}  # file name -> open file
        self._file_of = _locate(folder)  # tensor name -> file name
        for file_name in sorted(set(self._file_of.values())):
            self._files[file_name] = _open(folder / file_name)
        self._check_index()

    def names(self) -> Iterable[str]:
        """See WeightSource.names."""
        if not self._file_of:
            return ()
        return self._file_of.keys()

    def matrix(self, name: str) -> DenseWeight:
        """See WeightSource.matrix."""
        return DenseWeight(self.vector(name))

    def vector(self, name: str) -> Tensor:
        """See WeightSource.vector."""
        values = self._stored(name)
        if values.dtype not in _FLOATS:
            raise ModelLoadError(
                f"{self._folder}: tensor {name} has unsupported type {values.dtype}"
            )
        owned = values.to(self._dtype)
        return owned.clone() if owned.data_ptr() == values.data_ptr() else owned

    def digest(self) -> str:
        """See WeightSource.digest."""
        state = xxhash.xxh3_128()
        for name in sorted(self._file_of):
            values = self._stored(name)
            state.update(pack_fields([name, str(values.dtype), *values.shape]))
            state.update(values.contiguous().flatten().view(torch.uint8).numpy().data)
        return state.hexdigest()

    def close(self) -> None:
        """See WeightSource.close."""
        self._files.clear()

    def _stored(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def _check_index(self) -> None:
        held = {file_name: set(file.keys()) for file_name, file in self._files.items()}
        for name, file_name in self._file_of.items():
            if name not in held[file_name]:
                raise ModelLoadError(
                    f"{self._folder}: {file_name} lacks tensor {name}, which {_INDEX} places there"
                )


def _locate(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from the single file; every named file exists."""
    if (folder / _INDEX).is_file():
        weight_map = read_object(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelLoadError(f"{folder / _INDEX}: weight_map is missing")
        for file_name in sorted(set(weight_map.values())):
            if Path(file_name).name != file_name:
                raise ModelLoadError(
                    f"{folder / _INDEX}: {file_name!r} is not a file of the folder"
                )
            if not (folder / file_name).is_file():
                raise ModelLoadError(f"{folder}: shard {file_name} is missing")
        return weight_map
    if not (folder / _SINGLE).is_file():
        raise ModelLoadError(f"{folder}: neither {_SINGLE} nor {_INDEX} is there")
    return dict.fromkeys(_open(folder / _SINGLE).keys(), _SINGLE)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: damaged safetensors file: {error}") from error
