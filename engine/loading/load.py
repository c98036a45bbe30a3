"""From a ModelSource to a model that runs: config, weights, text files, digest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from core.errors import ConfigError, ModelLoadError
from engine.config import WEIGHT_FORMATS
from engine.loading.assemble import assemble_weights
from engine.loading.folder import FolderWeights, read_bundle
from engine.loading.folder_config import read_folder_config
from engine.loading.gguf_config import read_gguf_config
from engine.loading.gguf_file import GgufFile
from engine.loading.gguf_tokenizer import build_bundle
from engine.loading.gguf_weights import GgufWeights
from engine.loading.sources import ModelSource, SourceKind
from engine.loading.weight_source import TORCH_DTYPES, WeightSource
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderModel
from engine.models.registry import GGUF_INTERLEAVED_ROPE


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


def load_model(source: ModelSource, dtype: str, weight_mode: str) -> LoadedModel:
    """Load a model. weight_mode `quantized` keeps GGUF blocks; a folder's weights are plain either way."""
    if weight_mode not in WEIGHT_FORMATS:
        known = ", ".join(WEIGHT_FORMATS)
        raise ConfigError(f"--weight-format: {weight_mode!r} is unknown; known: {known}")
    if source.kind is SourceKind.GGUF:
        return _load_gguf(source.path, dtype, weight_mode == "quantized")
    config = read_folder_config(source.path)
    bundle = read_bundle(source.path)
    weights = FolderWeights(source.path, TORCH_DTYPES[dtype])
    return _finish(source.path, config, weights, bundle, dtype, dtype)


def _load_gguf(path: Path, dtype: str, keep_blocks: bool) -> LoadedModel:
    with GgufFile(path) as file:
        config = read_gguf_config(file)
        bundle = build_bundle(file)
        interleaved = {}
        if file.metadata["general.architecture"] in GGUF_INTERLEAVED_ROPE:
            interleaved = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        weights = GgufWeights(file, TORCH_DTYPES[dtype], keep_blocks, interleaved)
        return _finish(path, config, weights, bundle, dtype, "gguf" if keep_blocks else dtype)


@torch.inference_mode()
def _finish(
    path: Path,
    config: ModelConfig,
    source: WeightSource,
    bundle: dict[str, bytes],
    dtype: str,
    weight_format: str,
) -> LoadedModel:
    try:
        weights = assemble_weights(config, source)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error.message}") from error
    model = DecoderModel(config, weights, TORCH_DTYPES[dtype])
    digest = xxhash.xxh3_128(source.digest().encode())
    digest.update(repr(config).encode())
    source.close()
    return LoadedModel(
        config=config,
        model=model,
        bundle=bundle,
        model_digest=digest.hexdigest(),
        weight_format=weight_format,
        eos_token_ids=config.eos_token_ids,
    )
