"""Paths of the modules that run operations, in forward and in backward."""

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


class _ModulesByNode:
    """Module paths by ranges of the sequence numbers of a thread's autograd nodes."""

    def __init__(self) -> None:
        self.numbers = [0]  # first number of every range
        self.places = [""]

    def append(self, number: int, place: str) -> None:
        """Assign nodes from `number` on to a module, until the next call."""
        if number == self.numbers[-1]:
            self.places[-1] = place
        elif number > self.numbers[-1]:
            self.numbers.append(number)
            self.places.append(place)

    def find(self, number: int) -> str:
        return self.places[bisect_right(self.numbers, number) - 1]


class Places:
    """Path of the running module, in forward and backward.

    Autograd numbers the nodes that a thread makes, so thread and number identify a module. A
    device's backward has its own thread, which also makes the nodes of recomputed layers.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._inside: list[str] = []
        self._main = threading.get_ident()
        self._nodes: dict[int, _ModulesByNode] = defaultdict(_ModulesByNode)  # by thread

    def name(self, *modules: torch.nn.Module) -> None:
        """Use the names of submodules as paths, instead of earlier ones."""
        self._names = {id(p): path for module in modules for path, p in module.named_modules()}

    def current(self) -> str:
        """Return the path of the running module, empty outside modules."""
        if self._inside:
            return self._inside[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        thread = self._main
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            # A checkpoint's backward calls `backward` on nodes that its own thread made.
            if frame.f_code is torch.autograd.backward.__code__:
                thread = threading.get_ident()
                break
            frame = frame.f_back
        return self._nodes[thread].find(node._sequence_nr())

    @contextmanager
    def follow(self) -> Iterator[None]:
        before = register_module_forward_pre_hook(self._enter)
        # Called even if the forward raises, to pop the module that `_enter` pushed.
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
        self._nodes[threading.get_ident()].append(torch.autograd._get_sequence_nr(), where)
