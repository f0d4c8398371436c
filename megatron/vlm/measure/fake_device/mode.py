"""A fake device as a context: operations allocate and do not compute."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed._tools.fake_collectives
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.vlm.measure.fake_device import kernels
from megatron.vlm.measure.fake_device.counts import (
    PRODUCTS,
    LaunchCounts,
    flops_of,
    kind_of,
    launches,
    moved_bytes,
)
from megatron.vlm.measure.fake_device.device import fake_calls, install_device
from megatron.vlm.measure.fake_device.memory import Label, MemoryTracker
from megatron.vlm.measure.fake_device.places import Places
from megatron.vlm.measure.fake_device.routing import evenly_routed
from megatron.vlm.model import initialize
from megatron.vlm.model.fused import compiled
from megatron.vlm.model.fused.compiled import Body

aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
_HOST_READ = aten._local_scalar_dense.default
_COPIES = (aten._to_copy.default, aten.copy_.default)
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": None,
    "torch_attn::_varlen_attn": None,
    "aten::_scaled_dot_product_flash_attention_backward": kernels.attention_backward_bytes,
    "torch_attn::_varlen_attn_backward": kernels.packed_attention_backward_bytes,
}
Check = Callable[[str, Sequence[Any]], None]


@dataclass(frozen=True, slots=True)
class _Rule:
    operation: str
    launches: bool = True
    is_product: bool = False
    checks: Check | None = None
    working_bytes: Callable[[Sequence[Any]], int] | None = None
    results: Callable[..., Any] | None = None


@cache
def _rule_of(func: Any) -> _Rule:
    operation = func.name().partition(".")[0]
    namespace = operation.partition("::")[0]
    is_product = operation in PRODUCTS
    checks: Check | None = None
    working = _ATTENTION.get(operation)
    if is_product:
        checks, working = kernels.check_product, kernels.copied_operand_bytes
    elif operation in _ATTENTION and working is None:
        checks = kernels.check_attention
    elif namespace not in ("aten", "prim", "c10d", "_c10d_functional", "profiler"):
        checks = kernels.check_one_device
    results = kernels.RESULTS.get(func)
    if namespace == "c10d" and "coalesced" in operation:
        results = _begun_work
    return _Rule(operation, launches(func), is_product, checks, working, results)


def _begun_work(*_: object, **__: object) -> Any:
    """Handle of coalesced collectives, which have no shape function in torch."""
    return FakeWork().boxed()


class FakeDevice(TorchDispatchMode):
    """Counts allocations, launches and reads of every operation; raises what a device would."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryTracker()
        self.counts = LaunchCounts()
        self.places = Places()
        self.phase = "build"
        """Current part of the step, for labels and counts."""
        self._is_in_body = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE_OF:
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._is_in_body:
            return func(*args, **kwargs)
        if func is _HOST_READ and args[0].constant is None:
            return self.read(args[0])
        rule = _rule_of(func)
        if rule.checks is not None:
            rule.checks(rule.operation, args)
        run = func if rule.results is None else rule.results
        results = run(*args, **kwargs)
        self._count(func, rule, args, kwargs, results)
        return results

    def count_body(self, name: str, body: Body) -> Body:
        """Return a fused operation's body as one launch that only allocates its results."""
        rule = _Rule(f"omnibal::{name}")

        def run(*arguments: Any) -> Any:
            kernels.check_one_device(rule.operation, arguments)
            self._is_in_body = True
            try:
                results = body(*arguments)
            finally:
                self._is_in_body = False
            self._count(None, rule, arguments, {}, results)
            return results

        return run

    def read(self, tensor: Any) -> float | int:
        """Return a placeholder scalar: 1 on the host, as host scalars are counts, else 0."""
        on_device = tensor.device.type == "cuda"
        if on_device:
            self.counts.add_read(self.phase, "item", _calling_line())
        value = 0 if on_device else 1
        return float(value) if tensor.dtype.is_floating_point else value

    def read_of_routing(self) -> None:
        """Count the host's wait for the routing of tokens."""
        self.counts.add_read(self.phase, "copy", _calling_line())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage resized outside torch's operations."""
        label = Label(self.places.current(), "resize_", self.phase)
        self.memory.resized(storage, label)

    def _count(self, func: Any, rule: _Rule, args: Any, kwargs: Any, results: Any) -> None:
        label = None
        outputs = (
            [results] if isinstance(results, torch.Tensor) else list(kernels.tensors_in(results))
        )
        on_device = False
        for output in outputs:
            if output.device.type == "cuda":
                on_device = True
                if label is None:
                    label = Label(self.places.current(), rule.operation, self.phase)
                self.memory.hold(output.untyped_storage(), label)
            elif func in _COPIES and args[1 if func is _COPIES[1] else 0].device.type == "cuda":
                self.counts.add_read(self.phase, "copy", _calling_line())
        if not on_device or label is None:
            if kind_of(rule.operation) == "communication":
                moved = sum(one.numel() * one.element_size() for one in kernels.tensors_in(args))
                self.counts.add(self.phase, rule.operation, 0.0, moved)
            return
        working = 0 if rule.working_bytes is None else rule.working_bytes(args)
        self.memory.settle(label, working)
        if not rule.launches:
            return
        flops = 0.0 if func is None else flops_of(func, args, kwargs, results)
        read = [*args, *(value for name, value in kwargs.items() if name != "out")]
        moved = moved_bytes(rule.operation, read, outputs)
        self.counts.add(self.phase, rule.operation, flops, moved)
        if rule.is_product:
            self.counts.add_product(label.where, rule.operation, args, outputs[0], flops)


class _FakeTensors(FakeTensorMode):
    """Fake tensors of a device that must never be asked to make a real one."""

    @property
    def avoid_device_init(self) -> bool:
        return True


def _calling_line() -> str:
    """File and line of the first caller outside torch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if "/torch/" not in name and "/measure/fake_device/" not in name:
            return f"{'/'.join(name.split('/')[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


@dataclass(frozen=True, slots=True)
class FakeCuda:
    """A fake CUDA device, and the conversion of host tensors."""

    device: FakeDevice
    fake: Callable[[torch.Tensor], torch.Tensor]
    """Convert a host tensor to a fake tensor of its size and type."""


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Run the body on a fake CUDA device: tensors have sizes and no data.

    Megatron-core and torch find a device, and allocations on it are counted. Use a separate
    process, as the compiled part stays.

    Raises:
        UserError: the device cannot be compiled here.
        RuntimeError: Megatron-core already runs on the CPU in this process.
    """
    install_device()
    device, tensors = FakeDevice(), _FakeTensors(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(fake_calls(device.memory, device.resized))
        stack.enter_context(kernels.device_kernels(device.read))
        stack.enter_context(evenly_routed(device.read_of_routing))
        stack.enter_context(patch.object(compiled, "compile_body", device.count_body))
        stack.enter_context(patch.object(initialize, "_draw_box", lambda *_: None))
        stack.enter_context(tensors)
        stack.enter_context(device.places.followed())
        stack.enter_context(device)
        yield FakeCuda(
            device, lambda one: one if tensors.is_our_fake(one) else tensors.from_tensor(one)
        )
