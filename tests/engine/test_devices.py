"""Which device a worker computes on: by what is there and what is asked for, refused by name where it is not."""

import pytest
import torch

from core.errors import ConfigError
from engine.config import DEVICES, KERNEL_BACKENDS
from engine.devices import HOST, choose_device, lock_pages, send, unlock_pages, wait_for


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_card")
def test_without_a_card_auto_is_the_host_and_cuda_is_refused() -> None:
    for backend in KERNEL_BACKENDS:
        assert choose_device("auto", backend) == choose_device("cpu", backend) == HOST
        with pytest.raises(ConfigError, match=r"--device: 'cuda' .* torch sees no CUDA device"):
            choose_device("cuda", backend)


@pytest.mark.usefixtures("card")
def test_with_a_card_auto_goes_where_the_kernels_run() -> None:
    chosen = {backend: choose_device("auto", backend).type for backend in KERNEL_BACKENDS}
    assert chosen == {"auto": "cuda", "triton": "cuda", "cpu": "cpu", "reference": "cpu"}
    assert [choose_device(name, "auto").type for name in DEVICES] == ["cuda", "cpu", "cuda"]


def test_on_the_host_nothing_is_copied_nor_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("CUDA was asked"))
    memory = torch.zeros(3)
    assert send(memory, HOST) is memory
    lock_pages(memory, HOST)
    wait_for(HOST)
    unlock_pages(memory, HOST)
