"""Times of matrix products and collectives of any size, from those that were measured.

Where products were measured of every combination of some rows, inner and outer sizes, forward alone
(as `omnibal profile` measures them), a product's time per operation is interpolated between
measured sizes, linearly in the logarithms of time and sizes; gradients have the time of a forward
of their sizes. So it is exact at measured sizes, never less than the least that was measured, and
rises and falls as the measured ones do. Beyond the measured sizes it is that of the nearest. All
other tables are read by `omnibal.cost.scattered_rates`.

Costs are linear in a micro-batch's features, so the time of a product is a constant and a time per
row, fitted by least relative error over numbers of rows: those that were measured of a grid, and
`_ROWS` otherwise. Small micro-batches pay the constant too. How far that is from single products is
what `tests/planner/test_shaped_rates.py` holds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Self

import numpy as np
from scipy.optimize import nnls

from omnibal.cost.scattered_rates import ScatteredTimes, Shapes, shapes_of
from omnibal.model.rates import (
    CollectiveKind,
    CollectiveTime,
    GroupedTime,
    Pass,
    Place,
    ProductTime,
    RingKind,
)

_PASSES: dict[CollectiveKind, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Passes round a ring; in each a rank sends every share of the tensor but one."""
_LINE_BYTES = (2.0**20, 2.0**23, 2.0**26, 2.0**29)
"""Sizes at which a collective that is given as a line counts beside measured ones."""
_ROWS = np.geomspace(512, 131_072, 9)
"""Rows of micro-batches, over which a line is fitted."""


_Size = float | np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A time that is a constant and so much for each of something."""

    fixed_ms: float
    each_ms: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Grid:
    """Times of products [rows, inner] by [inner, outer] of every combination of some sizes."""

    sizes: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Measured rows, inner and outer sizes, ascending."""
    ms_per_flop: np.ndarray
    """[rows, inner, outer]"""

    @classmethod
    def of(cls, measured: Sequence[ProductTime], times_ms: np.ndarray) -> Self:
        """Table of measurements that `_are_grid`."""
        points = np.array([(one.rows, one.inner, one.outer) for one in measured], np.float64)
        order = np.lexsort(points.T[::-1])
        rows, inner, outer = (np.unique(axis) for axis in points.T)
        rates = (times_ms / _flops(*points.T))[order]
        return cls(
            sizes=(rows, inner, outer),
            ms_per_flop=rates.reshape(len(rows), len(inner), len(outer)),
        )

    def ms(self, rows: _Size, inner: _Size, outer: _Size) -> np.ndarray:
        """Interpolated times of products of these sizes, of the shape that they broadcast to."""
        sides = [
            _sides(axis, np.asarray(size))
            for axis, size in zip(self.sizes, (rows, inner, outer), strict=True)
        ]
        log_rates, log_rate = np.log(self.ms_per_flop), np.zeros(())
        for (m, m_share), (k, k_share), (n, n_share) in product(*sides):
            log_rate = log_rate + m_share * k_share * n_share * log_rates[m, k, n]
        return np.exp(log_rate) * _flops(rows, inner, outer)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProductTimes:
    """Times of matrix products of layers of so many rows, inner and outer sizes, and of groups."""

    table: _Grid | ScatteredTimes

    @property
    def accumulates(self) -> bool:
        """Whether a product of weights' gradients adds them to what is there in the same kernel."""
        return not isinstance(self.table, _Grid)

    @classmethod
    def of(cls, measured: Sequence[ProductTime], tflops: float | None = None) -> Self:
        """Times from measurements, whose shares are of `tflops`."""
        times_ms = np.array([one.time_ms(tflops) for one in measured])
        if _are_grid(measured):
            return cls(table=_Grid.of(measured, times_ms))
        return cls(table=ScatteredTimes.of(shapes_of(measured), times_ms))

    def ms(
        self, of: Pass, rows: _Size, inner: _Size, outer: _Size, *, groups: _Size = 1
    ) -> np.ndarray:
        """Times of products of these sizes, of the shape that they broadcast to; `rows` are of
        each group."""
        if isinstance(self.table, _Grid):
            return self.table.ms(*_AS_FORWARD[of](rows, inner, outer)) * groups
        sizes = [np.atleast_1d(size) for size in np.broadcast_arrays(rows, inner, outer, groups)]
        # Megatron accumulates gradients of weights in fp32.
        shapes = Shapes.of([of], np.array([4.0]), *(size.ravel() for size in sizes))
        return self.table.ms(shapes).reshape(np.shape(sizes[0]))

    def line(self, of: Pass, inner: float, outer: float, groups: int = 1) -> Line:
        """Time of a pass of a layer by rows of its input, which `groups` share evenly."""
        return _line(self, of, inner, outer, groups)


@lru_cache(maxsize=4096)
def _line(times: ProductTimes, of: Pass, inner: float, outer: float, groups: int) -> Line:
    table = times.table
    rows = _ROWS if groups == 1 else groups * _ROWS / 16  # of groups that share them
    if isinstance(table, _Grid):
        rows = table.sizes[0]
    times_ms = times.ms(of, rows / groups, inner, outer, groups=groups)
    # A slope below the fastest rate would promise what no product reached.
    flops = 2 * inner * outer
    fastest = table.ms_per_flop if isinstance(table, _Grid) else times_ms / (rows * flops)
    return fitted_line(rows, times_ms, 1 / times_ms, least_ms=float(fastest.min()) * flops)


def _are_grid(measured: Sequence[ProductTime]) -> bool:
    """Whether they are forward products of every combination of their sizes."""
    sizes = [(one.rows, one.inner, one.outer) for one in measured]
    wanted = list(product(*(sorted(set(axis)) for axis in zip(*sizes, strict=True))))
    return sorted(sizes) == wanted and all(
        one.of == "forward" and not isinstance(one, GroupedTime) for one in measured
    )


_AS_FORWARD = {
    "forward": lambda rows, inner, outer: (rows, inner, outer),
    "input_gradient": lambda rows, inner, outer: (rows, outer, inner),
    "weight_gradient": lambda rows, inner, outer: (inner, rows, outer),
}
"""Sizes of the forward product that a pass is one of."""


def ring_line(
    measured: Sequence[CollectiveTime],
    ranks: int,
    place: Place = "node",
    kind: RingKind | None = None,
) -> Line | None:
    """Time of a pass round a ring of `ranks`, and of a byte that a rank sends in it.

    Of the group size that is nearest to `ranks` among those measured; None without any.

    Args:
        kind: of the collective, whose own times count where there are any; None for all kinds
            together. A reduction on a CPU adds, which takes longer than to gather.
    """
    rings = [one for one in measured if one.kind in _PASSES and one.place == place]
    if not rings or ranks < 2:
        return None
    return _nearest_line([one for one in rings if one.kind == kind] or rings, ranks)


def exchanged_line(
    measured: Sequence[CollectiveTime], ranks: int, place: Place = "node"
) -> Line | None:
    """Time of an all-to-all of `ranks`, and of a byte that a rank sends in it to others.

    Of the group size that is nearest to `ranks` among those measured; None without any.
    """
    exchanges = [one for one in measured if one.kind == "all_to_all" and one.place == place]
    if not exchanges or ranks < 2:
        return None
    return _nearest_line(exchanges, ranks)


def _nearest_line(measured: Sequence[CollectiveTime], ranks: int) -> Line:
    """Line through those of the group size that is nearest."""
    nearest = min({one.ranks for one in measured}, key=lambda size: abs(math.log(size / ranks)))
    points = [point for one in measured if one.ranks == nearest for point in _points(one)]
    passes, sent_bytes, times_ms = np.array(points).T
    return _of_bytes(passes, sent_bytes, times_ms)


def _points(one: CollectiveTime) -> list[tuple[float, float, float]]:
    """Passes, bytes that a rank sends and ms: as measured, or at sizes on a line."""
    passes = _PASSES.get(one.kind, 1)
    share = 1.0 if one.kind == "send" else passes * (one.ranks - 1) / one.ranks
    if one.ms is not None:
        assert one.bytes is not None
        return [(passes, one.bytes * share, one.ms)]
    assert one.latency_us is not None and one.gb_per_s is not None
    return [
        (passes, size * share, one.latency_us * 1e-3 + size * share / (one.gb_per_s * 1e6))
        for size in _LINE_BYTES
    ]


def _of_bytes(passes: np.ndarray, sent_bytes: np.ndarray, times_ms: np.ndarray) -> Line:
    """Line through times of messages, of which a byte takes its time at twice the fastest rate that
    was measured at least, as its fixed part counts there.

    Where sizes are small or times scatter, a fit alone may find that bytes cost nothing.
    """
    least_ms = float((times_ms / sent_bytes).min()) / 2
    return _fit(passes, sent_bytes, times_ms, 1 / times_ms, least_ms=least_ms)


def send_line(measured: Sequence[CollectiveTime], place: Place = "node") -> Line | None:
    """Time of a send between two ranks, and of a byte of it; None where none was measured."""
    sends = [one for one in measured if one.kind == "send" and one.place == place]
    if not sends:
        return None
    _, sent_bytes, times_ms = np.array([point for one in sends for point in _points(one)]).T
    return _of_bytes(np.ones_like(sent_bytes), sent_bytes, times_ms)


def fitted_line(
    x: np.ndarray, times_ms: np.ndarray, weights: np.ndarray, *, least_ms: float = 0.0
) -> Line:
    """Line through times at `x` whose weighted squares of errors are least.

    Neither part is negative, and the slope is at least `least_ms`.
    """
    return _fit(np.ones_like(x), x, times_ms, weights, least_ms=least_ms)


def _fit(
    fixed: np.ndarray,
    each: np.ndarray,
    times_ms: np.ndarray,
    weights: np.ndarray,
    *,
    least_ms: float = 0.0,
) -> Line:
    """Fit with at least `least_ms` for each of `each`."""
    columns = np.stack([fixed, each], axis=1) * weights[:, None]
    scale = np.linalg.norm(columns, axis=0)  # rows and bytes are large beside 1
    coefficients, _ = nnls(columns / scale, (times_ms - least_ms * each) * weights)
    fixed_ms, each_ms = (coefficients / scale).tolist()
    return Line(fixed_ms=fixed_ms, each_ms=each_ms + least_ms)


def _flops(rows: _Size, inner: _Size, outer: _Size) -> np.ndarray:
    return np.asarray(2.0 * rows * inner * outer)


def _sides(axis: np.ndarray, size: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Indices of the measured sizes below and above a size, and the share that each has of it by
    logarithm; beyond the ends all is the nearest's."""
    last = len(axis) - 1
    index = np.interp(np.log(size), np.log(axis), np.arange(len(axis)))
    below = np.minimum(index.astype(int), max(last - 1, 0))
    share = index - below
    return (below, 1 - share), (np.minimum(below + 1, last), share)
