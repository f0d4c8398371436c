"""Times of matrix products, attention and collectives of any size, from measurements.

Forward products on a full grid of rows, inner and outer sizes (`omnibal profile`) are interpolated:
time per operation is linear in logarithms, and constant beyond the grid; gradients use the forward
product of their sizes. Other tables use `omnibal.cost.scattered_rates`.

Costs are linear in features, so a product's time is fitted as a constant plus a time per row, with
minimum relative error; `tests/planner/test_shaped_rates.py` bounds the error.

Attention's time, per pass and head size, is a constant plus a rate of operations in full tiles of
`TILE` keys (half a tile per query is padding): s^2 + 128 s for a causal sample of s tokens. (A free
linear term fitted to the B200's backward with heads of 192 gives 127.) The fit is over all lengths
and head counts. If all samples have one length, it is scaled to the measurement at that length,
interpolated by logarithm. Unmeasured head sizes use the nearest measured size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal, Self

import numpy as np
from scipy.interpolate import RegularGridInterpolator
from scipy.optimize import nnls

from omnibal.cost.scattered_rates import PASSES, ProductShapes, ScatteredTimes, product_shapes
from omnibal.model.rate_tables import (
    AttentionTime,
    CollectiveKind,
    CollectiveTime,
    GroupedTime,
    Place,
    ProductPass,
    ProductTime,
)

# Ring passes per collective. A pass sends all shares of the tensor except one.
_RING_PASSES: dict[CollectiveKind, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
# Sizes at which a collective given by latency and rate is sampled.
_LINE_BYTES = (2.0**20, 2.0**23, 2.0**26, 2.0**29)
_ROWS = np.geomspace(512, 131_072, 9)  # micro-batch rows that a line is fitted over
TILE = 128  # keys (FlashAttention-2, arXiv 2307.08691, section 3.3, has blocks of 64 or 128)
AttentionPass = Literal["forward", "backward"]
# Pass, whether causal, and head size of q and k plus head size of v.
_AttentionKernel = tuple[AttentionPass, bool, int]
_SizeLike = float | np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearTime:
    """Time `fixed_ms + each_ms * x` of x bytes, rows or operations."""

    fixed_ms: float
    each_ms: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProductTimes:
    """Times of matrix products [rows, inner] x [inner, outer], one per group."""

    table: RegularGridInterpolator | ScatteredTimes
    """A grid has log time per operation by log rows, inner and outer sizes."""

    @property
    def accumulates(self) -> bool:
        """Whether measured weight-gradient products include accumulation."""
        return isinstance(self.table, ScatteredTimes)

    @classmethod
    def fit(cls, measured: Sequence[ProductTime], tflops: float | None = None) -> Self:
        """Fit measurements; `tflops` is the peak if they are shares of it."""
        times_ms = np.array([time.time_ms(tflops) for time in measured])
        sizes = [(time.rows, time.inner, time.outer) for time in measured]
        grid = list(product(*(sorted(set(axis)) for axis in zip(*sizes, strict=True))))
        if sorted(sizes) == grid and all(
            time.of == "forward" and not isinstance(time, GroupedTime) for time in measured
        ):
            points = np.array(sizes, np.float64)
            axes = [np.unique(axis) for axis in points.T]
            log_rates = np.log(times_ms / _flops(*points.T))[np.lexsort(points.T[::-1])]
            log_rates = log_rates.reshape([len(axis) for axis in axes])
            return cls(table=RegularGridInterpolator([*map(np.log, axes)], log_rates))
        return cls(table=ScatteredTimes.fit(product_shapes(measured), times_ms))

    def ms(
        self,
        phase: ProductPass,
        rows: _SizeLike,
        inner: _SizeLike,
        outer: _SizeLike,
        *,
        groups: _SizeLike = 1,
    ) -> np.ndarray:
        """Return product times of broadcast sizes; `rows` are per group."""
        if not isinstance(self.table, ScatteredTimes):
            forward = _AS_FORWARD[phase](rows, inner, outer)
            ends = np.array([axis[[0, -1]] for axis in self.table.grid]).T
            at = np.stack(np.broadcast_arrays(*map(np.log, forward)), axis=-1).clip(*ends)
            log_rates = self.table(at).reshape(at.shape[:-1])
            return np.exp(log_rates) * _flops(*forward) * groups
        sizes = np.stack(np.broadcast_arrays(rows, inner, outer, groups), axis=-1)
        shapes = ProductShapes(
            layer=np.log(sizes.reshape(-1, 4)),
            passes=np.full(sizes.size // 4, PASSES.index(phase)),
            gradient_bytes=np.array(4.0),  # Megatron accumulates weight gradients in fp32
        )
        return self.table.ms(shapes).reshape(sizes.shape[:-1])

    def line(self, phase: ProductPass, inner: float, outer: float, groups: int = 1) -> LinearTime:
        """Return a product's time as a line over rows, which `groups` share evenly."""
        return _fit_product_line(self, phase, inner, outer, groups)


@lru_cache(maxsize=4096)
def _fit_product_line(
    times: ProductTimes, phase: ProductPass, inner: float, outer: float, groups: int
) -> LinearTime:
    table = times.table
    rows = _ROWS if groups == 1 else groups * _ROWS / 16  # 32 to 8,192 per group
    if not isinstance(table, ScatteredTimes):
        rows = np.exp(table.grid[0])
    times_ms = times.ms(phase, rows / groups, inner, outer, groups=groups)
    # No row is cheaper than by the fastest rate.
    flops = 2 * inner * outer
    rates = times_ms / (rows * flops)
    fastest = rates if isinstance(table, ScatteredTimes) else np.exp(table.values)
    return fit_line(rows, times_ms, least_ms=float(fastest.min()) * flops)


# Sizes of the forward product equivalent to a pass.
_AS_FORWARD = {
    "forward": lambda rows, inner, outer: (rows, inner, outer),
    "input_gradient": lambda rows, inner, outer: (rows, outer, inner),
    "weight_gradient": lambda rows, inner, outer: (inner, rows, outer),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionTimes:
    """Times of attention kernels."""

    points: dict[_AttentionKernel, np.ndarray]  # [measured, 3]: operations, ms and tokens

    @classmethod
    def fit(cls, measured: Sequence[AttentionTime], tflops: float | None = None) -> Self:
        """Group measurements by kernel; `tflops` is the peak if they are shares of it."""
        kernels: dict[_AttentionKernel, list[tuple[float, float, int]]] = {}
        for time in measured:
            kernel = time.of, time.causal, time.head_size + time.value_size
            # A causal kernel does half of the counted square.
            keys = (time.tokens / 2 if time.causal else time.tokens) + TILE / 2
            point = (time.flops * keys / time.tokens, time.time_ms(tflops), time.tokens)
            kernels.setdefault(kernel, []).append(point)
        return cls(points={kernel: np.array(points) for kernel, points in kernels.items()})

    def line(
        self, phase: AttentionPass, elements: float, *, causal: bool, tokens: int | None = None
    ) -> LinearTime:
        """Return a line over operations in full tiles; backward has 2.5 times forward's.

        Args:
            elements: head size of q and k plus head size of v.
            tokens: of every sample if all are equal, else None.
        """
        nearest = min(
            self.points,
            key=lambda kernel: (
                kernel[0] != phase,
                kernel[1] != causal,
                abs(math.log(kernel[2] / elements)),
            ),
        )
        return _attention_line(self, nearest, tokens)


@lru_cache(maxsize=4096)
def _attention_line(
    times: AttentionTimes, kernel: _AttentionKernel, tokens: int | None
) -> LinearTime:
    flops, times_ms, measured_tokens = times.points[kernel].T
    line = fit_line(flops, times_ms)
    if tokens is None:
        return line
    lengths, index, counts = np.unique(measured_tokens, return_inverse=True, return_counts=True)
    errors = np.log(times_ms / (line.fixed_ms + line.each_ms * flops))
    mean_errors = np.bincount(index, errors) / counts
    off = math.exp(np.interp(math.log(tokens), np.log(lengths), mean_errors))
    return LinearTime(fixed_ms=line.fixed_ms * off, each_ms=line.each_ms * off)


def collective_line(
    measured: Sequence[CollectiveTime],
    ranks: int,
    place: Place = "node",
    kind: CollectiveKind | None = None,
) -> LinearTime | None:
    """Return latency per ring pass and time per sent byte of `kind` (None: any ring), or None."""
    wanted = (*_RING_PASSES, None) if kind in (*_RING_PASSES, None) else (kind,)
    times = [time for time in measured if time.kind in wanted and time.place == place]
    # Any ring replaces an unmeasured ring. On a CPU a reduction is slower than a gather.
    times = [time for time in times if time.kind == kind] or times
    if not times or ranks < 2:
        return None
    nearest = min({time.ranks for time in times}, key=lambda size: abs(math.log(size / ranks)))
    points: list[tuple[float, float, float]] = []  # passes, bytes sent per rank, ms
    for time in (time for time in times if time.ranks == nearest):
        passes = _RING_PASSES.get(time.kind, 1)
        share = 1.0 if time.kind == "send" else passes * (time.ranks - 1) / time.ranks
        if time.ms is not None:
            assert time.bytes is not None
            points.append((passes, time.bytes * share, time.ms))
            continue
        assert time.latency_us is not None and time.gb_per_s is not None
        latency_ms, bytes_per_ms = time.latency_us * 1e-3, time.gb_per_s * 1e6
        for sent in (size * share for size in _LINE_BYTES):
            points.append((passes, sent, latency_ms + sent / bytes_per_ms))
    all_passes, sent_bytes, times_ms = np.array(points).T
    return fit_line(sent_bytes, times_ms, passes=all_passes)


def fit_line(
    x: np.ndarray,
    times_ms: np.ndarray,
    *,
    least_ms: float | None = None,
    passes: np.ndarray | float = 1.0,
) -> LinearTime:
    """Fit a line of min relative error to times at `x`, with constant >= 0 and slope >= `least_ms`.

    Args:
        least_ms: by default half of the fastest time per `x`.
        passes: factor of the constant in each time.
    """
    if least_ms is None:  # among equal sizes, a constant alone would fit as well
        least_ms = float((times_ms / x).min()) / 2
    columns = np.stack(np.broadcast_arrays(passes, x), axis=1)
    fixed_ms, each_ms = weighted_nnls(columns, times_ms - least_ms * x, 1 / times_ms).tolist()
    return LinearTime(fixed_ms=fixed_ms, each_ms=each_ms + least_ms)


def weighted_nnls(features: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return coefficients >= 0, [features], of min weighted squared error over `values` [n]."""
    rows = features * weights[:, None]
    # Column scales differ by many orders of magnitude (1, squared tokens).
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    coefficients, _ = nnls(rows / scale, values * weights)
    return np.asarray(coefficients / scale)


def _flops(rows: _SizeLike, inner: _SizeLike, outer: _SizeLike) -> np.ndarray:
    return np.asarray(2.0 * rows * inner * outer)
