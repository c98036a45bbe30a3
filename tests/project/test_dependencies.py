"""What installs: the gateway without torch, pins inside their ranges, and room for LMCache's caps."""

import pathlib
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from benchmarks.peers.install import LMCACHE, TRANSFER_ENGINES
from kernels.cpu.building import NATIVE, own_flags, source_names

ROOT = pathlib.Path(__file__).parents[2]
FILE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = FILE["project"]
SETUPTOOLS = FILE["tool"]["setuptools"]
PACKAGES = ("core", "kernels", "kvtransfer", "kvindex", "engine", "services")
EXTRAS = PROJECT["optional-dependencies"]

# What lmcache 0.5.6 resolves to beside torch 2.13: its pins and caps, and the fastapi that they leave.
LMCACHE_CAPS = {
    "grpcio": "1.78.0",
    "protobuf": "6.33.6",
    "prometheus-client": "0.24.1",
    "numpy": "2.2.6",
    "fastapi": "0.141.1",
    "transformers": "5.4.0",
}


def requirements(extra=None):
    lines = PROJECT["dependencies"] if extra is None else EXTRAS[extra]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def all_requirements():
    return [item for extra in (None, *EXTRAS) for item in requirements(extra).items()]


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_gateway_installs_without_torch():
    heavy = {"torch", "numpy", "gguf", "safetensors", "transformers", "lmcache", "triton"}
    assert not heavy & set(requirements())


@pytest.mark.parametrize(("name", "requirement"), all_requirements(), ids=lambda value: str(value))
def test_every_direct_dependency_is_pinned_inside_its_range(name, requirement):
    assert requirement.specifier.contains(pins()[name]), f"{name} {pins()[name]}"


@pytest.mark.parametrize(("name", "version"), LMCACHE_CAPS.items())
def test_ranges_admit_what_lmcache_caps(name, version):
    found = [requirement for key, requirement in all_requirements() if key == name]
    assert found
    assert all(requirement.specifier.contains(version) for requirement in found)


def test_pins_stay_under_the_caps():
    for name, cap in LMCACHE_CAPS.items():
        if name != "transformers":
            assert Version(pins()[name]) <= Version(cap)


def test_torch_is_a_range_of_one_major_version():
    (torch,) = [requirement for name, requirement in all_requirements() if name == "torch"]
    assert torch.specifier.contains("2.13.0")
    assert not torch.specifier.contains("3.0.0")


@pytest.mark.parametrize(("name", "packages"), [*TRANSFER_ENGINES.items(), ("lmcache", LMCACHE)])
def test_engines_are_measured_and_tested_as_they_are_pinned(name, packages):
    wanted = {Requirement(line).name: Requirement(line) for line in packages}
    assert set(requirements(name)) <= set(wanted)
    for package in requirements(name):
        assert wanted[package].specifier.contains(pins()[package])


# ---------------------------------------------------------------- what is in the wheel


def test_every_package_is_installed():
    assert set(SETUPTOOLS["packages"]["find"]["include"]) == {
        *PACKAGES,
        *(f"{package}.*" for package in PACKAGES),
    }


def test_every_folder_with_python_is_a_package():
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_data_file_of_a_package_is_installed():
    suffixes = {pattern.rpartition("*")[2] for pattern in SETUPTOOLS["package-data"]["*"]}
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    data = {path.suffix for path in files if not {"__pycache__", "native"} & set(path.parts)}
    assert data - {".py", ".so"} <= suffixes


def test_native_sources_are_built_and_travel_with_the_sources():
    assert NATIVE == ROOT / "kernels/cpu/native"
    variants = {name for name in source_names() if name.startswith("variant_")}
    assert [name for name in source_names() if own_flags(name)] == sorted(
        variants - {"variant_plain.cpp"}
    )
    assert "recursive-include kernels/cpu/native *" in (ROOT / "MANIFEST.in").read_text()
