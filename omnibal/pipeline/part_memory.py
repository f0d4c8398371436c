"""Memory of stages with several parts of the model, and the recomputation needed to fit.

As `omnibal.pipeline.stage_memory` counts, in the heaviest passes of random contents. Results must
be checked in all passes. A stage that does not fit recomputes as needed, in an order of
`omnibal.pipeline.part_recompute`.

Shapes: n stages' contents, c chunks, K kinds of unit, f features.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.part_recompute import Contents, LayerNumbers, LayerOrders, RecomputeWays
from omnibal.pipeline.passes import Passes, joined_passes, micro_batches_in, stage_passes
from omnibal.pipeline.recompute import fewest_that_fit
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.stage_memory import MemoryTable, fits_cap, heaviest_for, tables_of
from omnibal.pipeline.unit_runs import layer_kinds
from omnibal.pipeline.workload import Workload

_DRAWN = 24
"""Random stage contents used to find heavy passes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartMemory:
    """Memory of one stage of a schedule, by its chunks' contents."""

    tables: list[MemoryTable]
    """Heavy passes of every chunk."""
    ways: RecomputeWays
    """Recomputation orders."""
    cap_bytes: float

    @classmethod
    def of_stages(
        cls,
        cost: CostModel,
        workload: Workload,
        schedule: PipelineSchedule,
        stages: int,
        cap_bytes: float,
        numbers: LayerNumbers | None = None,
    ) -> "list[PartMemory]":
        """Return the memory of every stage in its heaviest passes of the run."""
        features, every = features_of(workload, cost), []
        for stage in range(stages):
            heavy = _heavy_passes(cost, features, workload, schedule, stages, stage)
            in_flight = [micro_batches_in(cost, each.others).max(axis=0) for each in heavy]
            most = np.max(in_flight, axis=0)[: schedule.chunks]
            every.append(
                cls(
                    tables=tables_of(cost, workload, heavy),
                    ways=numbers or LayerOrders.of(cost, features.mean(axis=0), most),
                    cap_bytes=cap_bytes,
                )
            )
        return every

    def peak_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Return the peak per device for `counts` [n, c, K] with `recomputed` units. [n]"""
        held = counts.reshape(len(counts), -1)
        again = np.tile(recomputed, self.tables[0].levels).reshape(len(counts), -1)
        return np.max([table.peak_bytes(held, again) for table in self.tables], axis=0)

    def least(self, contents: Contents, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the min number in each stage's `order` [n], and whether it fits."""

        def fit(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
            some = contents.some(rows)
            again = self.ways.recomputed(some, order[rows], number)
            return fits_cap(self.peak_bytes(some.counts, again), self.cap_bytes)

        every, most = np.arange(len(contents)), self.ways.most(contents)
        most = np.where(fit(every, 0 * most), 0, most)
        fits = (most == 0) | fit(every, most)
        return fewest_that_fit(fit, np.where(fits, 0, most), most), fits


def _heavy_passes(
    cost: CostModel,
    features: np.ndarray,
    workload: Workload,
    schedule: PipelineSchedule,
    stages: int,
    stage: int,
) -> list[Passes]:
    """Return the passes of every chunk that are the heaviest of a kind for some drawn content."""
    found = defaultdict[int, dict[int, Passes]](dict)
    for each in stage_passes(features, workload, schedule, stages, stage):
        if len(each.row):
            kinds, kind = found[each.chunk], int(each.kind[0])
            both = joined_passes([kinds[kind], each]) if kind in kinds else each
            drawn = _draw_contents(cost, schedule, both.links.shape[1])
            kinds[kind] = both.take(heaviest_for(drawn, both))
    return [joined_passes([*kinds.values()]) for kinds in found.values()]


def _draw_contents(cost: CostModel, schedule: PipelineSchedule, buffers: int) -> np.ndarray:
    """Return random stage contents for `heaviest_for`, without terms equal in passes of one kind.
    [_DRAWN, columns]"""
    rng, units = np.random.default_rng(0), [*cost.units.values()]
    kept = np.array([each.activation_bytes for each in units])
    inputs = np.array([each.boundary_bytes for each in units])
    late = np.array([each.late_bytes[:2].sum(axis=0) for each in units])
    moments = [each.two_part_bytes if schedule.in_two else each.transient_bytes for each in units]
    working = np.array([each.max(axis=0) for each in moments])
    layers = np.isin(np.arange(len(units)), layer_kinds(cost.kinds))
    number = rng.integers(0, 8, (_DRAWN, schedule.chunks, len(units))) * layers
    again = number * (rng.random((_DRAWN, 1, 1)) < 0.5)
    own = working[rng.integers(0, len(units), _DRAWN)]
    held = (number - again) @ kept + again @ inputs
    held = np.concatenate([held, number @ late], axis=1) if schedule.in_two else held
    alike = np.zeros((_DRAWN, len(cost.features) + buffers))
    return np.concatenate([held.reshape(_DRAWN, -1), own, alike], axis=1)
