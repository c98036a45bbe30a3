"""Which transports a worker offers."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from engine import movers
from engine.config import EngineConfig
from engine.movers import ipc_folder
from tests.kvtransfer.memory_engine import MemoryEngine, Network
from tests.support.engines import EngineHarness


def offered(**config: Any) -> list[str]:
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
    assert (
        f"KV does not go through shared memory: --ipc-dir: {in_the_way} cannot be used"
        in caplog.text
    )


def test_transports_are_offered_in_the_order_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Network()
    monkeypatch.setattr(movers, "NixlEngine", lambda is_read: MemoryEngine(reads))
    monkeypatch.setattr(movers, "MooncakeEngine", lambda host: MemoryEngine(reads))
    ipc_dir = str(tmp_path / "ipc")
    for kinds in (("nixl", "shm", "tcp"), ("tcp", "mooncake"), ("shm",)):
        assert offered(ipc_dir=ipc_dir, kv_transports=kinds) == list(kinds)
    assert offered(ipc_dir="none", kv_transports=("nixl", "shm")) == ["nixl"]
    with pytest.raises(ConfigError, match="--kv-transports: shm: none is left here"):
        offered(ipc_dir="none", kv_transports=("shm",))


def test_transports_that_are_unknown_or_named_twice_are_refused() -> None:
    assert EngineConfig("m").kv_transports == ("shm", "tcp")
    with pytest.raises(
        ConfigError, match="--kv-transports: 'rdma' is unknown; known: nixl, mooncake, shm, tcp"
    ):
        EngineConfig("m", kv_transports=("rdma", "tcp"))
    for named in ("", "tcp,tcp"):
        kinds = tuple(filter(None, named.split(",")))
        with pytest.raises(ConfigError, match=f"--kv-transports: '{named}' must name one or more"):
            EngineConfig("m", kv_transports=kinds)


@pytest.mark.parametrize(
    ("kind", "module", "install"),
    [
        ("nixl", "nixl", "pip install --no-deps nixl nixl-cu13"),
        ("mooncake", "mooncake.engine", "pip install --no-deps mooncake-transfer-engine-non-cuda"),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, module: str, install: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        offered(kv_transports=("tcp", kind))
    assert caught.value.message.startswith(f"--kv-transports: {kind} is not installed")
    assert install in caught.value.message


def test_an_end_that_cannot_be_made_leaves_no_other_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*, is_read: bool) -> MemoryEngine:
        if is_read:
            raise ConfigError("--kv-transports: nixl cannot use UCX here")
        return MemoryEngine(Network())

    before = set(threading.enumerate())
    monkeypatch.setattr(movers, "NixlEngine", broken)
    with pytest.raises(ConfigError, match="cannot use UCX here"):
        offered(kv_transports=("tcp", "nixl"))
    assert set(threading.enumerate()) == before
