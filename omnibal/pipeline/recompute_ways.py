"""Ways for a stage to recompute layers by one number, and the smallest number that fits memory.

With any layers free, a way is an order of the stage's layers, and a number recomputes the first of
them. Trainers that take numbers recompute the first min(number, held) layers of every tower in
every chunk (`omnibal.model.targets.RecomputeFreedom`); a way then fixes the encoders' numbers.
Memory falls and time rises with the number, so bisection finds the smallest that fits.

Shapes: n stages, c chunks, K kinds of unit, L kinds of layer, T towers. `chosen` [n, c] are indices
of the runs of units that stages hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from typing import Self

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.model.targets import RecomputeFreedom
from omnibal.model.units import unit_names
from omnibal.pipeline.bounds import Runs
from omnibal.pipeline.recompute import bisect_min_fitting, count_peaks
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_memory import MemoryTable, fits_cap
from omnibal.pipeline.unit_runs import layer_kinds

NO_NUMBER = 2**31  # number of a stage that never fits
_SEARCHED = -1  # placeholder for a tower's number that is searched
_MAX_PERMUTED_KINDS = 3  # layer kinds for trying all orders; with more, model order and its reverse


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerOrders:
    """Any layers of a stage, in one of several orders."""

    runs: Runs
    kinds: np.ndarray  # indices of layer kinds, [L]
    places: np.ndarray  # permutations of the layer kinds of all chunks, [ways, c * L]
    is_shared: bool = False  # whether all stages have the same way and number

    @classmethod
    def build(cls, cost: CostModel, runs: Runs, mean: np.ndarray, in_flight: np.ndarray) -> Self:
        """Return orders by saved bytes per time, by kind and by chunk, for `mean` features [F] and
        the max number of micro-batches in flight per chunk, [c]."""
        kinds = layer_kinds(cost.kinds)
        layers = [[*cost.units.values()][kind] for kind in kinds]
        saved = np.array([(unit.activation_bytes - unit.boundary_bytes) @ mean for unit in layers])
        spent = np.array([unit.recompute_ms @ mean for unit in layers])
        price = spent / np.maximum(saved, 1e-9)
        # Layers that save nothing come last. A chunk saves once per micro-batch in flight.
        by_price = np.where(saved > 0, price / np.maximum(in_flight[:, None], 1), np.inf)
        chunks = np.argsort(-in_flight, kind="stable").tolist()
        useful = np.flatnonzero(saved > 0).tolist()
        idle = np.flatnonzero(saved <= 0).tolist()
        is_few = len(useful) <= _MAX_PERMUTED_KINDS
        orders = [np.argsort(by_price, axis=None, kind="stable").tolist()]
        for order in permutations(useful) if is_few else (useful, useful[::-1]):
            full = [*order, *idle]
            orders.append([chunk * len(layers) + kind for kind in full for chunk in chunks])
            orders.append([chunk * len(layers) + kind for chunk in chunks for kind in full])
        places = np.array(list(dict.fromkeys(map(tuple, orders))), np.int64)
        return cls(runs=runs, kinds=np.array(kinds), places=places)

    def __len__(self) -> int:
        return len(self.places)

    def count_recomputed(
        self, chosen: np.ndarray, way: np.ndarray, number: np.ndarray
    ) -> np.ndarray:
        """Count the first `number` [n] layers in the order of `way` [n] by kind. [n, c, K]"""
        counts, place = self.runs.counts[chosen], self.places[way]
        held = counts[..., self.kinds]  # [n, c, L]
        in_order = np.take_along_axis(held.reshape(place.shape), place, axis=1)
        before = in_order.cumsum(axis=1) - in_order
        layers = np.empty_like(in_order)
        np.put_along_axis(layers, place, np.clip(number[:, None] - before, 0, in_order), axis=1)
        recomputed = np.zeros_like(counts)
        recomputed[..., self.kinds] = layers.reshape(held.shape)
        return recomputed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TowerNumbers:
    """The first `number` layers of every tower in every chunk, in model order."""

    runs: Runs
    kinds: np.ndarray  # indices of layer kinds, [L]
    first: np.ndarray  # position of each run's first layer of a tower, [runs, T]
    stop: np.ndarray  # position after its last layer, [runs, T]
    before: np.ndarray  # layers of every kind before each position, [units + 1, L]
    fixed: np.ndarray  # number of each tower or `_SEARCHED`, [ways, T], rows ascending
    is_shared: bool  # whether all stages have the same way and number
    language_layers: int | None = None  # of the model if all or none are recomputed, else None

    @classmethod
    def build(cls, task: SplitTask, runs: Runs) -> Self:
        """Return the numbers that the task's trainer takes. An encoder's number is 0 or all if
        shared, and 0 without a backward, as recomputation would cost nothing."""
        cost, freedom = task.cost, task.rules.recompute
        layers = [cost.kinds[index] for index in layer_kinds(cost.kinds)]
        names = np.array(unit_names(task.model))
        has_backward = {kind.tower: cost.units[kind.name].has_backward for kind in layers}
        places = [
            np.flatnonzero(np.isin(names, [kind.name for kind in layers if kind.tower == tower]))
            for tower in has_backward
        ]
        before = np.zeros((len(names) + 1, len(layers)), np.int64)
        np.cumsum(names[:, None] == [kind.name for kind in layers], axis=0, out=before[1:])
        first = np.maximum(runs.start[:, None], [place[0] for place in places])
        stop = np.minimum(runs.end[:, None], [place[-1] + 1 for place in places])
        is_shared = freedom is not RecomputeFreedom.STAGES
        *encoders, language = places
        fixed = [(_SEARCHED,) * len(places)]
        if is_shared:
            trained = zip(encoders, has_backward.values(), strict=False)
            numbers = [(0, len(place)) if has else (0,) for place, has in trained]
            fixed = [(*of_encoders, _SEARCHED) for of_encoders in product(*numbers)]
        return cls(
            runs=runs,
            kinds=np.array(layer_kinds(cost.kinds)),
            first=first,
            stop=np.maximum(stop, first),
            before=before,
            fixed=np.array(fixed),
            is_shared=is_shared,
            language_layers=len(language) if freedom is RecomputeFreedom.ALL else None,
        )

    def __len__(self) -> int:
        return len(self.fixed)

    def count_recomputed(
        self, chosen: np.ndarray, way: np.ndarray, number: np.ndarray
    ) -> np.ndarray:
        """Count by kind the first layers of every tower: `number` [n], or as fixed. [n, c, K]"""
        first, fixed = self.first[chosen], self.fixed[way]
        numbers = np.where(fixed == _SEARCHED, number[:, None], fixed)[:, None]
        stop = np.minimum(first + numbers, self.stop[chosen])
        recomputed = np.zeros((*chosen.shape, self.runs.counts.shape[1]), np.int64)
        recomputed[..., self.kinds] = (self.before[stop] - self.before[first]).sum(axis=2)
        return recomputed

    def shared_numbers(self, fewest: Sequence[np.ndarray]) -> list[int]:
        """Return the distinct numbers, increasing, that some stage needs to fit, from the min
        numbers `fewest` [runs] per stage. Only 0 or all if all or none are recomputed."""
        numbers = np.unique(np.concatenate(fewest))
        numbers = numbers[numbers < NO_NUMBER]
        if self.language_layers is not None:
            numbers = np.unique(np.where(numbers > 0, self.language_layers, 0))
        return [int(number) for number in numbers]

    def smaller_ways(self, way: int) -> list[int]:
        """Return the ways that differ only in that one encoder fewer recomputes its layers."""
        less, fixed = self.fixed[:way] < self.fixed[way], self.fixed[:way] != self.fixed[way]
        return np.flatnonzero((less == fixed).all(axis=1) & (less.sum(axis=1) == 1)).tolist()


RecomputeWays = LayerOrders | TowerNumbers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittingNumbers:
    """Min numbers of one stage to fit memory, cached."""

    tables: Sequence[MemoryTable]  # of the passes of every chunk
    cap_bytes: float
    ways: RecomputeWays
    known: dict[bytes, int] = field(default_factory=dict)  # by the runs of all chunks and the way

    def on(self, tables: Sequence[MemoryTable], cap_bytes: float) -> Self:
        """Return an empty cache for other tables of the chunks and another memory cap."""
        return replace(self, tables=tables, cap_bytes=cap_bytes, known={})

    def find(self, chosen: np.ndarray, way: np.ndarray) -> np.ndarray:
        """Return the min number in `way` for runs `chosen` [n, c] to fit, or `NO_NUMBER`. [n]"""
        keys = [row.tobytes() for row in np.column_stack([chosen, way])]
        new = {key: row for row, key in enumerate(keys) if key not in self.known}
        if new:
            rows = [*new.values()]
            numbers = self._bisect(chosen[rows], way[rows])
            self.known.update(zip(new, numbers.tolist(), strict=True))
        return np.array([self.known[key] for key in keys], np.int64)

    def _bisect(self, chosen: np.ndarray, way: np.ndarray) -> np.ndarray:
        levels, held = self.tables[0].levels, self.ways.runs.counts[chosen]  # [n, c, K]

        def fit(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
            counts = held[rows].reshape(len(rows), -1)
            recomputed = self.ways.count_recomputed(chosen[rows], way[rows], number)
            recomputed = np.tile(recomputed, levels).reshape(len(rows), -1)
            peaks = [count_peaks(table, counts, recomputed) for table in self.tables]
            return fits_cap(np.max(peaks, axis=0), self.cap_bytes)

        rows, high = np.arange(len(chosen)), held.sum(axis=(1, 2))  # all layers, and more
        fits_with_none = fit(rows, 0 * high)
        high = np.where(fits_with_none, 0, high)
        fits = fits_with_none | fit(rows, high)
        # Rows that fit with none or never have low == high, which ends their bisection at once.
        return np.where(fits, bisect_min_fitting(fit, np.where(fits, 0, high), high), NO_NUMBER)
