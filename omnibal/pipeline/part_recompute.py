"""Recomputation orders of a stage's parts.

A stage's recompute number selects more layers as it grows, in a few possible orders: of kinds and
chunks if any layers may be recomputed, else the first `number` layers of a tower in every chunk
(`omnibal.pipeline.recompute_numbers`), one order per choice of the encoders' numbers.

Shapes: n stages' contents, c chunks, K kinds of unit, L kinds of layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Self

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.cost.model import CostModel
from omnibal.model.config import ModelConfig
from omnibal.model.targets import RecomputeFreedom
from omnibal.pipeline.recompute_numbers import LOOKED_FOR, TowerLayers
from omnibal.pipeline.unit_runs import layer_kinds

_MOST_KINDS = 3
"""Max layer kinds for trying all orders; with more, model order and its reverse."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Contents:
    """Contents of the chunks of stages."""

    counts: np.ndarray
    """Units of every kind, [n, c, K]."""
    start: np.ndarray
    """Position of the first unit of every chunk, [n, c]."""
    end: np.ndarray
    """Position after the last unit, [n, c]."""

    def __len__(self) -> int:
        return len(self.counts)

    def some(self, rows: np.ndarray) -> "Contents":
        """Select rows."""
        return rows_of(self, rows)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerOrders:
    """Any layers of a stage, in an order."""

    kinds: np.ndarray
    """Indices of layer kinds, [L]."""
    places: np.ndarray
    """Permutations of [c * L], [orders, c * L]."""
    is_shared: bool = False

    @classmethod
    def of(cls, cost: CostModel, mean: np.ndarray, most: np.ndarray) -> Self:
        """Return orders by saved bytes per time, by kind and by chunk; `most` is the max number of
        micro-batches in flight per chunk, [c]."""
        kinds = layer_kinds(cost.kinds)
        return cls(kinds=np.array(kinds), places=_orders(cost, kinds, mean, most))

    @property
    def orders(self) -> int:
        return len(self.places)

    def most(self, contents: Contents) -> np.ndarray:
        """Return the number of all layers. [n]"""
        return contents.counts[..., self.kinds].sum(axis=(1, 2))

    def recomputed(self, contents: Contents, order: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return the first `number` layers of every stage's order. [n, c, K]"""
        held, place = contents.counts[..., self.kinds], self.places[order]
        in_order = np.take_along_axis(held.reshape(place.shape), place, axis=1)
        before = in_order.cumsum(axis=1) - in_order
        some = np.clip(number[:, None] - before, 0, in_order)
        placed = np.empty_like(some)
        np.put_along_axis(placed, place, some, axis=1)
        found = np.zeros(contents.counts.shape, np.int64)
        found[..., self.kinds] = placed.reshape(held.shape)
        return found


def _orders(
    cost: CostModel, kinds: Sequence[int], mean: np.ndarray, most: np.ndarray
) -> np.ndarray:
    """Return orders of the layers of chunks. [orders, c * L]"""
    units = [*cost.units.values()]
    layers = [units[kind] for kind in kinds]
    saved = np.array([(each.activation_bytes - each.boundary_bytes) @ mean for each in layers])
    spent = np.array([each.recompute_ms @ mean for each in layers])
    price = spent / np.maximum(saved, 1e-9)
    # Layers that save nothing come last.
    by_price = np.where(saved > 0, price / np.maximum(most[:, None], 1), np.inf)
    chunks = np.argsort(-most, kind="stable").tolist()
    useful = [kind for kind in range(len(layers)) if saved[kind] > 0]
    idle = [kind for kind in range(len(layers)) if saved[kind] <= 0]
    many = len(useful) > _MOST_KINDS
    ways = [tuple(useful), tuple(useful[::-1])] if many else list(permutations(useful))
    orders = [np.argsort(by_price, axis=None, kind="stable").tolist()]
    for way in ways:
        full = [*way, *idle]
        orders.append([chunk * len(layers) + kind for kind in full for chunk in chunks])
        orders.append([chunk * len(layers) + kind for chunk in chunks for kind in full])
    return np.array(list(dict.fromkeys(map(tuple, orders))), np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerNumbers:
    """The first `number` layers of a tower in every chunk."""

    layers: TowerLayers
    kinds: np.ndarray
    """Indices of layer kinds, [L]."""
    fixed: np.ndarray
    """Numbers of the towers in every order, or `LOOKED_FOR`, [orders, towers]."""
    is_shared: bool
    """Whether all stages share the numbers."""

    @classmethod
    def of(cls, cost: CostModel, model: ModelConfig, freedom: RecomputeFreedom) -> Self:
        """Return recompute counts this trainer accepts with PP > 1."""
        assert freedom is not RecomputeFreedom.ALL  # only for trainers without pipelines
        layers = TowerLayers.of(cost, model)
        is_shared = freedom is not RecomputeFreedom.STAGES
        fixed = [(LOOKED_FOR,) * len(layers.towers)]
        if is_shared:
            fixed = [(*encoders, LOOKED_FOR) for encoders in product(*layers.encoder_numbers)]
        return cls(
            layers=layers,
            kinds=np.array(layer_kinds(cost.kinds)),
            fixed=np.array(fixed),
            is_shared=is_shared,
        )

    @property
    def orders(self) -> int:
        return len(self.fixed)

    def most(self, contents: Contents) -> np.ndarray:
        """Return the max layers per chunk of the towers with a searched number. [n]"""
        held = self.layers.held(contents.start.ravel(), contents.end.ravel())
        free = held[:, (self.fixed == LOOKED_FOR).any(axis=0)].max(axis=1)
        return free.reshape(contents.start.shape).max(axis=1)

    def recomputed(self, contents: Contents, order: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return the first `number` layers of every chunk. [n, c, K]"""
        chunks = contents.start.shape[1]
        of_chunks = self.layers.recomputed(
            contents.start.ravel(),
            contents.end.ravel(),
            np.repeat(self.fixed[order], chunks, axis=0),
            np.repeat(number, chunks),
        )
        found = np.zeros(contents.counts.shape, np.int64)
        found[..., self.kinds] = of_chunks.reshape(*contents.start.shape, len(self.kinds))
        return found


RecomputeWays = LayerOrders | LayerNumbers
"""Orders of a stage, and the meaning of a number in each."""
