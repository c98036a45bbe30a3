"""Which transports a worker offers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from core.errors import ConfigError
from engine.config import EngineConfig
from engine.movers import ipc_folder
from tests.support.engines import EngineHarness


def offered(**config: str) -> list[str]:
    engine = EngineHarness(**config)
    try:
        return [offer.kind for offer in engine.receivers.offers]
    finally:
        engine.close()


def test_each_user_has_a_directory_unless_told_otherwise(tmp_path: Path) -> None:
    assert ipc_folder("auto") == f"{tempfile.gettempdir()}/baton-ipc-{os.getuid()}"
    assert ipc_folder("none") == ""
    assert ipc_folder(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ConfigError, match="--ipc-dir: ''"):
        EngineConfig(model="tiny", ipc_dir="")


def test_shared_memory_is_offered_first(tmp_path: Path) -> None:
    assert offered(ipc_dir=str(tmp_path / "ipc")) == ["shm", "tcp"]
    assert offered(ipc_dir="none") == ["tcp"]


def test_what_was_asked_for_must_be_there_and_what_was_not_need_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / f"baton-ipc-{os.getuid()}"
    in_the_way.write_text("a file")
    with pytest.raises(ConfigError, match=f"--ipc-dir: {in_the_way} cannot be used"):
        offered(ipc_dir=str(in_the_way))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert offered(ipc_dir="auto") == ["tcp"]
    assert f"KV goes over tcp only: --ipc-dir: {in_the_way} cannot be used" in caplog.text
