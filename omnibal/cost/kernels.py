"""Kernels of a unit's passes; vectors have one entry per feature.

`omnibal.cost.device_rates.Device.ms` gives a kernel's time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from omnibal.model.config import Precision
from omnibal.model.rate_tables import ProductPass

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp8": 2}
FP32_BYTES = 4

# Kernels bound by memory; `accumulation` adds a micro-batch's gradients to the step's.
MovingKind = Literal["element_wise", "cast", "permutation", "loss", "accumulation"]
KernelKind = Literal[
    "product", "low_rank", "attention", "other_attention", MovingKind, "ring", "all_to_all"
]
"""`low_rank` is an adapter's product, `ring` tensor-parallel, `all_to_all` expert-parallel."""
# An input gradient runs if any earlier unit is trained, a weight gradient if its unit is, other
# backward kernels always; `repeated` is a recomputed forward.
KernelPass = Literal[ProductPass, "backward", "repeated"]
_ZERO = partial(np.zeros, ())
EXCHANGES: tuple[KernelKind, ...] = ("ring", "all_to_all")


def unit_vectors(features: Sequence[str]) -> dict[str, np.ndarray]:
    """Return unit vectors by feature, float64 [features] each."""
    return dict(zip(features, np.eye(len(features)), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One kernel, or several of one kind, in a pass of a unit on one device."""

    kind: KernelKind
    phase: KernelPass = "forward"
    rows: np.ndarray = field(default_factory=_ZERO)
    """Input rows of a product, summed over groups; queries of attention; [features]."""
    inner: float = 0.0
    outer: float = 0.0
    groups: int = 1  # products [inner, outer] in one kernel that share the rows evenly (experts)
    pairs: np.ndarray = field(default_factory=_ZERO)
    """Query-key pairs of attention, [features]; causal attention sees half of the square."""
    heads: float = 0.0
    elements: float = 0.0  # head size of q and k plus that of v
    causal: bool = False
    bytes: np.ndarray = field(default_factory=_ZERO)  # moved or sent by other kinds, [features]
    dtype: Literal["fp32", "fp8"] | None = None  # of a product if not the job's; casts are kernels
    launches: int = 1
    passes: int = 1  # ring passes of all launches; two in an all-reduce
    waits: int = 0  # times that the host waits for its result
    name: str = ""  # linear's name as in `omnibal.model.adapter_settings.linears`, or `GATHERED`
    given: str = ""  # `Kept.what` of its input
    modules: tuple[str, ...] = ()  # recomputable modules that it is part of (`RecomputedModule`)

    @property
    def weights(self) -> float:
        """Number of weights of a product, over all groups."""
        return self.inner * self.outer * self.groups

    @property
    def flops(self) -> np.ndarray:
        """FLOPs of a product or attention, without scores recomputed in backward, [features]."""
        of_pairs = 4 if self.phase == "backward" else 2  # gradients of both operands
        flops = self.rows * 2 * (self.inner * self.outer)
        return flops + self.pairs * of_pairs * (self.heads * self.elements)


Kernels = tuple[Kernel, ...]
# Name of a ring that gathers an operand of products, in their dtype.
GATHERED = "gathered input or gradient"


def in_module(module: str, kernels: Iterable[Kernel]) -> Kernels:
    """Return the kernels with `module` added to the modules that they are part of."""
    return tuple(replace(kernel, modules=(*kernel.modules, module)) for kernel in kernels)


def product(
    rows: np.ndarray,
    inner: float,
    outer: float,
    *,
    groups: int = 1,
    dtype: Literal["fp32"] | None = None,
    name: str = "",
    given: str = "",
) -> Kernels:
    """Return a linear's forward, input gradient and weight gradient; weights [inner, outer]."""
    sizes: dict[str, Any] = {"rows": rows, "inner": inner, "outer": outer, "groups": groups}
    forward = Kernel(kind="product", dtype=dtype, name=name, given=given, **sizes)
    return tuple(replace(forward, phase=phase) for phase in get_args(ProductPass))


def attention(
    pairs: np.ndarray,
    rows: np.ndarray,
    heads: float,
    elements: float,
    *,
    causal: bool = False,
    kind: Literal["attention", "other_attention"] = "attention",
) -> Kernels:
    """Return attention's forward and backward; `pairs` are query-key pairs (tokens if linear)."""
    forward = Kernel(
        kind=kind, pairs=pairs, rows=rows, heads=heads, elements=elements, causal=causal
    )
    return forward, replace(forward, phase="backward", launches=2)


def element_wise(
    forward_bytes: np.ndarray,
    backward_bytes: np.ndarray,
    launches: int = 1,
    kind: Literal["element_wise", "cast", "permutation", "loss"] = "element_wise",
) -> Kernels:
    """Return memory-bound forward and backward kernels; a backward has twice the launches."""
    return (
        Kernel(kind=kind, bytes=forward_bytes, launches=launches),
        Kernel(kind=kind, phase="backward", bytes=backward_bytes, launches=2 * launches),
    )
