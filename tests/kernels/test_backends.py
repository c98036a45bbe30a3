"""Which backend runs: by name, by what is there, and never in silence."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from core.errors import ConfigError
from kernels import reference
from kernels.backends import choose_backend
from kernels.cpu import binding


def test_auto_takes_the_host_kernels_for_float32() -> None:
    choice = choose_backend("auto", "float32", 1)
    assert (choice.name, choice.keeps_blocks) == ("cpu", True)
    assert choice.description.startswith("cpu (")


def test_auto_says_why_it_takes_the_reference() -> None:
    choice = choose_backend("auto", "bfloat16", 1)
    assert (choice.name, choice.backend) == ("reference", reference)
    assert "--dtype is bfloat16" in choice.description


def test_without_a_built_library_auto_runs_the_reference_and_a_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(binding, "find_library", lambda: None)
    choice = choose_backend("auto", "float32", 1)
    assert choice.name == "reference"
    assert "not built" in choice.description
    with pytest.raises(ConfigError, match="compiler"):
        choose_backend("cpu", "float32", 1)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_library_of_another_build_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other.c").write_text("int baton_num_variants(void) { return 0; }\n")
    library = tmp_path / "other.so"
    command = ["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "other.c")]
    subprocess.run(command, check=True)
    monkeypatch.setattr(binding, "find_library", lambda: library)
    with pytest.raises(ConfigError, match=r"other\.so is of another build .*install Baton again"):
        binding.library.__wrapped__()


def test_what_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'fast' is unknown; known: auto, cpu, reference, triton"):
        choose_backend("fast", "float32", 1)
    with pytest.raises(ConfigError, match="float32, --dtype is float16"):
        choose_backend("cpu", "float16", 1)
    assert choose_backend("reference", "float16", 1).description == "reference (torch)"


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_kernels_of_the_host_are_refused_on_a_card(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--kernel-backend: '{name}' .*--device is cuda"):
        choose_backend(name, "float32", 1, device="cuda")


def test_kernels_of_cards_are_refused_on_the_host() -> None:
    with pytest.raises(ConfigError, match=r"--kernel-backend: 'triton' .*--device is cpu"):
        choose_backend("triton", "float32", 1)


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_a_card_without_triton_is_refused_by_what_is_missing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.triton.import_module", _without_triton)
    with pytest.raises(ConfigError, match=r"--device: 'cuda' .*install baton\[triton\]"):
        choose_backend(name, "float32", 1, device="cuda")


def _without_triton(name: str) -> None:
    raise ModuleNotFoundError(f"{name} needs triton", name="triton")
