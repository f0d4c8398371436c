"""Device rates and counts of one unit's forward; vectors have one entry per feature."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from omnibal.cost.attention_rates import AttentionTimes
from omnibal.cost.shaped_rates import ProductTimes
from omnibal.model.config import Precision
from omnibal.model.fp8 import Fp8
from omnibal.model.runtime import OWN_RUNTIME, RuntimeOptions

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp8": 2}
FP32_BYTES = 4  # bytes of a number


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Names of the features that counts are linear in."""

    names: tuple[str, ...]

    def one(self, name: str) -> np.ndarray:
        """Unit vector of a feature, [features]."""
        vector = np.zeros(len(self.names))
        vector[self.names.index(name)] = 1.0
        return vector

    @property
    def none(self) -> np.ndarray:
        """Vector of zeros, [features]."""
        return np.zeros(len(self.names))


@dataclass(frozen=True, slots=True)
class Product:
    """Forward matrix product: inputs [rows, inner] and weights [inner, outer]."""

    rows: np.ndarray
    """Rows per feature, [features]."""
    inner: float
    outer: float
    groups: int = 1
    """Products of this size in one grouped kernel that share the rows evenly (experts)."""
    is_fp32: bool = False
    """Whether it is always in fp32 (routers)."""
    is_fp8: bool = False
    """Whether it is in FP8, including the casts of both operands."""
    name: str = ""
    """Linear's name as in `omnibal.model.adapters.linears`, if it has one."""
    given: str = ""
    """Name of the `Kept` line that is its input."""

    @property
    def flops(self) -> np.ndarray:
        """Operations, [features]."""
        return self.rows * 2 * (self.inner * self.outer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attended:
    """Forward softmax attention in one kernel; vectors are [features]."""

    pairs: np.ndarray
    """Visible query-key pairs; causal attention sees half of the square."""
    rows: np.ndarray
    """Queries."""
    heads: float
    elements: float
    """Elements per head of q and k, and of v."""
    causal: bool

    @property
    def flops(self) -> np.ndarray:
        """Operations, [features]."""
        return self.pairs * 2 * (self.heads * self.elements)


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Rates of one device and its tensor-parallel division."""

    flops_per_ms: float
    """Rate of attention, and of matrix products without measured times."""
    fp32_flops_per_ms: float
    """Rate of products in fp32."""
    fp8: Fp8 | None = None
    """FP8 options, or None if no product is in FP8."""
    fp8_flops_per_ms: float = 0.0
    """Rate of FP8 products."""
    product_times: ProductTimes | None
    """Measured matrix product times by shape, if available."""
    grouped_times: ProductTimes | None = None
    """Measured grouped product times by shape, if available."""
    attention_times: AttentionTimes | None = None
    """Measured attention times, if available."""
    bytes_per_ms: float
    """Rate of element-wise kernels."""
    streamed_bytes_per_ms: float
    """Rate of contiguous reads and writes of weights and gradients."""
    collective_bytes_per_ms: float
    """Rate of bytes a rank sends in tensor-parallel collectives."""
    pass_ms: float
    """Measured latency of one ring pass of a collective, or 0 if not measured."""
    kernel_ms: float
    expert_bytes_per_ms: float = math.inf
    """Rate per rank of an expert-parallel all-to-all, over all routed bytes."""
    expert_pass_ms: float = 0.0
    """Latency of an expert-parallel all-to-all."""
    tensor: int
    sequence_parallel: bool
    """Whether the language model uses Megatron's sequence parallelism."""
    element_bytes: int
    runtime: RuntimeOptions = OWN_RUNTIME
    loss_slowdown: float = 1.0
    """Time per byte of loss kernels relative to other element-wise kernels."""
    permute_slowdown: float = 1.0
    """Time per byte of permutation kernels relative to other element-wise kernels."""
    expert: int = 1
    """Expert-parallel size."""

    @property
    def whole(self) -> float:
        """Share of language tensors between parallel blocks that a rank holds."""
        return 1 / self.tensor if self.sequence_parallel else 1.0

    @property
    def sent(self) -> float:
        """Share of a tensor a rank sends in a ring all-gather or reduce-scatter."""
        return (self.tensor - 1) / self.tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """One line of the activations kept from forward to backward."""

    what: str
    made_by: str
    """Megatron-core name of the producing module, or the fused operation, empty for unit inputs."""
    bytes: np.ndarray
    """Bytes on one device, [features]."""
    for_weights: bool = False
    """Whether only weight gradients need it, so that a frozen unit frees it."""


@dataclass(frozen=True, slots=True)
class Working:
    """Working memory at a moment of backward, without kept activations."""

    bytes: np.ndarray
    """Bytes of the micro-batch's tensors, [features]."""
    weight: float = 0
    """Elements of the weight gradient computed then; core allocates it in the weight's dtype."""
    gone: tuple[str, ...] = ()
    """Names of kept lines freed by then."""
    after: int = 0
    """Last products with output gradients freed by then, unless weights are deferred."""
    of_words: bool = False
    """Whether the weight is an embedding's, not a product's."""
    beside_logits: bool = False
    """Whether an unfused loss writes a gradient next to the logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """Bytes a rank sends in collectives of a unit, [features], 0.0 for none."""

    forward_bytes: np.ndarray | float = 0.0
    backward_bytes: np.ndarray | float = 0.0
    again_bytes: np.ndarray | float = 0.0
    """Extra backward bytes to gather inputs again for trained weights."""
    passes: int = 0
    """Forward all-gathers and reduce-scatters; two per all-reduce."""
    back_passes: int = 0
    passes_again: int = 0
    gathered_bytes: np.ndarray | float = 0.0
    """Widest gathered input; core has one such buffer per stage."""
    exchanged_bytes: np.ndarray | float = 0.0
    """Bytes of expert-parallel exchange in forward, and again in backward."""
    exchanges: int = 0
    """Forward all-to-alls between expert-parallel ranks."""
    back_exchanges: int = 0

    def __add__(self, other: "Collectives") -> "Collectives":
        names = [field.name for field in fields(self)]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        widest = np.maximum(self.gathered_bytes, other.gathered_bytes)
        return Collectives(**sums | {"gathered_bytes": widest})


def all_reduced(
    device: Device, forward_bytes: np.ndarray, backward_bytes: np.ndarray, times: int = 1
) -> Collectives:
    """Return `times` all-reduces per direction, each a reduce-scatter and an all-gather."""
    return Collectives(
        forward_bytes=2 * times * device.sent * forward_bytes,
        backward_bytes=2 * times * device.sent * backward_bytes,
        passes=2 * times,
        back_passes=2 * times,
    )


FIRST_OUTPUT, SECOND_OUTPUT = "first norm's output", "second norm's output"
"""Kept lines of a layer: inputs of its two blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Forward operations and bytes on one device; vectors are [features]."""

    products: tuple[Product, ...]
    attended: tuple[Attended, ...] = ()
    """Softmax attention."""
    other_attention_flops: np.ndarray | float = 0.0
    """Operations of non-softmax attention."""
    moved_bytes: np.ndarray
    """Bytes that element-wise kernels of forward read and write."""
    back_moved_bytes: np.ndarray
    """Bytes that element-wise kernels of backward read and write."""
    collectives: Collectives = Collectives()
    kernels: int
    kept: tuple[Kept, ...]
    """Activations kept if the unit has a backward, including its input."""
    working: tuple[Working, ...] = ()
    """Moments of backward. A block's exclude activations freed by later blocks."""
    expert_parameters: int = 0
    """Expert parameters on this device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block(Work):
    """Attention or feed-forward of a language layer, between norm and residual."""

    divided_parameters: int
    """Parameters divided by tensor parallelism, before division."""
    whole_parameters: int = 0
    """Parameters replicated on tensor-parallel ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts(Work):
    """Counts of one unit; parameters include experts."""

    boundary_bytes: np.ndarray
    output_bytes: np.ndarray
    late_working: tuple[Working, ...] = ()
    """Extra moments with deferred weight gradients, with their inputs still held."""
    forward_working: tuple[Working, ...] = ()
    """Moments of forward if the unit has no backward."""
    passing_bytes: np.ndarray | float = 0.0
    """Memory held during the forward of the micro-batch and not kept."""
    parameters: int
    adapter_parameters: int = 0
    """Adapter parameters, part of `parameters`: all trained parameters of the unit."""
    begins_with_weights: bool = False
    """Whether the unit needs no input gradient unless an earlier unit is trained."""

    @property
    def attention_flops(self) -> np.ndarray:
        """Operations of all attention, [features]."""
        softmax = np.sum([0 * self.moved_bytes, *(one.flops for one in self.attended)], axis=0)
        return softmax + self.other_attention_flops

    @property
    def matmul_flops(self) -> np.ndarray:
        """Operations of all matrix products, [features]."""
        return np.sum([0 * self.moved_bytes, *(one.flops for one in self.products)], axis=0)

    def kept_lines(self, *, trained: bool) -> tuple[Kept, ...]:
        """Kept activations; frozen units drop inputs of weight gradients."""
        return tuple(line for line in self.kept if trained or not line.for_weights)

    def working_bytes(self, each: Working, *, trained: bool) -> np.ndarray:
        """Working memory at a moment, without the weight's gradient, [features]."""
        gone = [line.bytes for line in self.kept_lines(trained=trained) if line.what in each.gone]
        return each.bytes - np.sum([0 * each.bytes, *gone], axis=0)

    def kept_bytes(self, *, trained: bool) -> np.ndarray:
        """Bytes of kept activations, [features]."""
        lines = self.kept_lines(trained=trained)
        return np.sum([0 * self.moved_bytes, *(line.bytes for line in lines)], axis=0)


def one_after_another(units: Sequence[tuple[str, Counts]]) -> Counts:
    """Combine counts of units that run in sequence, with backward from the last.

    Args:
        units: a prefix of the names of kept activations, and the unit's counts.
    """
    kept: list[Kept] = []
    working: list[Working] = []
    counts = [unit for _, unit in units]
    for place, (prefix, unit) in enumerate(units):
        later = units[place + 1 :]
        later_kept = [f"{name}{line.what}" for name, other in later for line in other.kept]
        later_products = sum(len(other.products) for _, other in later)
        kept += [replace(line, what=f"{prefix}{line.what}") for line in unit.kept]
        for moment in unit.working:
            gone = (*later_kept, *(f"{prefix}{what}" for what in moment.gone))
            working.append(replace(moment, gone=gone, after=moment.after + later_products))
    return replace(
        counts[-1],
        products=tuple(
            replace(product, given=f"{prefix}{product.given}" if product.given else "")
            for prefix, unit in units
            for product in unit.products
        ),
        attended=tuple(one for unit in counts for one in unit.attended),
        other_attention_flops=sum(unit.other_attention_flops for unit in counts),
        moved_bytes=np.sum([unit.moved_bytes for unit in counts], axis=0),
        back_moved_bytes=np.sum([unit.back_moved_bytes for unit in counts], axis=0),
        collectives=sum((unit.collectives for unit in counts), Collectives()),
        kernels=sum(unit.kernels for unit in counts),
        kept=tuple(kept),
        boundary_bytes=counts[0].boundary_bytes,
        working=tuple(working),
        parameters=sum(unit.parameters for unit in counts),
        expert_parameters=sum(unit.expert_parameters for unit in counts),
    )


def whole_inputs(device: Device, block_bytes: np.ndarray) -> Collectives:
    """Collectives of a block, given the bytes of its unsharded input and output.

    Gathered and scattered in both directions, or all-reduced (Korthikanti et al. 2022, arXiv
    2205.05198, section 4.2.2). Inputs of FP8 products are gathered in FP8.
    """
    sequence, sent_bytes = device.sequence_parallel, device.sent * block_bytes
    gathered_bytes = sent_bytes / 2 if sequence and device.fp8 is not None else sent_bytes
    return Collectives(
        forward_bytes=sent_bytes + gathered_bytes,
        backward_bytes=sent_bytes + gathered_bytes,
        again_bytes=gathered_bytes if sequence else 0.0,
        passes=2,
        back_passes=2,
        passes_again=1 if sequence else 0,
        gathered_bytes=block_bytes if sequence else 0.0,
    )
