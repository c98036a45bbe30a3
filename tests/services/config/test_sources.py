"""Where values come from, which one wins, and how a bad or an old name is answered."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from services.config import build
from services.config.retired import is_retired
from services.config.settings import field_sentences
from services.config.sources import add_flags, collect, normalise_arguments
from services.worker.config import WorkerConfig


def found(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    yaml: str = "",
    folder: Path | None = None,
) -> dict[str, Any]:
    """What a worker's command line, environment and file say together."""
    given = list(arguments)
    if folder is not None:
        file = folder / "baton.yaml"
        file.write_text(yaml)
        given += ["--config", str(file)]
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_flags(parser, build.worker_settings())
    namespace = parser.parse_args(normalise_arguments(given))
    return collect(build.worker_settings(), namespace, environment or {}, build.all_setting_names())


def test_a_flag_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    yaml = "block-size: 64\nmax_num_seqs: 7\nlink-rate: 5M\n"
    environment = {"BATON_BLOCK_SIZE": "32", "BATON_MAX_NUM_SEQS": "8"}
    settings = found("--block-size", "16", environment=environment, yaml=yaml, folder=tmp_path)
    assert settings == {"block-size": 16, "max-num-seqs": 8, "link-rate": 5e6}


def test_nothing_said_is_nothing_found() -> None:
    assert found() == {}


def test_a_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("model: m\nserved-model-name: [a, b]\nenable-prefix-caching: false\n")
    settings = found(environment={"BATON_CONFIG": str(file)})
    assert settings["served-model-name"] == ("a", "b")
    assert settings["enable-prefix-caching"] is False


def test_switches_and_lists_on_the_command_line() -> None:
    settings = found("--no-enable-prefix-caching", "--served-model-name", "a", "b")
    assert settings == {"enable-prefix-caching": False, "served-model-name": ("a", "b")}


def test_underscores_in_flags_are_dashes() -> None:
    assert found("--max_model_len=32k") == {"max-model-len": 32_000}


@pytest.mark.parametrize(
    ("arguments", "environment", "yaml", "message"),
    [
        (["--block-size", "x"], {}, "", r"--block-size: 'x' cannot be used"),
        ([], {"BATON_LINK_RATE": "fast"}, "", r"BATON_LINK_RATE: 'fast' cannot be used"),
        ([], {}, "max-num-seqs: many", r"baton.yaml: max-num-seqs: 'many' cannot be used"),
        ([], {}, "max-num-seks: 3", r"max-num-seks: unknown setting; did you mean max-num-seqs"),
        ([], {}, "block-size:", r"block-size: has no value"),
        ([], {}, "- a", r"must hold settings"),
        ([], {}, "a: [", r"is not YAML"),
        (
            [],
            {"BATON_BLOK_SIZE": "3"},
            "",
            r"BATON_BLOK_SIZE: unknown; did you mean BATON_BLOCK_SIZE",
        ),
        (["--prefix-caching-hash-algo", "md5"], {}, "", r"known: sha256, sha256_cbor"),
    ],
)
def test_bad_values_are_named_where_they_were_written(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], yaml: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        found(*arguments, environment=environment, yaml=yaml, folder=tmp_path)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--config: /nowhere.yaml cannot be read: No such file"):
        found("--config", "/nowhere.yaml")


def test_what_belongs_to_others_is_left_alone(tmp_path: Path) -> None:
    environment = {
        "BATON_API_KEY": "for the gateway",
        "BATON_PORT": "tcp://10.0.0.1:8000",  # Kubernetes, for a service named baton
        "BATON_SERVICE_HOST": "10.0.0.1",
        "BATON_PORT_8000_TCP_ADDR": "10.0.0.1",
        "BATON_RAIN": "a stranger's",
    }
    assert found(environment=environment, yaml="seed: [a:1]", folder=tmp_path) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--speculative-model", "x"],
            "--speculative-model is an old name; write --speculative-config",
        ),
        (["--num-speculative-tokens=5"], "write --speculative-config instead"),
        (["--quantization-fp8-dynamic"], "write --quantization instead"),
        (["--swap_space", "4"], "--swap-space is an old name; write --kv-offloading-size"),
        (["--cpu-offload-gb", "4"], "weights stay where the model runs"),
        (["--gpu-memory-utilization", "0.9"], "write --kv-cache-memory-bytes instead"),
        (["--max-num-partial-prefills", "2"], "any number of prompts may be in progress"),
        (["-tp", "2"], "one rank; add workers"),
        (["--kv-transfer-config", "{}"], "roles are commands here"),
        (["--no-enable-chunked-prefill"], "always computed in chunks"),
    ],
)
def test_names_of_popular_guides_are_answered_with_what_to_write(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        found(*arguments)


def test_old_names_are_answered_in_file_and_environment_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"BATON_SWAP_SPACE is an old name"):
        found(environment={"BATON_SWAP_SPACE": "4"})
    with pytest.raises(ConfigError, match=r"baton.yaml: swap_space is an old name"):
        found(yaml="swap_space: 4", folder=tmp_path)


def test_what_asks_for_the_case_anyway_is_dropped(tmp_path: Path) -> None:
    arguments = ["--max-num-partial-prefills", "1", "--enable-chunked-prefill", "-tp", "1"]
    assert found(*arguments, "--enforce-eager", "--block-size", "32") == {"block-size": 32}
    assert found(yaml="tensor-parallel-size: 1", folder=tmp_path) == {}


def test_no_setting_is_hidden_by_a_retired_name() -> None:
    groups = (build.worker_settings(), build.gateway_settings(), build.cluster_settings())
    assert [s.name for group in groups for s in group if is_retired(s.name)] == []


def test_every_setting_has_a_sentence_and_a_name_of_its_own() -> None:
    for settings in (build.worker_settings(), build.gateway_settings(), build.cluster_settings()):
        assert [setting.name for setting in settings if not setting.help] == []
        assert not any("(`--" in setting.help for setting in settings)
        assert len({setting.variable for setting in settings}) == len(settings)


def test_sentences_span_lines() -> None:
    assert field_sentences(WorkerConfig)["advertise_host"].endswith("where --host is a wildcard.")
