"""A card where there is none: host tensors that say they are on `cuda`, and refuse to mix with those that do not.

Inside `pretend_card`, torch sees a CUDA device. What is made on it, sent to it or computed from what lies on it is a
CardTensor; an operation that is given tensors of both sides fails, as it does on a card, and so does an index of the
other side, for which a card would have to be waited for. Kernels of `kernels.triton` run in the interpreter and take
tensors of the card only. A copy to the host that is not waited for reaches the host when the stream is synchronised,
or something on the card is read, and not before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

CARD = torch.device("cuda")
_READING = {
    Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
}  # fmt: skip


class CardTensor(Tensor):
    """A tensor that plays one of the card's."""


@dataclass
class Card:
    """What a card has been asked for.

    page_locked: address -> bytes of host memory that it may copy to and from by itself.
    num_waits: how often its stream was synchronised.
    num_launches: kernels started.
    """

    page_locked: dict[int, int] = field(default_factory=dict)
    num_waits: int = 0
    num_launches: int = 0
    _queued: list[Callable[[], object]] = field(default_factory=list)

    # ---- what torch.cuda is asked

    def synchronize(self) -> None:
        """Of its one stream."""
        self.num_waits += 1
        self.finish()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        """Of the CUDA runtime."""
        assert address not in self.page_locked
        self.page_locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Of the CUDA runtime."""
        del self.page_locked[address]
        return 0

    # ---- inside

    @property
    def num_queued(self) -> int:
        """Copies to the host that nobody has waited for."""
        return len(self._queued)

    def finish(self) -> None:
        """Everything that was queued has run."""
        while self._queued:
            self._queued.pop(0)()

    def copy_out(self, target: Tensor, source: Tensor, *, is_awaited: bool) -> None:
        """Copy to the host: what the card holds now, where the host sees it later."""
        snapshot = source.clone()
        self._queued.append(lambda: _plainly(target.copy_, snapshot))
        if is_awaited:
            self.finish()


class _Mode(TorchFunctionMode):
    """Keeps the two sides apart."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        ours = [x for x in tensors if isinstance(x, CardTensor)]
        getter = getattr(func, "__self__", None)
        if ours and getter is Tensor.device:
            return CARD
        if ours and getter is Tensor.is_cuda:
            return True
        if func is Tensor.copy_:
            return self._copy(*args, **kwargs)
        target = _target(func, args, kwargs)
        is_moved = func is Tensor.cpu or (func is Tensor.to and target is not None)
        assert not ours or func is not Tensor.numpy, "numpy reads host memory only"
        if ours and not is_moved:
            strangers = [x for x in tensors if not isinstance(x, CardTensor) and x.dim()]
            assert not strangers, f"{func} mixes the card's tensors with the host's"
        if ours and (func in _READING or (is_moved and target == "cpu")):
            self._card.finish()
        is_card = target == "cuda" or (bool(ours) and target is None)
        args, kwargs = tree_map(_on_host, (args, kwargs))
        if func is Tensor.pin_memory:
            return args[0].clone()
        result = func(*args, **kwargs)
        if is_moved and bool(ours) != is_card:
            result = result.clone()  # the other side has memory of its own
        if func is Tensor.__iter__:
            result = tuple(result)
        result = tree_map(_as_card, result) if is_card else result
        return iter(result) if func is Tensor.__iter__ else result

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        place, values = _plain(target), _plain(source)
        if isinstance(source, CardTensor) and not isinstance(target, CardTensor):
            self._card.copy_out(place, values, is_awaited=not non_blocking)
        else:
            if isinstance(target, CardTensor) and not isinstance(source, CardTensor):
                assert not non_blocking or self._is_page_locked(values), (
                    "copied from swappable memory"
                )
            place.copy_(values)
        return target

    def _is_page_locked(self, memory: Tensor) -> bool:
        first, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        return any(at <= first and end <= at + n for at, n in self._card.page_locked.items())


def _target(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The type of the device that a call names, if any."""
    named = kwargs.get("device")
    if func is Tensor.cpu:
        return "cpu"
    if named is None and func is Tensor.to:
        named = next((x for x in args[1:] if isinstance(x, torch.device | str)), None)
    if named is None and func is Tensor.to:
        named = next((x.device for x in args[1:] if isinstance(x, Tensor)), None)
    return None if named is None else torch.device(named).type


def _on_host(value: Any) -> Any:
    """An argument as the host takes it."""
    if isinstance(value, CardTensor):
        return _plain(value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(Tensor)


def _as_card(value: Any) -> Any:
    return value.as_subclass(CardTensor) if isinstance(value, Tensor) else value


def _plainly(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return call(*arguments, **options)


@contextmanager
def pretend_card() -> Iterator[Card]:
    """A machine with a card, for this thread. triton must run in its interpreter."""
    from kernels import triton
    from kernels.triton.launch import INTERPRETED, launch

    assert INTERPRETED, "there is a card already"
    triton.load()
    card = Card()

    def launch_on_card(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        for value in arguments:
            assert not isinstance(value, Tensor) or isinstance(value, CardTensor), (
                f"{kernel.__name__} is given a tensor of the host"
            )
        card.num_launches += 1
        _plainly(launch, kernel, grid, *map(_on_host, arguments), **options)

    with pytest.MonkeyPatch.context() as patch, _Mode(card):
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_stream", lambda _: card)
        patch.setattr(torch.cuda, "cudart", lambda: card)
        patch.setattr(torch.cuda, "check_error", _check)
        patch.setattr("kernels.triton.philox.default_device", lambda: CARD)
        for name, module in list(sys.modules.items()):
            is_caller = name.startswith("kernels.triton.") and name != launch.__module__
            if is_caller and getattr(module, "launch", None) is launch:
                patch.setattr(module, "launch", launch_on_card)
        yield card


def _check(status: int) -> None:
    assert status == 0
