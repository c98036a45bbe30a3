"""The package: the names of kernels.ops, loaded when used; launchers typed; errors that name what is missing."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

from kernels import ops, triton
from kernels.triton import OPERATIONS

NOT_A_BACKENDS = {"use_backend", "compile_step", "mark"}
OWN = {"use_batch_invariance"}


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def public_functions(module):
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


def modules():
    return [
        importlib.import_module(found.name)
        for found in pkgutil.iter_modules(triton.__path__, "kernels.triton.")
    ]


def test_every_operation_is_here_under_its_name():
    assert set(OPERATIONS) == set(public_functions(ops)) - NOT_A_BACKENDS | OWN


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - OWN))
def test_an_operation_takes_what_ops_gives(name):
    """The parameters of kernels.ops, in order; own ones behind them have defaults."""
    wanted = list(inspect.signature(getattr(ops, name)).parameters)
    own = list(inspect.signature(getattr(triton, name)).parameters.values())
    assert [p.name for p in own[: len(wanted)]] == wanted
    assert all(p.default is not p.empty for p in own[len(wanted) :])


def test_no_module_takes_an_operations_name():
    assert {found.name for found in pkgutil.iter_modules(triton.__path__)}.isdisjoint(OPERATIONS)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_launchers_are_typed(module):
    for name, function in public_functions(module).items():
        if getattr(function, "__globals__", {}).get("tl") and "Tensor" not in function.__globals__:
            continue  # a module of kernels alone
        signature = inspect.signature(function)
        missing = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
        assert not missing, f"{name}: {missing}"
        assert signature.return_annotation is not signature.empty, name


def test_what_is_missing_is_named_when_it_is_used() -> None:
    """Nothing of triton is imported before; then the extra is named, or the card."""
    code = (
        "import sys, torch, kernels.ops, kernels.triton; from core.errors import ConfigError\n"
        "print('triton' in sys.modules)\n"
        "sys.modules['triton'] = None\n"
        "try: kernels.triton.rms_norm\n"
        "except ConfigError as error: print(error)\n"
        "del sys.modules['triton']\n"
        "torch.cuda.is_available = lambda: False\n"
        "try: kernels.triton.load()\n"
        "except ConfigError as error: print(error)"
    )
    is_loaded, extra, card = run(code).splitlines()
    assert is_loaded == "False"
    assert "install baton[triton]" in extra
    assert "needs a CUDA card" in card


def test_loading_all_at_once_finds_the_interpreter_or_the_card() -> None:
    triton.load()
    assert set(OPERATIONS) <= set(vars(triton))


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'conjure'"):
        _ = triton.conjure
