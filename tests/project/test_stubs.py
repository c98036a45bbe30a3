"""The committed gRPC stubs are what `make proto` generates."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
STUBS = pathlib.Path("services/rpc/v1")
PROTO = "proto/services/rpc/v1/baton.proto"


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stubs")
    outputs = [f"--{kind}={folder}" for kind in ("python_out", "grpc_python_out", "pyi_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *outputs, PROTO]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize("name", ["baton_pb2.py", "baton_pb2.pyi", "baton_pb2_grpc.py"])
def test_committed_stubs_are_fresh(generated, name):
    fresh = (generated / STUBS / name).read_text()
    assert (ROOT / STUBS / name).read_text() == fresh, "run `make proto` and commit the result"


def test_make_proto_runs_this_generation():
    recipe = (ROOT / "Makefile").read_text()
    options = r"-I proto --python_out=\. --grpc_python_out=\. --pyi_out=\."
    assert re.search(rf"grpc_tools\.protoc {options} \$\(PROTO\)", recipe)
    assert f"PROTO := {PROTO}" in recipe
