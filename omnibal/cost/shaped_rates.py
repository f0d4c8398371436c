"""Times of matrix products, attention and collectives of any size, from measurements.

If forward products were measured on a full grid of rows, inner and outer sizes (`omnibal profile`),
time per operation is interpolated linearly in logarithms, constant beyond the grid; gradients use
the forward of their sizes. Other tables use `omnibal.cost.scattered_rates`.

Costs are linear in features, so a product's time is fitted as a constant and a time per row, with
minimum relative error over the grid's rows or `_ROWS`; `tests/planner/test_shaped_rates.py` bounds
the error.

Attention's time, per pass and head size, is a constant plus a rate of operations in full tiles of
`TILE` keys (half a tile per query is padding), i.e. s^2 + 128 s for a causal sample of s tokens. (A
free linear term fitted to the B200's backward with heads of 192 gives 127.) The fit is over all
lengths and head counts. If all samples have one length, it is scaled to the measurement at that
length, interpolated by logarithm. Unmeasured head sizes use the nearest measured size.
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
    Pass,
    Place,
    ProductTime,
)

_RING_PASSES: dict[CollectiveKind, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Ring passes per collective. A pass sends all shares of the tensor except one."""
_LINE_BYTES = (2.0**20, 2.0**23, 2.0**26, 2.0**29)
"""Sizes to sample a collective that is given as a line."""
_ROWS = np.geomspace(512, 131_072, 9)  # micro-batch rows that a line is fitted over
TILE = 128
"""Keys of a tile (FlashAttention-2, arXiv 2307.08691, section 3.3, has blocks of 64 or 128)."""
AttentionPass = Literal["forward", "backward"]
_AttentionKernel = tuple[AttentionPass, bool, int]
"""Kernel of attention: pass, whether causal, elements of q and k per head, and of v."""

_SizeLike = float | np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearTime:
    """A time that is a constant plus a rate."""

    fixed_ms: float
    each_ms: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProductTimes:
    """Matrix product times by rows, inner and outer sizes, and groups."""

    table: RegularGridInterpolator | ScatteredTimes
    """A grid has log time per operation by log rows, inner and outer sizes."""

    @property
    def accumulates(self) -> bool:
        """Whether measured weight-gradient products include accumulation."""
        return isinstance(self.table, ScatteredTimes)

    @classmethod
    def fit(cls, measured: Sequence[ProductTime], tflops: float | None = None) -> Self:
        """Fit measurements with shares of `tflops`."""
        times_ms = np.array([one.time_ms(tflops) for one in measured])
        if _are_grid(measured):
            points = np.array([(one.rows, one.inner, one.outer) for one in measured], np.float64)
            axes = [np.unique(axis) for axis in points.T]
            log_rates = np.log(times_ms / _flops(*points.T))[np.lexsort(points.T[::-1])]
            log_rates = log_rates.reshape([len(axis) for axis in axes])
            return cls(table=RegularGridInterpolator([*map(np.log, axes)], log_rates))
        return cls(table=ScatteredTimes.fit(product_shapes(measured), times_ms))

    def ms(
        self,
        phase: Pass,
        rows: _SizeLike,
        inner: _SizeLike,
        outer: _SizeLike,
        *,
        groups: _SizeLike = 1,
    ) -> np.ndarray:
        """Product times with broadcast sizes; `rows` are per group."""
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

    def line(self, phase: Pass, inner: float, outer: float, groups: int = 1) -> LinearTime:
        """Time of a layer's pass by input rows, shared evenly by `groups`."""
        return _fit_product_line(self, phase, inner, outer, groups)


@lru_cache(maxsize=4096)
def _fit_product_line(
    times: ProductTimes, phase: Pass, inner: float, outer: float, groups: int
) -> LinearTime:
    table = times.table
    rows = _ROWS if groups == 1 else groups * _ROWS / 16  # rows per group
    if not isinstance(table, ScatteredTimes):
        rows = np.exp(table.grid[0])
    times_ms = times.ms(phase, rows / groups, inner, outer, groups=groups)
    # The slope is bounded by the fastest rate.
    flops = 2 * inner * outer
    rates = times_ms / (rows * flops)
    fastest = rates if isinstance(table, ScatteredTimes) else np.exp(table.values)
    return fit_line(rows, times_ms, least_ms=float(fastest.min()) * flops)


def _are_grid(measured: Sequence[ProductTime]) -> bool:
    """Whether these are forward products on a full grid."""
    sizes = [(one.rows, one.inner, one.outer) for one in measured]
    wanted = list(product(*(sorted(set(axis)) for axis in zip(*sizes, strict=True))))
    return sorted(sizes) == wanted and all(
        one.of == "forward" and not isinstance(one, GroupedTime) for one in measured
    )


# Sizes of the forward product equivalent to a pass.
_AS_FORWARD = {
    "forward": lambda rows, inner, outer: (rows, inner, outer),
    "input_gradient": lambda rows, inner, outer: (rows, outer, inner),
    "weight_gradient": lambda rows, inner, outer: (inner, rows, outer),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionTimes:
    """Times of attention kernels."""

    points: dict[_AttentionKernel, np.ndarray]
    """Operations in full tiles, time and length of every measurement, [measured, 3]."""

    @classmethod
    def fit(cls, measured: Sequence[AttentionTime], tflops: float | None = None) -> Self:
        """Take measurements with shares of `tflops`."""
        kernels: dict[_AttentionKernel, list[tuple[float, float, int]]] = {}
        for one in measured:
            kernel = one.of, one.causal, one.head_size + one.value_size
            # A causal kernel does half of the counted square.
            pairs = (one.tokens / 2 if one.causal else one.tokens) + TILE / 2
            point = (one.flops * pairs / one.tokens, one.time_ms(tflops), one.tokens)
            kernels.setdefault(kernel, []).append(point)
        return cls(points={kernel: np.array(points) for kernel, points in kernels.items()})

    def line(
        self, phase: AttentionPass, elements: float, *, causal: bool, tokens: int | None = None
    ) -> LinearTime:
        """Kernel time by operations in full tiles; backward has 2.5 times forward's.

        Args:
            elements: of q and k per head, and of v.
            tokens: of every sample if all are equal, else None.
        """
        nearest = min(
            self.points,
            key=lambda one: (one[0] != phase, one[1] != causal, abs(math.log(one[2] / elements))),
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
    """Latency of a ring pass, an all-to-all or a send, and time per byte sent, None if unmeasured.

    Uses the nearest measured group size. The slope is at least half the fastest time per byte.
    `kind`: of the collective, None for any ring. A ring of this kind is preferred to others if
    measured (a CPU's reduction is slower than a gather).
    """
    wanted = (*_RING_PASSES, None) if kind in (*_RING_PASSES, None) else (kind,)
    found = [one for one in measured if one.kind in wanted and one.place == place]
    found = [one for one in found if one.kind == kind] or found
    if not found or ranks < 2:
        return None
    nearest = min({one.ranks for one in found}, key=lambda size: abs(math.log(size / ranks)))
    points = [point for one in found if one.ranks == nearest for point in _collective_points(one)]
    passes, sent_bytes, times_ms = np.array(points).T
    return fit_line(sent_bytes, times_ms, passes=passes)


def _collective_points(one: CollectiveTime) -> list[tuple[float, float, float]]:
    """Passes, bytes sent per rank, and ms: as measured, or sampled from a line."""
    passes = _RING_PASSES.get(one.kind, 1)
    share = 1.0 if one.kind == "send" else passes * (one.ranks - 1) / one.ranks
    if one.ms is not None:
        assert one.bytes is not None
        return [(passes, one.bytes * share, one.ms)]
    assert one.latency_us is not None and one.gb_per_s is not None
    return [
        (passes, size * share, one.latency_us * 1e-3 + size * share / (one.gb_per_s * 1e6))
        for size in _LINE_BYTES
    ]


def fit_line(
    x: np.ndarray,
    times_ms: np.ndarray,
    *,
    least_ms: float | None = None,
    passes: np.ndarray | float = 1.0,
) -> LinearTime:
    """Non-negative line of least relative error through times at `x`, with slope >= `least_ms`.

    Args:
        least_ms: None for half of the fastest rate, as with equal sizes a fit may find them free.
        passes: how often each time has the constant.
    """
    if least_ms is None:
        least_ms = float((times_ms / x).min()) / 2
    columns = np.stack(np.broadcast_arrays(passes, x), axis=1)
    found = weighted_nnls(columns, times_ms - least_ms * x, 1 / times_ms)
    return LinearTime(fixed_ms=float(found[0]), each_ms=float(found[1]) + least_ms)


def weighted_nnls(features: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Coefficients >= 0, [features], of least weighted squared error over [n] values."""
    rows = features * weights[:, None]
    # Column scales differ by many orders of magnitude (1, squared tokens).
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    coefficients, _ = nnls(rows / scale, values * weights)
    return np.asarray(coefficients / scale)


def _flops(rows: _SizeLike, inner: _SizeLike, outer: _SizeLike) -> np.ndarray:
    return np.asarray(2.0 * rows * inner * outer)
