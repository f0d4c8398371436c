"""Modules of operations, in forward and in backward."""

import sys
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class _Numbered:
    """Modules by the number of a thread's first node in them."""

    def __init__(self) -> None:
        self.numbers = [0]
        self.places = [""]

    def note(self, number: int, place: str) -> None:
        """Set the module of nodes from this number on."""
        if number == self.numbers[-1]:
            self.places[-1] = place
        elif number > self.numbers[-1]:
            self.numbers.append(number)
            self.places.append(place)

    def of(self, number: int) -> str:
        """Module of the node with this number."""
        return self.places[bisect_right(self.numbers, number) - 1]


class Places:
    """Names modules by path, and follows them through both passes.

    Autograd numbers nodes per thread, so numbers identify modules. A device's backward has its own
    thread, which also makes the recomputed nodes.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._inside: list[str] = []
        self._main = threading.get_ident()
        self._made: dict[int, _Numbered] = defaultdict(_Numbered)

    def name(self, *modules: torch.nn.Module) -> None:
        """Take the names of submodules as paths."""
        self._names = {id(p): path for module in modules for path, p in module.named_modules()}

    def current(self) -> str:
        """Path of the running module. Empty outside modules."""
        if self._inside:
            return self._inside[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        thread = threading.get_ident() if _in_inner_backward() else self._main
        return self._made[thread].of(node._sequence_nr())

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Track the running module."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        inherited = self._inside[-1] if self._inside else ""
        self._inside.append(self._names.get(id(module), inherited))
        self._note()

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        self._inside.pop()
        self._note()

    def _note(self) -> None:
        where = self._inside[-1] if self._inside else ""
        self._made[threading.get_ident()].note(torch.autograd._get_sequence_nr(), where)


def _in_inner_backward() -> bool:
    """Whether this is the inner backward of recomputed operations."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.autograd.backward.__code__:
            return True
        frame = frame.f_back
    return False
