"""Step times of many ways to cut a model into the parts of a schedule, simulated side by side.

The steps are those of `omnibal.pipeline.simulate.predict_steps`, without what ranks wait for one
another: no pack is shared, and no experts are.

Shapes: C candidates, R rows (what a data-parallel rank runs in a step), p stages, k parts of the
model, f features of a micro-batch.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.pipeline.critical_path import SampledSteps
from omnibal.pipeline.operation_graph import OperationGraph
from omnibal.pipeline.schedules import Pass, PipelineSchedule
from omnibal.pipeline.stage_cost import bucket_counts
from omnibal.pipeline.unit_runs import holds_both_ends, holds_one_end

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
        return PartTerms(
            forward=self.forward[chosen],
            backward=self.backward[chosen],
            weight=self.weight[chosen],
            send=self.send[chosen],
            receive=self.receive[chosen],
        )

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
class StageTerms:
    """What stages of candidates do once a step, in ms, [C, p] each."""

    reduction_ms: np.ndarray
    gather_ms: np.ndarray
    tied_ms: np.ndarray
    update_ms: np.ndarray
    buckets: np.ndarray

    @classmethod
    def of(cls, cost: CostModel, counts: np.ndarray) -> "StageTerms":
        """Costs of stages of these units, [C, p, kinds]."""
        units = cost.units.values()
        per_unit = np.array(
            [(each.trained_parameters, each.trained_expert_parameters) for each in units], float
        )
        parameters, of_experts = np.moveaxis(counts @ per_unit, -1, 0)
        parameters = parameters - cost.tied_trained_parameters * holds_both_ends(cost.kinds, counts)
        buckets = np.ones(parameters.shape)
        buckets[:, 0] = bucket_counts(cost, parameters[:, 0])
        return cls(
            reduction_ms=cost.reduction_ms(parameters, of_experts),
            gather_ms=cost.gather_ms(parameters, of_experts),
            tied_ms=cost.tied_exchange_ms * holds_one_end(cost.kinds, counts),
            update_ms=cost.optimizer_ms_fixed + cost.update_ms(parameters, of_experts),
            buckets=buckets,
        )

    def some(self, chosen: slice | np.ndarray) -> "StageTerms":
        """Some of the candidates."""
        return StageTerms(
            reduction_ms=self.reduction_ms[chosen],
            gather_ms=self.gather_ms[chosen],
            tied_ms=self.tied_ms[chosen],
            update_ms=self.update_ms[chosen],
            buckets=self.buckets[chosen],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Once:
    """`StageTerms` beside times of rows, [p, C, 1] each."""

    reduction_ms: np.ndarray
    gather_ms: np.ndarray
    tied_ms: np.ndarray
    buckets: np.ndarray

    @classmethod
    def of(cls, once: StageTerms) -> "_Once":
        """Put stages first and rows last."""
        return cls(
            reduction_ms=once.reduction_ms.T[..., None],
            gather_ms=once.gather_ms.T[..., None],
            tied_ms=once.tied_ms.T[..., None],
            buckets=once.buckets.T[..., None],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rows:
    """Rows of equally many micro-batches, and the operations of a step of so many."""

    rows: np.ndarray
    """Indices of the rows."""
    features: np.ndarray
    """Features of every micro-batch, [m, f, R]."""
    graph: OperationGraph

    def reduced_ms(self, terms: PartTerms, once: StageTerms, *, overlaps: bool) -> np.ndarray:
        """End of every stage's exchange of gradients. [p, C, R]"""
        each = _Once.of(once)
        if self.graph.schedule.chunks == 1:
            return self._reduced_at_once(terms, each)
        _, finish_ms, end_ms = self._run(terms, self._ready_ms(terms, each, overlaps=overlaps))
        if not overlaps:
            return finish_ms + each.reduction_ms + each.tied_ms
        chunks = self.graph.schedule.chunks
        last_ms = np.sort(self._of_chunks(self._last_end_ms(end_ms)), axis=0)
        reduced_ms = np.zeros_like(finish_ms)
        for of_chunk in last_ms:
            reduced_ms = np.maximum(reduced_ms, of_chunk) + each.reduction_ms / chunks
        return np.maximum(reduced_ms, finish_ms) + each.tied_ms

    def _reduced_at_once(self, terms: PartTerms, each: "_Once") -> np.ndarray:
        """Time of stages of one chunk, of which parts are exchanged while others compute."""
        share = 1 - 1 / each.buckets
        first_ms, last_ms = (
            np.moveaxis(of_pass @ features, 1, 0)
            for of_pass, features in (
                (terms.forward, self.features[0]),
                (terms.of_pass(max(self.graph.kinds)), self.features[-1]),
            )
        )
        wait_ms = np.maximum(each.gather_ms / each.buckets, each.gather_ms - first_ms * share)
        _, finish_ms, _ = self._run(terms, wait_ms)
        rest_ms = np.maximum(each.reduction_ms / each.buckets, each.reduction_ms - last_ms * share)
        return finish_ms + rest_ms + each.tied_ms

    def _ready_ms(self, terms: PartTerms, each: "_Once", *, overlaps: bool) -> np.ndarray:
        """When every stage may begin, as chunks' weights are gathered one after another.
        [p, C, R]"""
        shape = (self.graph.schedule.stages, len(terms), len(self.rows))
        if not each.gather_ms.any():
            return np.zeros(shape)
        if not overlaps:
            return np.broadcast_to(each.gather_ms, shape)
        graph = self.graph
        firsts = np.flatnonzero((graph.kind == Pass.FORWARD) & (graph.micro_batch == 0))
        begin_ms, _, _ = self._run(terms, np.zeros(shape), int(firsts.max()) + 1)
        start_ms = np.empty((graph.schedule.parts, *shape[1:]))
        start_ms[graph.part[firsts]] = begin_ms[firsts]
        wait_ms = np.zeros(shape)
        for chunk, first_ms in enumerate(self._of_chunks(start_ms)):
            there_ms = (chunk + 1) * each.gather_ms / graph.schedule.chunks
            wait_ms = np.maximum(wait_ms, there_ms / (1 if chunk else each.buckets) - first_ms)
        return wait_ms

    def _of_chunks(self, of_parts: np.ndarray) -> np.ndarray:
        """Values of parts [k, ...] by chunk and stage. [chunks, p, ...]"""
        schedule = self.graph.schedule
        return np.stack(
            [
                of_parts[[schedule.part(stage, chunk) for stage in range(schedule.stages)]]
                for chunk in range(schedule.chunks)
            ]
        )

    def _run(
        self, terms: PartTerms, ready_ms: np.ndarray, operations: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start of every operation, [operations, C, R], end of every stage, [p, C, R], and end of
        every operation.

        Args:
            ready_ms: when every stage may begin, [p, C, R].
            operations: of all that are run, by their depth; None for all.
        """
        graph = self.graph
        order = graph.in_turn.tolist() if operations is None else range(operations)
        count = len(graph)
        start_ms = np.empty((count if operations else 0, len(terms), len(self.rows)))
        end_ms = np.empty((count, len(terms), len(self.rows)))
        free = list(ready_ms)
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
    overlaps: bool
    """Whether chunks are exchanged while others compute."""

    @classmethod
    def of(
        cls, steps: SampledSteps, schedule: PipelineSchedule, stages: int, *, overlaps: bool
    ) -> "PartSimulator":
        """Prepare the steps for pipelines of so many stages."""
        groups = []
        for count in np.unique(steps.counts[steps.counts > 0]).tolist():
            rows = np.flatnonzero(steps.counts == count)
            features = np.ascontiguousarray(steps.features[rows, :count].transpose(1, 2, 0))
            graph = OperationGraph.of(schedule.rule(stages, schedule.chunks, count))
            groups.append(_Rows(rows=rows, features=features, graph=graph))
        return cls(steps=steps, groups=tuple(groups), overlaps=overlaps)

    @property
    def operations(self) -> int:
        """Operations of all rows: the work of one candidate."""
        return sum(len(group.graph) * len(group.rows) for group in self.groups)

    def step_ms(self, terms: PartTerms, once: StageTerms) -> np.ndarray:
        """Mean step time of every candidate. [C]"""
        largest = max(len(group.graph) * len(group.rows) for group in self.groups)
        at_once = max(_ENTRIES // largest, 1)
        found = []
        for first in range(0, len(terms), at_once):
            chunk = slice(first, first + at_once)
            found.append(self._step_ms(terms.some(chunk), once.some(chunk)))
        return np.concatenate(found)

    def _step_ms(self, terms: PartTerms, once: StageTerms) -> np.ndarray:
        row_ms = np.zeros((len(terms), len(self.steps.counts)))
        for group in self.groups:
            row_ms[:, group.rows] = group.reduced_ms(terms, once, overlaps=self.overlaps).max(
                axis=0
            )
        step_ms = row_ms[:, self.steps.rows].max(axis=2) + once.update_ms.max(axis=1)[:, None]
        return step_ms @ self.steps.weight
