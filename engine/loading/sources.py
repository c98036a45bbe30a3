"""Where a model's files lie: a GGUF file, a folder, or a snapshot of a Hub repository."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from core.errors import ModelLoadError

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)

HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
"""What is taken of a Hub repository: weights as safetensors, config and tokenizer. No code, no pickles."""


class SourceKind(StrEnum):
    """How the files are laid out."""

    GGUF = "gguf"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on local disk.

    name: what the user asked for.
    kind: how the files are laid out.
    path: the GGUF file, or the folder.
    revision: the Hub commit the files were taken from, empty for local files.
    """

    name: str
    kind: SourceKind
    path: Path
    revision: str = ""


def resolve_source(name: str, revision: str = "") -> ModelSource:
    """Find a model by path or Hub id; a Hub snapshot is fetched unless the Hub's own cache holds it."""
    path = Path(name).expanduser()
    if path.is_file():
        return ModelSource(name, SourceKind.GGUF, path)
    if path.is_dir():
        return ModelSource(name, SourceKind.FOLDER, path)
    if not _is_hub_id(name):
        raise ModelLoadError(
            f"model {name!r}: no such file or folder, and not a Hub id (owner/name)"
        )
    return _fetch(name, revision)


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def _fetch(name: str, revision: str) -> ModelSource:
    """Take a snapshot through huggingface_hub, with its cache, token and offline switches."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(name, revision=revision or None, allow_patterns=list(HUB_FILES))
    except LocalEntryNotFoundError:
        raise ModelLoadError(
            f"model {name!r}: not in the local Hub cache, and the Hub cannot be reached or is switched off"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(f"model {name!r}: the Hub refused it: {reason}") from error
    path = Path(folder)
    # A snapshot's folder is named by the commit it was taken from.
    return ModelSource(name, SourceKind.FOLDER, path, revision=path.name)
