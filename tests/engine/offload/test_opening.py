"""Tiers that cannot be had end the start with a sentence, and leave no thread that the process would wait for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from engine.assembly import assemble
from engine.channel import Inbox
from engine.config import EngineConfig
from engine.offload_config import OffloadConfig
from tests.support.tiny_models import save_folder, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", num_hidden_layers=2, vocab_size=128)
    return save_folder(model, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"size": 1e-7}, "hold no block of"),
        ({"disk_dir": "/proc/none", "size": 0.001}, "cannot be used"),
        ({"remote_url": "redis://host:notaport/0", "size": 0.001}, "notaport"),
    ],
)
def test_a_tier_that_cannot_be_had_is_said_and_nothing_is_left(
    values: dict[str, Any], words: str, folder: Path
) -> None:
    config = EngineConfig(
        str(folder), kernel_backend="cpu", num_threads=1, core_ledger="none", max_model_len=64,
        num_blocks=8, offload=OffloadConfig(**values),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=words):
        assemble(config, Inbox(), lambda message: None)
    assert [t.name for t in threading.enumerate() if t.name.startswith("kv-")] == []
