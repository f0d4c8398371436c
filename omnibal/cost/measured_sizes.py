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
_STEP = 4  # largest ratio of neighbouring sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSizes:
    """Sizes of matrix products (all combinations are measured) and of collectives."""

    rows: tuple[int, ...]
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    collective_bytes: tuple[int, ...]


def measured_sizes(
    model: ModelConfig, cluster: ClusterConfig, caps: Caps, precision: Precision
) -> MeasuredSizes:
    """Sizes spanning the model's linears at tensor sizes 1 to 8, at the caps and an eighth of them.

    Without the head's vocabulary (largest, few), fp32 routers, and memory-bound gates.
    """
    every = _rank_products(model, cluster)
    products = [product for product in every if product.dtype != "fp32" and product.outer > 1]
    names = feature_names(model)
    at_caps = np.array([float(caps.get(name) or caps["tokens"]) for name in names])
    rows = [float(product.rows @ at_caps) for product in products]
    tensor_bytes = caps["tokens"] * model.language.hidden_size * ELEMENT_BYTES[precision]
    return MeasuredSizes(
        rows=_span_sizes(rows, _SMALL_BATCH),
        inner=_span_sizes(product.inner for product in products),
        outer=_span_sizes(product.outer for product in products),
        # Every rank's share has complete elements.
        collective_bytes=(
            _divisible_bytes(tensor_bytes * _SMALL_TENSOR),
            _divisible_bytes(tensor_bytes),
        ),
    )


def _rank_products(model: ModelConfig, cluster: ClusterConfig) -> Iterable[Kernel]:
    """Products of one rank, for every tensor-parallel size the model allows."""
    for tensor in _TENSOR_SIZES:
        # Tensor parallelism of experts requires sequence parallelism.
        in_sequence = tensor > 1 and bool(expert_counts(model))
        parallel = Parallel(tensor=tensor, pipeline=1, sequence_parallel=in_sequence)
        wide = cluster.model_copy(update={"gpus_per_node": max(_TENSOR_SIZES)})
        try:
            check_parallel(model, parallel, wide)
        except UserError:
            continue
        yield from layer_products(model, parallel)


def _span_sizes(values: Iterable[float], smallest_share: float = 1.0) -> tuple[int, ...]:
    """Sizes from min to max, each at most `_STEP` times its predecessor."""
    sizes = sorted(value for value in values if value >= 1)
    least, most = max(sizes[0] * smallest_share, 1), sizes[-1]
    count = math.ceil(math.log(most / least, _STEP) - 1e-9) + 1 if most > least else 1
    return tuple(sorted({_round_size(size) for size in np.geomspace(least, most, count)}))


def _round_size(size: float) -> int:
    """Nearby size that kernels are tuned for."""
    multiple = 64 if size >= 512 else 8 if size >= 32 else 1
    return max(round(size / multiple) * multiple, 1)


def _divisible_bytes(size: float) -> int:
    """Nearby number of bytes that up to 8 ranks and any dtype divide evenly."""
    multiple = 4 * math.lcm(*range(1, 9))
    return max(round(size / multiple), 1) * multiple
