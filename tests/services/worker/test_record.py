"""Names that a worker derives for itself."""

import pytest

from core.worker_info import Role
from engine.config import EngineConfig
from services.worker.config import WorkerConfig
from services.worker.record import advertised_host, served_models, worker_id


def config(model: str = "m", role: Role = Role.MIXED, **changes: object) -> WorkerConfig:
    return WorkerConfig(EngineConfig(model, role=role), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1"),
        ("/models/llama", "llama"),
        ("./llama", "llama"),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
    ],
)
def test_the_served_name_follows_the_model(model: str, name: str) -> None:
    assert served_models(config(model)) == (name,)
    assert served_models(config(model, served_model_names=("a", "b"))) == ("a", "b")


def test_a_worker_keeps_its_name_over_restarts() -> None:
    assert worker_id(config(role=Role.DECODE), 5001) == "decode-127.0.0.1-5001"
    assert worker_id(config(worker_id="w"), 5001) == "w"


def test_a_wildcard_is_not_advertised() -> None:
    assert advertised_host(config(host="0.0.0.0")) not in ("", "0.0.0.0")
    assert advertised_host(config(host="0.0.0.0", advertise_host="pod-1")) == "pod-1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": 70_000}, "--port: 70000"),
        ({"metrics_port": -2}, "--metrics-port: -2"),
        ({"drain_ms": -1}, "--drain-ms: -1"),
        ({"host": ""}, "--host"),
        ({"served_model_names": ("a", "")}, "--served-model-name"),
    ],
)
def test_bad_values_name_their_flag(changes: dict[str, object], message: str) -> None:
    with pytest.raises(Exception, match=message):
        config(**changes)
