"""Where a model is found: files, folders, Hub ids through the Hub's own cache and switches."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from core.errors import ModelLoadError
from engine.loading.load import load_model
from engine.loading.sources import HUB_FILES, SourceKind, resolve_source
from tests.support.tiny_models import save_folder, tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_file_is_a_gguf_and_a_folder_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve_source(str(file)).kind is SourceKind.GGUF
    source = resolve_source(str(tmp_path))
    assert (source.kind, source.path, source.revision) == (SourceKind.FOLDER, tmp_path, "")


@pytest.mark.parametrize("name", ["no/such/folder", "missing.gguf", "owner/missing.gguf", "word"])
def test_what_is_neither_path_nor_hub_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="no such file or folder, and not a Hub id"):
        resolve_source(name)


def hub_cache(tmp_path: Path) -> Path:
    """A Hub cache that holds one model, laid out as huggingface_hub does."""
    repository = tmp_path / "hub" / "models--owner--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    save_folder(tiny_model("llama"), repository / "snapshots" / COMMIT)
    return tmp_path / "hub"


def offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """What HF_HUB_CACHE and HF_HUB_OFFLINE set when huggingface_hub is imported."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_a_cached_hub_model_loads_offline_and_records_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch, hub_cache(tmp_path))
    source = resolve_source("owner/tiny")
    assert (source.kind, source.revision) == (SourceKind.FOLDER, COMMIT)
    assert load_model(source, "float32", "expanded").config.num_layers == 3


def test_an_uncached_hub_model_offline_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch, tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        resolve_source("owner/unheard-of")
    assert "'owner/unheard-of'" in caught.value.message
    assert "\n" not in caught.value.message


def test_revision_and_file_patterns_reach_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(name: str, **options: object) -> str:
        asked.update(name=name, **options)
        return str(tmp_path / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    source = resolve_source("owner/tiny", revision="v2")
    assert asked == {"name": "owner/tiny", "revision": "v2", "allow_patterns": list(HUB_FILES)}
    assert source.revision == COMMIT
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in HUB_FILES)


@pytest.mark.parametrize(
    "failure",
    [
        LocalEntryNotFoundError("cannot reach\nsecond line"),
        OSError("disk full\nsecond line"),
        RuntimeError("own mistake"),
    ],
)
def test_a_failing_hub_ends_in_one_sentence(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(name: str, **options: object) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    expected = RuntimeError if isinstance(failure, RuntimeError) else ModelLoadError
    with pytest.raises(expected) as caught:
        resolve_source("owner/tiny")
    if isinstance(caught.value, ModelLoadError):
        assert "\n" not in caught.value.message
