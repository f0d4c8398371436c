"""Modules of a stage that operations belong to, in forward and in backward."""

import sys
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class _Numbered:
    """Modules by the number of the first node that a thread made in them."""

    def __init__(self) -> None:
        self.numbers = [0]
        self.places = [""]

    def note(self, number: int, place: str) -> None:
        """Say where nodes from this number on are made."""
        if number == self.numbers[-1]:
            self.places[-1] = place
        elif number > self.numbers[-1]:
            self.numbers.append(number)
            self.places.append(place)

    def of(self, number: int) -> str:
        """Where the node of this number was made."""
        return self.places[bisect_right(self.numbers, number) - 1]


class Places:
    """Names modules by their path, and follows them through both passes.

    Autograd numbers the nodes that a thread makes, so a node's number says in which module it was
    made. A device's backward has a thread of its own, which also makes the nodes of what is
    recomputed.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._inside: list[str] = []
        self._main = threading.get_ident()
        self._made: dict[int, _Numbered] = defaultdict(_Numbered)

    def name(self, *modules: torch.nn.Module) -> None:
        """Take the names of the modules' parts as paths."""
        self._names = {id(p): path for one in modules for path, p in one.named_modules()}

    def current(self) -> str:
        """Path of the module whose operation runs; empty outside of all."""
        if self._inside:
            return self._inside[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        thread = threading.get_ident() if _in_inner_backward() else self._main
        return self._made[thread].of(node._sequence_nr())

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Watch which modules run."""
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
    """Whether this is the backward of recomputed operations, inside of the whole one's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.autograd.backward.__code__:
            return True
        frame = frame.f_back
    return False
