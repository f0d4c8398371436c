"""Times of matrix products and collectives of any size, from those that were measured.

A product's time per operation is interpolated between measured sizes, linearly in the logarithms of
time and sizes. So it is exact at measured sizes, never less than the least that was measured, and
rises and falls as the measured ones do. Beyond the measured sizes it is that of the nearest.

Costs are linear in a micro-batch's features, so the time of a product is a constant and a time per
row, fitted by least relative error over all numbers of rows that were measured: small micro-batches
pay the constant too. How far that is from single products is what
`tests/planner/test_shaped_rates.py` holds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Self

import numpy as np
from scipy.optimize import nnls

from omnibal.rates import CollectiveKind, CollectiveTime, ProductTime

_PASSES: dict[CollectiveKind, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Passes round a ring; in each a rank sends every share of the tensor but one."""


_Size = float | np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A time that is a constant and so much for each of something."""

    fixed_ms: float
    each_ms: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProductTimes:
    """Times of matrix products of inputs [rows, inner] and weights [inner, outer]."""

    sizes: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Measured rows, inner and outer sizes, ascending."""
    ms_per_flop: np.ndarray
    """[rows, inner, outer]"""

    @classmethod
    def of(cls, measured: Sequence[ProductTime]) -> Self:
        """Table of measurements of every combination of their sizes (`omnibal.rates.Rates`)."""
        ordered = sorted(measured, key=lambda one: (one.rows, one.inner, one.outer))
        points = np.array([(one.rows, one.inner, one.outer) for one in ordered], np.float64)
        rows, inner, outer = (np.unique(axis) for axis in points.T)
        rates = np.array([one.ms for one in ordered]) / _flops(*points.T)
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

    def forward(self, inner: float, outer: float) -> Line:
        """Time of the output, by rows of the input."""
        return self._line(inner * outer, lambda rows: self.ms(rows, inner, outer))

    def input_gradient(self, inner: float, outer: float) -> Line:
        """Time of the input's gradient, by rows of the input."""
        return self._line(inner * outer, lambda rows: self.ms(rows, outer, inner))

    def weight_gradient(self, inner: float, outer: float) -> Line:
        """Time of the weights' gradient, by rows of the input, over which it sums."""
        return self._line(inner * outer, lambda rows: self.ms(inner, rows, outer))

    def _line(self, weights: float, ms_of_rows: Callable[[np.ndarray], np.ndarray]) -> Line:
        """Fit of a product with so many weights."""
        rows = self.sizes[0]
        # A slope below the fastest rate would promise what no product reached.
        least_ms = float(self.ms_per_flop.min()) * 2 * weights
        times_ms = ms_of_rows(rows)
        return fitted_line(rows, times_ms, 1 / times_ms, least_ms=least_ms)


def ring_line(measured: Sequence[CollectiveTime], ranks: int) -> Line | None:
    """Time of a pass round a ring of `ranks`, and of a byte that a rank sends in it.

    Of the group size that is nearest to `ranks` among those measured; None without any.
    """
    rings = [one for one in measured if one.kind in _PASSES]
    if not rings or ranks < 2:
        return None
    nearest = min({one.ranks for one in rings}, key=lambda size: abs(math.log(size / ranks)))
    of_size = [one for one in rings if one.ranks == nearest]
    passes = np.array([_PASSES[one.kind] for one in of_size], np.float64)
    sent_bytes = passes * [one.bytes * (nearest - 1) / nearest for one in of_size]
    times_ms = np.array([one.ms for one in of_size])
    least_ms = _least_ms(sent_bytes, times_ms)
    return _fit(passes, sent_bytes, times_ms, 1 / times_ms, least_ms=least_ms)


def send_line(measured: Sequence[CollectiveTime]) -> Line | None:
    """Time of a send between two ranks, and of a byte of it; None where none was measured."""
    sends = [one for one in measured if one.kind == "send"]
    if not sends:
        return None
    times_ms = np.array([one.ms for one in sends])
    sent_bytes = np.array([float(one.bytes) for one in sends])
    least_ms = _least_ms(sent_bytes, times_ms)
    return fitted_line(sent_bytes, times_ms, 1 / times_ms, least_ms=least_ms)


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


def _least_ms(sent_bytes: np.ndarray, times_ms: np.ndarray) -> float:
    """Time of a byte at twice the fastest rate that was measured, as its fixed part counts there.

    Where sizes are small or times scatter, a fit alone may find that bytes cost nothing.
    """
    return float((times_ms / sent_bytes).min()) / 2


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
