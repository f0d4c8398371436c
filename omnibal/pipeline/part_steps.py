"""Step times of many cuts into a schedule's parts, simulated as one batch.

Same as `omnibal.pipeline.simulate.predict_steps` without waits between ranks: no shared packs or
experts.

Shapes: C candidates, R rows (a data-parallel rank's micro-batches in a step), p stages, k parts of
the model, f features of a micro-batch.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.pipeline.critical_path import SampledSteps
from omnibal.pipeline.operation_graph import OperationGraph
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.simulate import SimulatedRows
from omnibal.pipeline.stage_cost import PerStepCosts, of_pass

_ENTRIES = 1_000_000
"""Entries of [operations, C, R] per chunk: limits memory to about 50 MB."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartTerms:
    """Per-feature coefficients of every part of every candidate. [C, k, f] each"""

    forward: np.ndarray
    backward: np.ndarray
    """Whole backwards including recomputation."""
    weight: np.ndarray
    """Weight-gradient part of the backwards."""
    send: np.ndarray
    """P2P link from a part to the next."""
    receive: np.ndarray
    """P2P link back from the next part."""

    def __len__(self) -> int:
        return len(self.forward)

    def some(self, chosen: slice | np.ndarray) -> "PartTerms":
        """Select candidates."""
        return rows_of(self, chosen)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rows:
    """Rows with equal numbers of micro-batches, and their operations."""

    rows: np.ndarray
    features: np.ndarray
    """Features of every micro-batch, [m, f, R]."""
    graph: OperationGraph
    schedule: PipelineSchedule

    def reduced_ms(self, terms: PartTerms, once: PerStepCosts) -> np.ndarray:
        """Return the end of every stage's gradient exchange, [C * R, p], for costs [C, p]."""
        each, count = once.at(np.repeat(np.arange(len(terms)), len(self.rows))), len(self.features)
        passes = terms.forward, terms.backward, terms.weight
        simulated = SimulatedRows(
            schedule=self.schedule,
            pass_ms={kind: self._ms(of_pass(kind, *passes)) for kind in self.graph.kinds},
            forward_link_ms=self._ms(terms.send[:, :-1]),
            backward_link_ms=self._ms(terms.receive[:, :-1]),
            counts=np.full(len(terms) * len(self.rows), count),
        )
        timeline = simulated.simulated(simulated.first_waits_ms(each))
        return timeline.finish_ms + simulated.exposed_ms(each, timeline)

    def _ms(self, terms: np.ndarray) -> np.ndarray:
        """Return micro-batch times for terms [C, k, f]. [C * R, m, k]"""
        # Rows are last in memory, so that the simulator works on contiguous vectors.
        ms = np.moveaxis(terms, 1, 0) @ self.features[:, None]  # [m, k, C, R]
        return np.moveaxis(ms.reshape(*ms.shape[:2], -1), -1, 0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartSimulator:
    """A schedule over sampled steps."""

    steps: SampledSteps
    groups: tuple[_Rows, ...]
    """Non-empty rows grouped by their number of micro-batches."""

    @classmethod
    def of(cls, steps: SampledSteps, schedule: PipelineSchedule, stages: int) -> "PartSimulator":
        """Prepare the steps for pipelines of `stages` stages."""
        groups = []
        for count in np.unique(steps.counts[steps.counts > 0]).tolist():
            rows = np.flatnonzero(steps.counts == count)
            features = np.ascontiguousarray(steps.features[rows, :count].transpose(1, 2, 0))
            graph = OperationGraph.of(schedule.rule(stages, schedule.chunks, count))
            groups.append(_Rows(rows=rows, features=features, graph=graph, schedule=schedule))
        return cls(steps=steps, groups=tuple(groups))

    @property
    def operations(self) -> int:
        """Operations per candidate, over all rows."""
        return sum(len(group.graph) * len(group.rows) for group in self.groups)

    def step_ms(self, terms: PartTerms, once: PerStepCosts) -> np.ndarray:
        """Return the mean step time of every candidate. [C]"""
        largest = max(len(group.graph) * len(group.rows) for group in self.groups)
        at_once = max(_ENTRIES // largest, 1)
        found = []
        for first in range(0, len(terms), at_once):
            chunk = slice(first, first + at_once)
            found.append(self._step_ms(terms.some(chunk), once.at(chunk)))
        return np.concatenate(found)

    def _step_ms(self, terms: PartTerms, once: PerStepCosts) -> np.ndarray:
        row_ms = np.zeros((len(terms), len(self.steps.counts)))
        for group in self.groups:
            reduced_ms = group.reduced_ms(terms, once).max(axis=1)
            row_ms[:, group.rows] = reduced_ms.reshape(len(terms), -1)
        step_ms = row_ms[:, self.steps.rows].max(axis=2) + once.update_ms.max(axis=1)[:, None]
        return step_ms @ self.steps.weight
