"""Step times of many ways to cut a model into the parts of a schedule, simulated side by side.

The steps are those of `omnibal.pipeline.simulate.predict_steps`, without what ranks wait for one
another: no pack is shared, and no experts are.

Shapes: C candidates, R rows (what a data-parallel rank runs in a step), p stages, k parts of the
model, f features of a micro-batch.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.pipeline.critical_path import SampledSteps
from omnibal.pipeline.operation_graph import OperationGraph
from omnibal.pipeline.schedules import Pass, PipelineSchedule
from omnibal.pipeline.stage_cost import PerStepCosts

_ENTRIES = 8_000_000
"""Entries of [operations, C, R] computed at a time: bounds memory to 64 MB."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartTerms:
    """Coefficients over the features of a micro-batch, of every part of every candidate.
    [C, k, f] each"""

    forward: np.ndarray
    backward: np.ndarray
    """Whole backwards, recomputation included."""
    weight: np.ndarray
    """Part of the backwards that gives gradients of weights."""
    send: np.ndarray
    """Link from a part to the next one."""
    receive: np.ndarray
    """Link back to a part from the next one."""

    def __len__(self) -> int:
        return len(self.forward)

    def some(self, chosen: slice | np.ndarray) -> "PartTerms":
        """Some of the candidates."""
        return rows_of(self, chosen)

    def of_pass(self, kind: Pass) -> np.ndarray:
        """Coefficients of a kind of pass; both parts of a backward are the whole of it."""
        match kind:
            case Pass.FORWARD:
                return self.forward
            case Pass.BACKWARD:
                return self.backward
            case Pass.BACKWARD_INPUT:
                return self.backward - self.weight
            case Pass.BACKWARD_WEIGHT:
                return self.weight


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rows:
    """Rows of equally many micro-batches, and the operations of a step of so many."""

    rows: np.ndarray
    """Indices of the rows."""
    features: np.ndarray
    """Features of every micro-batch, [m, f, R]."""
    graph: OperationGraph

    def reduced_ms(self, terms: PartTerms, once: PerStepCosts) -> np.ndarray:
        """End of every stage's exchange of gradients, [C, R, p], of costs [C, p]."""
        each, last = once.at(np.s_[:, None]), max(self.graph.kinds)
        if self.graph.schedule.chunks == 1:
            first_ms = _stages_last(np.moveaxis(terms.forward @ self.features[0], 1, 0))
            last_ms = _stages_last(np.moveaxis(terms.of_pass(last) @ self.features[-1], 1, 0))
            _, finish_ms, _ = self._run(terms, each.first_wait_ms(first_ms))
            return _stages_last(finish_ms) + each.exposed_ms(last_ms)
        _, finish_ms, end_ms = self._run(terms, self._ready_ms(terms, each))
        last_ms = self._of_chunks(self._last_end_ms(end_ms))
        return _stages_last(finish_ms) + each.chunks_exposed_ms(last_ms)

    def _ready_ms(self, terms: PartTerms, each: PerStepCosts) -> np.ndarray:
        """When every stage may begin, as chunks' weights are gathered one after another.
        [C, R, p]"""
        graph, shape = self.graph, (len(terms), len(self.rows), self.graph.schedule.stages)
        if not each.gather_ms.any():
            return np.zeros(shape)
        firsts = np.flatnonzero((graph.kind == Pass.FORWARD) & (graph.micro_batch == 0))
        begin_ms, _, _ = self._run(terms, np.zeros(shape), int(firsts.max()) + 1)
        start_ms = np.empty((graph.schedule.parts, *shape[:2]))
        start_ms[graph.part[firsts]] = begin_ms[firsts]
        return each.first_waits_ms(self._of_chunks(start_ms))

    def _of_chunks(self, of_parts: np.ndarray) -> np.ndarray:
        """Values of parts [k, C, R] by chunk and stage. [C, R, chunks, p]"""
        schedule = self.graph.schedule
        parts = [
            [schedule.part(stage, chunk) for stage in range(schedule.stages)]
            for chunk in range(schedule.chunks)
        ]
        return np.moveaxis(of_parts[parts], (0, 1), (-2, -1))

    def _run(
        self, terms: PartTerms, ready_ms: np.ndarray, operations: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start of every operation, [operations, C, R], end of every stage, [p, C, R], and end of
        every operation.

        Args:
            ready_ms: when every stage may begin, [C, R, p].
            operations: of all that are run, by their depth; None for all.
        """
        graph = self.graph
        order = graph.in_turn.tolist() if operations is None else range(operations)
        count = len(graph)
        start_ms = np.empty((count if operations else 0, len(terms), len(self.rows)))
        end_ms = np.empty((count, len(terms), len(self.rows)))
        free = list(np.moveaxis(ready_ms, -1, 0))
        by_part = {
            kind: np.ascontiguousarray(terms.of_pass(kind).swapaxes(0, 1))
            for kind in self.graph.kinds
        }
        links = [np.ascontiguousarray(each.swapaxes(0, 1)) for each in (terms.send, terms.receive)]
        kinds, stages, parts = (each.tolist() for each in (graph.kind, graph.stage, graph.part))
        sources, micro_batches = graph.source.tolist(), graph.micro_batch.tolist()
        for index in order:
            kind, stage, part = Pass(kinds[index]), stages[index], parts[index]
            features, start = self.features[micro_batches[index]], free[stage]
            if sources[index] < count:
                link = links[0][part - 1] if kind == Pass.FORWARD else links[1][part]
                start = np.maximum(start, end_ms[sources[index]] + link @ features)
            if operations:
                start_ms[index] = start
            free[stage] = np.add(start, by_part[kind][part] @ features, out=end_ms[index])
        return start_ms, np.stack(free), end_ms

    def _last_end_ms(self, end_ms: np.ndarray) -> np.ndarray:
        """End of the last backward of every part. [k, C, R]"""
        graph = self.graph
        ends = graph.kind == max(graph.kinds)
        return np.stack(
            [
                end_ms[np.flatnonzero(ends & (graph.part == part))].max(axis=0)
                for part in range(graph.schedule.parts)
            ]
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartSimulator:
    """A schedule over sampled steps."""

    steps: SampledSteps
    groups: tuple[_Rows, ...]
    """Rows by their number of micro-batches; those without any are left out."""

    @classmethod
    def of(cls, steps: SampledSteps, schedule: PipelineSchedule, stages: int) -> "PartSimulator":
        """Prepare the steps for pipelines of so many stages."""
        groups = []
        for count in np.unique(steps.counts[steps.counts > 0]).tolist():
            rows = np.flatnonzero(steps.counts == count)
            features = np.ascontiguousarray(steps.features[rows, :count].transpose(1, 2, 0))
            graph = OperationGraph.of(schedule.rule(stages, schedule.chunks, count))
            groups.append(_Rows(rows=rows, features=features, graph=graph))
        return cls(steps=steps, groups=tuple(groups))

    @property
    def operations(self) -> int:
        """Operations of all rows: the work of one candidate."""
        return sum(len(group.graph) * len(group.rows) for group in self.groups)

    def step_ms(self, terms: PartTerms, once: PerStepCosts) -> np.ndarray:
        """Mean step time of every candidate. [C]"""
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
            row_ms[:, group.rows] = group.reduced_ms(terms, once).max(axis=-1)
        step_ms = row_ms[:, self.steps.rows].max(axis=2) + once.update_ms.max(axis=1)[:, None]
        return step_ms @ self.steps.weight


def _stages_last(of_stages: np.ndarray) -> np.ndarray:
    """Values [p, C, R] with the stages' axis last, as `PerStepCosts` has it."""
    return np.moveaxis(of_stages, 0, -1)
