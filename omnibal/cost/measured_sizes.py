"""Sizes of matrix products and collectives to measure for a model."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from omnibal.base.errors import UserError
from omnibal.cost.analytic import layer_products
from omnibal.cost.kernels import ELEMENT_BYTES, Kernel
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel, check_parallel, expert_counts
from omnibal.model.units import feature_names

_TENSOR_SIZES = (1, 2, 4, 8)  # within a node of eight devices
_SMALL_BATCH = 1 / 8  # smallest micro-batch, as a share of the caps
_SMALL_TENSOR = 1 / 16  # small collective tensor, as a share of a full pack's hidden states
_MAX_RATIO = 4  # of neighbouring sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSizes:
    """Sizes of matrix products (all combinations are measured) and of collectives."""

    rows: tuple[int, ...]  # of the input, such as tokens
    inner: tuple[int, ...]  # input features per row
    outer: tuple[int, ...]  # output features per row
    collective_bytes: tuple[int, ...]


def measured_sizes(
    model: ModelConfig, cluster: ClusterConfig, caps: Caps, precision: Precision
) -> MeasuredSizes:
    """Return sizes spanning the model's linears at tensor sizes 1 to 8, and up to the caps."""
    products = list[Kernel]()
    for tensor in _TENSOR_SIZES:
        # Tensor parallelism of experts requires sequence parallelism.
        in_sequence = tensor > 1 and bool(expert_counts(model))
        parallel = Parallel(tensor=tensor, pipeline=1, sequence_parallel=in_sequence)
        wide = cluster.model_copy(update={"gpus_per_node": max(_TENSOR_SIZES)})
        try:
            check_parallel(model, parallel, wide)
        except UserError:  # the model does not allow this size
            continue
        products += layer_products(model, parallel)
    # Without fp32 routers and memory-bound gates.
    products = [product for product in products if product.dtype != "fp32" and product.outer > 1]
    names = feature_names(model)
    at_caps = np.array([float(caps.get(name) or caps["tokens"]) for name in names])
    rows = [float(product.rows @ at_caps) for product in products]
    tensor_bytes = caps["tokens"] * model.language.hidden_size * ELEMENT_BYTES[precision]
    return MeasuredSizes(
        rows=_span_sizes(rows, _SMALL_BATCH),
        inner=_span_sizes(product.inner for product in products),
        outer=_span_sizes(product.outer for product in products),
        collective_bytes=(
            _divisible_bytes(tensor_bytes * _SMALL_TENSOR),
            _divisible_bytes(tensor_bytes),
        ),
    )


def _span_sizes(values: Iterable[float], smallest_share: float = 1.0) -> tuple[int, ...]:
    """Return sizes from min x `smallest_share` to max, in ratios up to `_MAX_RATIO`, rounded."""
    sizes = sorted(value for value in values if value >= 1)
    low, high = max(sizes[0] * smallest_share, 1), sizes[-1]
    count = math.ceil(math.log(high / low, _MAX_RATIO) - 1e-9) + 1 if high > low else 1
    spaced = np.geomspace(low, high, count).tolist()
    # Kernels are tuned for multiples of powers of two.
    multiples = [64 if size >= 512 else 8 if size >= 32 else 1 for size in spaced]
    pairs = zip(spaced, multiples, strict=True)
    return tuple(sorted({max(round(size / n) * n, 1) for size, n in pairs}))


def _divisible_bytes(size: float) -> int:
    """Return a nearby number of bytes that up to 8 ranks and any dtype divide evenly."""
    multiple = 4 * math.lcm(*range(1, 9))
    return max(round(size / multiple), 1) * multiple
