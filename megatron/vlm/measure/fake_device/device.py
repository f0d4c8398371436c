"""A process's fake CUDA device: a part in C++, which stays, and patches of `torch.cuda`."""

import contextlib
import ctypes
import functools
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import cpp_extension

from megatron.vlm.backend import immediate_cuda_calls, is_core_on_cpu, random_state_calls
from megatron.vlm.measure.fake_device.memory import MemoryTracker
from omnibal.base.errors import UserError

DEVICE_NAME = "fake CUDA device"
_SOURCE = Path(__file__).with_name("device.cpp")
_MULTI_TENSOR_TYPES = optimizer._foreach_supported_types
_FAKE_ATTRIBUTES = {"fake_device", "fake_mode", "constant"}
_MAX_CONSTANT_ELEMENTS = 1 << 16  # host tensors with known values, such as borders of samples


@functools.cache
def install_device() -> None:
    """Compile and install the device in this process, once. UserError without a C++20 g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise UserError("--fake-device compiles a file by g++, which is absent; install it")
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = Path(torch.__file__).parent / "lib"
    # Compiled in every process, in a second: a shared cache could be tampered with.
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "fake_device.so")
        command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", str(_SOURCE), "-o", library]
        command += [*(f"-I{path}" for path in includes), f"-L{libraries}", "-lc10", "-ltorch_cpu"]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            error = (ended.stderr.strip().splitlines() or ["no message"])[0]
            raise UserError(
                f"{compiler} cannot compile {_SOURCE.name} ({error}); install g++ 10 or newer"
            )
        ctypes.CDLL(library).install()


@contextlib.contextmanager
def patch_torch_cuda(
    memory: MemoryTracker, resized: Callable[[torch.UntypedStorage], None]
) -> Iterator[None]:
    """Patch `torch.cuda` and its users to be a device with `memory`; `resize_` calls `resized`."""
    if is_core_on_cpu():
        raise RuntimeError("core is prepared for the CPU: make a fake device in a new process")
    with contextlib.ExitStack() as replaced:
        for owner, calls in (*_list_patches(memory, resized), *random_state_calls()):
            replaced.enter_context(patch.multiple(owner, **calls))
        # Run functions uncompiled that core would compile.
        replaced.enter_context(torch._dynamo.config.patch(disable=True))
        yield


def _list_patches(
    memory: MemoryTracker, resized: Callable[[torch.UntypedStorage], None]
) -> list[tuple[Any, dict[str, Any]]]:
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        resized(storage)
        return storage

    def nothing() -> Callable[..., None]:
        # A new function each time: torch's compiler keys its rules by function object.
        return lambda *_, **__: None

    def gather_object(objects: list[Any], own: Any, group: object = None) -> None:
        objects[:] = [own] * len(objects)

    cuda = immediate_cuda_calls() | {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: DEVICE_NAME,
        "get_device_capability": lambda *_: (9, 0),  # Hopper
        "get_device_properties": lambda *_: SimpleNamespace(
            name=DEVICE_NAME, major=9, minor=0, multi_processor_count=132, total_memory=1 << 50
        ),
        "memory_allocated": lambda *_: memory.now_bytes,
        "memory_reserved": lambda *_: memory.now_bytes,
        "max_memory_allocated": lambda *_: memory.peak_bytes,
        "reset_peak_memory_stats": lambda *_: memory.reset_peak(),
        "memory_stats": lambda *_: {},
        "is_current_stream_capturing": lambda: False,
        "set_per_process_memory_fraction": nothing(),
    }
    return [
        (torch.cuda, cuda),
        (torch.UntypedStorage, {"resize_": resize_}),
        (torch.cuda.nvtx, {"range_push": nothing(), "range_pop": nothing()}),
        (torch.nn.Module, {"to": _move_module, "cuda": _move_module}),
        (dist, {"all_gather_object": gather_object, "barrier": nothing()}),
        # Otherwise Adam updates tensor by tensor, which needs less memory than multi-tensor.
        (optimizer, {"_foreach_supported_types": [*_MULTI_TENSOR_TYPES, FakeTensor]}),
        (
            fake_tensor,
            {"CONSTANT_NUMEL_LIMIT": _MAX_CONSTANT_ELEMENTS, "init_gpu_context": nothing()},
        ),
    ]


def _move_module(module: torch.nn.Module, *_: object, **__: object) -> torch.nn.Module:
    """Move a module of fake tensors, in place of `Module.to`."""
    # `Module.to` swaps tensors' contents, which weak references to them forbid.
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or parameter.device.type != "cpu":
                continue
            moved = torch.nn.Parameter(parameter.detach().to("cuda"), parameter.requires_grad)
            # With core's attributes, but without a fake tensor's.
            for attribute in vars(parameter).keys() - vars(moved).keys() - _FAKE_ATTRIBUTES:
                if not attribute.startswith("_"):
                    setattr(moved, attribute, vars(parameter)[attribute])
            part._parameters[name] = moved
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                part._buffers[name] = buffer.to("cuda")
    return module
