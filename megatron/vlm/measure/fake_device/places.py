"""Paths of the modules that run operations, in forward and in backward."""

import sys
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Places:
    """Path of the running module, in forward and backward.

    Autograd numbers the nodes that a thread makes, so thread and number identify a module. A
    device's backward has its own thread, which also makes the nodes of recomputed layers.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._inside: list[str] = []
        self._main = threading.get_ident()
        # By thread, ranges of sequence numbers: a range's first number, and its nodes' module.
        self._nodes = defaultdict[int, list[tuple[int, str]]](lambda: [(0, "")])

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
        nodes = self._nodes[thread]
        return nodes[bisect_right(nodes, node._sequence_nr(), key=itemgetter(0)) - 1][1]

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
        number, nodes = torch.autograd._get_sequence_nr(), self._nodes[threading.get_ident()]
        if number == nodes[-1][0]:
            nodes.pop()
        if not nodes or number > nodes[-1][0]:
            nodes.append((number, self._inside[-1] if self._inside else ""))
