"""The process's device, and Megatron-core on machines without CUDA.

Megatron-core 0.16.1 calls CUDA even if it needs no device (`torch.cuda.current_device()`,
`device="cuda"`, type strings, random state). `prepare_megatron_core` redirects these calls to the
CPU if there is no CUDA device. It also repairs core on every device.

Shapes: R rows (tokens), I inputs and O outputs of a linear.
"""

import contextlib
import datetime
import functools
import queue
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

# Long enough for a first step, or a checkpoint on a slow disk; NCCL's default is 10 minutes. Dead
# ranks are found sooner, by `run/watch.py`.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)

_CPU = torch.device("cpu")
_TENSOR_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "zeros_like", "ones_like", "empty_like", "full_like"),
)


def has_cuda() -> bool:
    """Return whether training runs on CUDA with NCCL, otherwise on the CPU with gloo."""
    return torch.cuda.is_available()


def fuses_weight_gradients() -> bool:
    """Return whether GEMMs of weight gradients accumulate into core's fp32 buffers."""
    return has_cuda()


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else _CPU


@functools.cache
def prepare_megatron_core() -> None:
    """Redirect and repair Megatron-core in this process; call before making any of its objects."""
    if not has_cuda():
        _route_cuda_calls_to_cpu()
        _route_cuda_tensors_to_cpu()
        for owner, calls in random_state_calls():
            for name, call in calls.items():
                setattr(owner, name, call)
        _route_split_sizes_to_cpu()
        # Core compiles small fusions with Inductor: minutes of g++ on a CPU.
        torch._dynamo.config.disable = True
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe import moe_utils

    if not layers._grad_accum_fusion_available:  # Apex is not installed
        layers.fused_weight_gradient_mlp_cuda = WeightGradients
        layers._grad_accum_fusion_available = True

    # A thread's queue for saves: core's manager process takes 5 s per rank, and does not start in a
    # forked rank.
    filesystem_async._results_queue = queue.Queue()
    # Without Transformer Engine, core 0.16.1's router uses an undefined name.
    vars(moe_utils).setdefault("te_general_gemm", None)


def is_core_on_cpu() -> bool:
    """Return whether Megatron-core's CUDA calls are redirected to the CPU."""
    return torch.cuda.Stream is ImmediateStream


class ImmediateStream:
    """CUDA streams and events on the CPU: operations are complete on return."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record_event(self, *args: object) -> "ImmediateStream":
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def _do_nothing(self, *args: object) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = _do_nothing


def immediate_cuda_calls() -> dict[str, Any]:
    """Return replacements of functions of `torch.cuda` that wait or make streams."""
    # A new function per name: torch's compiler keys its rules by function object.
    waits = ("set_device", "synchronize", "empty_cache")
    calls: dict[str, Any] = {name: lambda *args, **kwargs: None for name in waits}
    for name in ("current_stream", "default_stream"):
        calls[name] = lambda *args, **kwargs: ImmediateStream()
    calls["stream"] = lambda stream=None: contextlib.nullcontext()
    return calls | {"Stream": ImmediateStream, "Event": ImmediateStream}


def _route_cuda_calls_to_cpu() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: _CPU  # core passes the result on as a device
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)
    for name, call in immediate_cuda_calls().items():
        setattr(cuda, name, call)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def call(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return call


def _route_cuda_tensors_to_cpu() -> None:
    # `with torch.device("meta")` compares factories with this cached set: fill it before patching.
    _device_constructors()
    for name in _TENSOR_FACTORIES:
        setattr(torch, name, _on_cpu(vars(torch)[name]))
    move, type_name = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(move)
    def to(self, *args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return move(self, *(_CPU if _is_cuda(arg) else arg for arg in args), **kwargs)

    @functools.wraps(type_name)
    def type_(self, *args, **kwargs):
        # Core's optimizers compare type strings with "torch.cuda.FloatTensor" and the like.
        result = type_name(self, *args, **kwargs)
        return result if args or kwargs else result.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.to, torch.Tensor.type = to, type_


def random_state_calls() -> list[tuple[Any, dict[str, Any]]]:
    """Return owners of CUDA's random state, with replacements by name: the CPU's generator."""
    from megatron.core.tensor_parallel import random as core_random

    def set_seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    @contextlib.contextmanager
    def fork(self: Any, name: str = core_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        # Core restores the "CUDA" state, and checks that the CPU state did not advance. Here both
        # are one generator, so only the tracked state may advance.
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)

    get_state = lambda *args, **kwargs: torch.get_rng_state()  # noqa: E731
    set_state = lambda state, *args, **kwargs: torch.set_rng_state(state)  # noqa: E731
    calls: dict[str, Any] = {"manual_seed": set_seed, "manual_seed_all": set_seed}
    calls |= {"get_rng_state": get_state, "set_rng_state": set_state}
    core_calls = {"_get_cuda_rng_state": get_state, "_set_cuda_rng_state": set_state}
    return [
        (torch.cuda, calls | {"default_generators": (torch.default_generator,)}),
        (torch.cuda.random, calls),
        (core_random, core_calls),
        (core_random.CudaRNGStatesTracker, {"fork": fork}),
    ]


def _route_split_sizes_to_cpu() -> None:
    """Convert all-to-all split sizes to numpy: torch rejects tensors, and core copies from CUDA."""
    from megatron.core.transformer.moe import token_dispatcher

    move = token_dispatcher.maybe_move_tensor_to_cpu

    def move_to_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and tensor.device == _CPU:
            return tensor.numpy()
        return move(tensor, as_numpy=as_numpy, record_stream=record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move_to_numbers


class WeightGradients:
    """GEMMs that accumulate weight gradients in a buffer, under Apex's names.

    Without them, core needs 12 more bytes of traffic per weight and micro-batch.
    """

    @staticmethod
    def wgrad_gemm_accum_fp32(
        input_RI: torch.Tensor, gradient_RO: torch.Tensor, buffer_OI: torch.Tensor
    ) -> None:
        """Add gradient^T @ input to a float32 buffer, accumulating in float32."""
        if buffer_OI.is_cuda:
            torch.addmm(
                buffer_OI, gradient_RO.t(), input_RI, out_dtype=torch.float32, out=buffer_OI
            )
        else:
            buffer_OI.addmm_(gradient_RO.t().float(), input_RI.float())
