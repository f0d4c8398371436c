"""Matrix product times of any shape, interpolated from scattered measurements.

The logarithm of the time per operation is a Gaussian process (Rasmussen and Williams 2006, Gaussian
Processes for Machine Learning, section 2.2) over:

* padding to tiles 256 wide, thin sides, and bytes per operation (8 per fp32 gradient element);
* sizes as the kernel sees them: output rows and columns, reduction length, and operations;
* rows and widths of the layer, which relate a product to its gradients;
* noise, as clocks and kernel choice scatter. Measured shapes keep their measured time.

The variances are rounded maximum-likelihood values for 514 B200 and 183 A100 products published by
SimuMax; `benchmarks/rates.py` cross-validates them. Predictions are never faster than the fastest
of the nearest measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from omnibal.model.rate_tables import GroupedTime, ProductPass, ProductTime

_NEIGHBOURS = 8  # nearest measured shapes, whose fastest rate limits a prediction
_ELEMENT_BYTES = 2  # bf16 operands, and outputs other than weight gradients

# Variances of the components of the log time per operation.
_LEVEL, _SIZES, _SUMS, _OPERATIONS, _WIDTHS = 7e-3, 2e-3, 8e-4, 1.5e-3, 2e-3
_TILES = (0.3, 0.4, 0.06)  # of the slopes of `ProductShapes.tiles`
_PRODUCT = 4e-3  # shared by the passes of one product
_CHANCE = 6.5e-3  # noise


# Indices in (rows, inner, outer, groups) of output rows, columns, reduction length, groups.
_SEEN_AS: dict[ProductPass, tuple[int, int, int, int]] = {
    "forward": (0, 2, 1, 3),
    "input_gradient": (0, 1, 2, 3),
    "weight_gradient": (2, 1, 0, 3),
}
PASSES = list(_SEEN_AS)


@dataclass(frozen=True, kw_only=True)
class ProductShapes:
    """Shapes of products, each as the kernel and as the layer sees it."""

    layer: np.ndarray  # [shapes, 4]: log rows, inner, outer, groups
    passes: np.ndarray  # [shapes]: indices in `PASSES`
    gradient_bytes: np.ndarray  # [shapes]: bytes of an element of the weight gradient

    @cached_property
    def kernel_sizes(self) -> np.ndarray:
        """[shapes, 4]: log rows and columns of the output, reduction length, groups."""
        orders = np.array(list(_SEEN_AS.values()))[self.passes]
        return np.take_along_axis(self.layer, orders, axis=-1)

    @cached_property
    def output_bytes(self) -> np.ndarray:
        """[shapes]: bytes read and written per output element."""
        is_weights = self.passes == PASSES.index("weight_gradient")
        return np.where(is_weights, 2 * self.gradient_bytes, _ELEMENT_BYTES)

    @cached_property
    def flops(self) -> np.ndarray:
        """[shapes]: operations, two per multiply-add."""
        return 2 * np.exp(self.kernel_sizes.sum(axis=1))

    @cached_property
    def tiles(self) -> np.ndarray:
        """[shapes, 3]: log relative cost of tile padding, of bytes, and of thin sides."""
        m, n, k, _ = np.exp(self.kernel_sizes).T
        padded = np.prod([np.ceil(side / 256 - 1e-9) * 256 / side for side in (m, n)], axis=0)
        moved = _ELEMENT_BYTES * k * (m + n) + self.output_bytes * m * n
        return np.stack(
            [
                np.log(padded),
                np.log1p(400 * moved / (2 * m * n * k)),
                np.log1p(300 / np.minimum(m, n)),
            ],
            axis=1,
        )


def product_shapes(measured: Sequence[ProductTime]) -> ProductShapes:
    """Return the shapes of measured products."""
    sizes = [
        (time.rows, time.inner, time.outer, time.groups if isinstance(time, GroupedTime) else 1)
        for time in measured
    ]
    return ProductShapes(
        layer=np.log(np.array(sizes, np.float64)),
        passes=np.array([PASSES.index(time.of) for time in measured]),
        gradient_bytes=np.array([4.0 if time.gradient == "fp32" else 2.0 for time in measured]),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScatteredTimes:
    """Gaussian process over the log time per operation, fitted to measurements."""

    shapes: ProductShapes
    log_rates: np.ndarray  # log measured ms per operation, [measured]
    typical: float  # median of `log_rates`
    weights: np.ndarray  # [measured]: kernel weights of the deviations from the median

    @classmethod
    def fit(cls, shapes: ProductShapes, times_ms: np.ndarray) -> Self:
        """Return the process fitted to `times_ms` [shapes]."""
        log_rates = np.log(times_ms / shapes.flops)
        typical = float(np.median(log_rates))
        covariances = covariance(shapes, shapes) + _CHANCE * np.eye(len(log_rates))
        weights = cho_solve(cho_factor(covariances, lower=True), log_rates - typical)
        return cls(shapes=shapes, log_rates=log_rates, typical=typical, weights=weights)

    def ms(self, shapes: ProductShapes) -> np.ndarray:
        """Return predicted times of products in ms, [shapes]."""
        layers, others = shapes.layer[:, None], self.shapes.layer[None]
        same = (np.abs(layers - others) < 1e-9).all(axis=2)
        for name in ("passes", "output_bytes"):
            same &= getattr(shapes, name)[:, None] == getattr(self.shapes, name)[None]
        # A measured shape shares its noise too, so it keeps its measured time.
        covariances = covariance(shapes, self.shapes) + _CHANCE * same
        log_rates = self.typical + covariances @ self.weights
        distances = _distances(shapes.kernel_sizes, self.shapes.kernel_sizes)
        near = np.argsort(distances, axis=1, kind="stable")[:, :_NEIGHBOURS]
        # Never faster than the nearest measurements: extrapolation must not promise speed.
        return np.exp(np.maximum(log_rates, self.log_rates[near].min(axis=1))) * shapes.flops


def covariance(some: ProductShapes, others: ProductShapes) -> np.ndarray:
    """Return covariances of log times per operation, without noise, [some, others]."""
    layers = np.abs(some.layer[:, None] - others.layer[None])
    sums = np.abs(some.kernel_sizes[:, None, 2] - others.kernel_sizes[None, :, 2])
    flops = np.abs(np.log(some.flops)[:, None] - np.log(others.flops)[None])
    return (
        _LEVEL
        + (some.tiles * _TILES) @ others.tiles.T
        + _SIZES * _matern(_distances(some.kernel_sizes, others.kernel_sizes) / 2.5)
        + _SUMS * _matern(sums / 0.7)
        + _OPERATIONS * _matern(flops / 0.7)
        + _WIDTHS * np.exp(-layers.sum(axis=2))
        + _PRODUCT * (layers < 1e-9).all(axis=2)
    )


def _distances(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return Euclidean distances of log sizes, [some, others]."""
    return np.linalg.norm(some[:, None] - others[None], axis=2)


def _matern(distances: np.ndarray) -> np.ndarray:
    """Return Matern-3/2 correlations by distance (Rasmussen and Williams, equation 4.17)."""
    scaled = np.sqrt(3) * distances
    return (1 + scaled) * np.exp(-scaled)
