"""Limits of the house style that a program can check: sizes of files and functions."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("core", "kernels", "kvtransfer", "kvindex", "engine", "services")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def sources():
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path for path in found if "rpc/v1" not in path.as_posix())


def long_functions(tree):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{node.name}: {num_lines} lines"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module opens with what it owns"
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert list(long_functions(tree)) == []
