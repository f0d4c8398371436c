"""A fake CUDA device as a context: operations allocate counted memory and do not compute."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed._tools.fake_collectives
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.vlm.measure.fake_device.device import install_device, patch_torch_cuda
from megatron.vlm.measure.fake_device.memory import Label, MemoryTracker
from megatron.vlm.measure.fake_device.operations import (
    DELTA_RULES,
    DeviceOperation,
    LaunchCounts,
    aten,
    check_one_device,
    describe_operation,
    tensors_in,
    use_device_kernels,
)
from megatron.vlm.measure.fake_device.places import Places
from megatron.vlm.measure.fake_device.routing import route_evenly
from megatron.vlm.model import delta_net, initialize
from megatron.vlm.model.fused import compiled
from megatron.vlm.model.fused.compiled import Body

_DEVICE_OF = torch.ops.prim.device.default
_HOST_READ = aten._local_scalar_dense.default
_COPY_OPERATIONS = (aten._to_copy.default, aten.copy_.default)


class FakeDevice(TorchDispatchMode):
    """Dispatch mode that counts memory, launches and host reads, and raises CUDA's errors."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = _FakeTensors(allow_non_fake_inputs=True)
        self.memory = MemoryTracker()
        self.counts = LaunchCounts()
        self.places = Places()
        self.phase = "build"  # current part of the step, for labels and counts
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
            return self.read_scalar(args[0])
        operation = describe_operation(func)
        if operation.check is not None:
            operation.check(operation.name, args)
        results = (operation.results or func)(*args, **kwargs)
        self._count(func, operation, args, kwargs, results)
        return results

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor like `tensor`, or `tensor` itself if it is fake."""
        is_fake = self.tensors.is_our_fake(tensor)
        return tensor if is_fake else self.tensors.from_tensor(tensor)

    def count_body(self, name: str, body: Body, working_bytes: Any = None) -> Body:
        """Return `body`, counting each call as one fused launch without intermediate tensors."""
        operation = DeviceOperation(f"omnibal::{name}", working_bytes=working_bytes)

        def run(*arguments: Any) -> Any:
            check_one_device(operation.name, arguments)
            self._is_in_body = True  # its operations are fused: do not count them
            try:
                results = body(*arguments)
            finally:
                self._is_in_body = False
            self._count(None, operation, arguments, {}, results)
            return results

        return run

    def read_scalar(self, tensor: Any) -> float | int:
        """Return 1 for host tensors, which are counts; else count a host read and return 0."""
        on_device = tensor.device.type == "cuda"
        if on_device:
            self.counts.add_read(self.phase, "item", _find_calling_line())
        value = 0 if on_device else 1
        return float(value) if tensor.dtype.is_floating_point else value

    def count_routing_read(self) -> None:
        self.counts.add_read(self.phase, "copy", _find_calling_line())

    def resize(self, storage: torch.UntypedStorage) -> None:
        label = Label(self.places.current(), "resize_", self.phase)
        self.memory.resize(storage, label)

    def _count(
        self, func: Any, operation: DeviceOperation, args: Any, kwargs: Any, results: Any
    ) -> None:
        label = None
        outputs = [results] if isinstance(results, torch.Tensor) else list(tensors_in(results))
        for output in outputs:
            if output.device.type == "cuda":
                label = label or Label(self.places.current(), operation.name, self.phase)
                self.memory.hold(output.untyped_storage(), label)
            # The host waits for a copy from the device.
            elif (
                func in _COPY_OPERATIONS
                and args[1 if func is _COPY_OPERATIONS[1] else 0].device.type == "cuda"
            ):
                self.counts.add_read(self.phase, "copy", _find_calling_line())
        if label is None:
            if operation.kind == "communication":
                moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(args))
                self.counts.add(self.phase, operation, 0.0, moved)
            return
        self.memory.settle(label, operation.working_bytes(args) if operation.working_bytes else 0)
        if not operation.launches:
            return  # a view or an allocation
        flops = operation.flops(func, args, kwargs, results)
        read = [*args, *(value for name, value in kwargs.items() if name != "out")]
        self.counts.add(self.phase, operation, flops, operation.moved_bytes(read, outputs))
        if operation.is_product:
            self.counts.add_product(label.where, operation.name, args, outputs[0], flops)


class _FakeTensors(FakeTensorMode):
    @property
    def avoid_device_init(self) -> bool:
        return True  # else torch would initialize CUDA with a real tensor


def _find_calling_line() -> str:
    """Return file and line of the innermost caller outside torch and this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if "/torch/" not in name and "/measure/fake_device/" not in name:
            return f"{'/'.join(name.split('/')[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


@contextmanager
def fake_cuda() -> Iterator[FakeDevice]:
    """Run the body on a fake CUDA device: tensors have sizes and no data.

    Megatron-core and torch find a device, and allocations on it are counted. Use a separate process
    that has not prepared Megatron-core for the CPU: the compiled device cannot be removed.
    """
    install_device()
    device = FakeDevice()
    with ExitStack() as stack:
        stack.enter_context(patch_torch_cuda(device.memory, device.resize))
        stack.enter_context(use_device_kernels(device.read_scalar))
        stack.enter_context(route_evenly(device.count_routing_read))
        stack.enter_context(patch.object(compiled, "compile_body", device.count_body))
        stack.enter_context(patch.object(delta_net, "has_kernel", lambda: False))
        for name, rule in DELTA_RULES.items():
            stack.enter_context(patch.object(delta_net, name, device.count_body(name, *rule)))
        stack.enter_context(patch.object(initialize, "_draw_box", lambda *_: None))
        stack.enter_context(device.tensors)
        stack.enter_context(device.places.follow())
        stack.enter_context(device)  # last, so that it sees operations before the fake tensors
        yield device
