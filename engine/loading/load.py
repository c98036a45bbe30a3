"""From a ModelSource to a model that runs: config, weights, text files, digest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from core.errors import ConfigError, ModelLoadError
from engine.devices import HOST
from engine.loading.assemble import assemble_weights
from engine.loading.end_tokens import end_token_ids
from engine.loading.folder import FolderWeights, read_bundle
from engine.loading.folder_config import read_folder_config
from engine.loading.gguf_config import read_gguf_config
from engine.loading.gguf_file import GgufFile
from engine.loading.gguf_tokenizer import build_bundle
from engine.loading.gguf_weights import GgufWeights
from engine.loading.json_reader import JsonReader, read_object
from engine.loading.sources import ModelSource, SourceKind
from engine.loading.weight_source import TORCH_DTYPES, WeightSource
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderModel
from engine.models.registry import GGUF_INTERLEAVED_ROPE

_WEIGHT_MODES = ("expanded", "quantized")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what other processes must know of it.

    config: the model in numbers.
    model: the model itself.
    bundle: file name -> content, for gateways.
    model_digest: hex digest of weights and config, for KVIdentity.
    weight_format: how weights are held (a dtype, or `gguf`), for KVIdentity.
    eos_token_ids: tokens that end an answer.
    """

    config: ModelConfig
    model: DecoderModel
    bundle: dict[str, bytes]
    model_digest: str
    weight_format: str
    eos_token_ids: tuple[int, ...]


def load_model(
    source: ModelSource, dtype: str, weight_mode: str, device: torch.device = HOST
) -> LoadedModel:
    """Load a model to where it will run.

    weight_mode: `quantized` keeps GGUF blocks; a folder's weights are plain either way.
    """
    if weight_mode not in _WEIGHT_MODES:
        known = ", ".join(_WEIGHT_MODES)
        raise ConfigError(f"--weight-format: {weight_mode!r} is unknown; known: {known}")
    with _naming(source.path):
        if source.kind is SourceKind.GGUF:
            return _load_gguf(source.path, dtype, weight_mode == "quantized", device)
        return _load_folder(source.path, dtype, device)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the model's path before the message of an error that does not name it."""
    try:
        yield
    except ModelLoadError as error:
        if error.message.startswith(str(path)):
            raise
        raise ModelLoadError(f"{path}: {error.message}") from error


def _load_folder(path: Path, dtype: str, device: torch.device) -> LoadedModel:
    reader = JsonReader(str(path / "config.json"), read_object(path / "config.json"))
    config = read_folder_config(reader)
    bundle = read_bundle(path)
    ends = end_token_ids(bundle, reader)
    weights = FolderWeights(path, TORCH_DTYPES[dtype])
    return _finish(config, weights, bundle, ends, dtype, dtype, device)


def _load_gguf(path: Path, dtype: str, keep_blocks: bool, device: torch.device) -> LoadedModel:
    with GgufFile(path) as file:
        config = read_gguf_config(file)
        bundle = build_bundle(file)
        interleaved = {}
        if file.metadata["general.architecture"] in GGUF_INTERLEAVED_ROPE:
            interleaved = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        weights = GgufWeights(file, TORCH_DTYPES[dtype], keep_blocks, interleaved)
        ends = end_token_ids(bundle, None)
        weight_format = "gguf" if keep_blocks else dtype
        return _finish(config, weights, bundle, ends, dtype, weight_format, device)


@torch.inference_mode()
def _finish(
    config: ModelConfig,
    source: WeightSource,
    bundle: dict[str, bytes],
    eos_token_ids: tuple[int, ...],
    dtype: str,
    weight_format: str,
    device: torch.device,
) -> LoadedModel:
    model = DecoderModel(config, assemble_weights(config, source, device), TORCH_DTYPES[dtype])
    digest = xxhash.xxh3_128(source.digest().encode())
    digest.update(repr(config).encode())
    source.close()
    return LoadedModel(
        config=config,
        model=model,
        bundle=bundle,
        model_digest=digest.hexdigest(),
        weight_format=weight_format,
        eos_token_ids=eos_token_ids,
    )
