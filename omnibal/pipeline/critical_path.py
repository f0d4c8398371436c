"""Step times of many candidate pipelines at once, with critical paths as lower bounds.

A step's time is its longest path, so every path's length is a lower bound. A length is linear in
the stages' cost terms, so a path of one candidate bounds all others by a dot product. `TermLayout`
has the terms: per-feature coefficients of forward, backward, P2P links and bucket shares, then
exchanges and optimizer in ms. A path begins with the gather of all weights and a bucket's share of
the first forward, or with the first bucket's gather and the whole forward; it ends likewise with
the gradient reduction (`omnibal.pipeline.stage_cost.PerStepCosts`).

Ranks that share a pack run in lockstep at the slowest rank's time, so a path may switch ranks.
Expert-parallel ranks do so only in stages with experts: the term `without_experts` voids such a
path for candidates without them. Costs and features are concatenated over levels
(`omnibal.pipeline.level_costs`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.operation_graph import OperationGraph, planned_graph
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.workload import Workload

_CHUNK_ENTRIES = 1_000_000
"""Entries of [operations, candidates, rows] per chunk: limits memory."""
_NO_PATH_MS = -1e12
"""Length of a path a candidate lacks: far below any, exact in sums with other times."""
_NEVER_MS = -1e30
"""Arrival at a missing micro-batch, which waits for nothing."""


def _by_feature(first: int, blocks: int = 1) -> property:
    """Return the slice of per-feature terms."""
    return property(
        lambda layout: slice(first * layout.features, (first + blocks) * layout.features)
    )


def _of_stage(number: int) -> property:
    """Return the index of a per-stage term."""
    return property(lambda layout: 6 * layout.features + number)


@dataclass(frozen=True, slots=True)
class TermLayout:
    """Indices of a stage's cost terms."""

    features: int
    has_experts: bool = False
    """Whether the model has experts, which adds the term `without_experts`."""

    @classmethod
    def of(cls, cost: CostModel) -> "TermLayout":
        """Return the layout of a model's costs."""
        return cls(len(cost.features), bool(cost.in_lockstep.any()))

    def __len__(self) -> int:
        return 6 * self.features + 5 + self.has_experts

    forward = _by_feature(0)
    """Forward time; this and the next five are per feature."""
    backward = _by_feature(1)
    send = _by_feature(2)
    """P2P time of the activation to the next stage."""
    receive = _by_feature(3)
    """P2P time of the gradient from it."""
    forward_share = _by_feature(4)
    """Forward time using one bucket of weights."""
    backward_share = _by_feature(5)
    """Backward time producing one bucket of gradients."""
    by_feature = _by_feature(0, 6)
    """All per-feature terms."""
    reduction = _of_stage(0)
    """Gradient reduction time, including the tied matrix."""
    last_reduction = _of_stage(1)
    """Reduction time of the last bucket."""
    gather = _of_stage(2)
    """Weight all-gather time."""
    first_gather = _of_stage(3)
    """All-gather time of the first bucket."""
    optimizer = _of_stage(4)
    without_experts = _of_stage(5)
    """1 if the stage has no experts, else 0; absent for dense models."""


_FORWARD, _BACKWARD, _SEND, _FORWARD_SHARE, _BACKWARD_SHARE = 0, 1, 2, 4, 5
"""Blocks of the layout."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledSteps:
    """Steps to simulate. A row is one data-parallel rank's micro-batches; equal rows are stored
    once, or equal blocks of rows if ranks share packs."""

    features: np.ndarray
    """Features of every micro-batch, [rows, m, features], zeros if missing."""
    counts: np.ndarray
    rows: np.ndarray
    """Row of each rank, [steps, ranks]."""
    weight: np.ndarray
    """Weight of every step, [steps], summing to 1."""
    context: np.ndarray
    """Context-parallel size of every micro-batch, [rows, m]."""
    lockstep_ranks: int
    """Size of the row blocks that run stages with experts in lockstep."""
    layout: TermLayout

    @classmethod
    def of(cls, workload: Workload, cost: CostModel) -> "SampledSteps":
        """Return all steps of the workload, with the features of `cost`."""
        _, step_index = np.unique(workload.step, return_inverse=True)
        ranks = workload.data_parallel_size
        block = max(int(workload.context.max()), workload.lockstep_ranks)
        of_packs = features_of(workload, cost)
        micro_batches, features = int(workload.slot.max()) + 1, of_packs.shape[1]
        shape = int(step_index[-1]) + 1, ranks, micro_batches
        table, context = np.zeros((*shape, features)), np.ones(shape, np.int64)
        place = step_index, workload.dp_rank, workload.slot
        table[place], context[place] = of_packs, workload.context
        counts = np.bincount(step_index * ranks + workload.dp_rank, minlength=shape[0] * ranks)
        # A micro-batch may be all zeros, so rows are compared by counts too.
        keys = np.column_stack([counts, table.reshape(len(counts), -1)])
        if block > 1:
            keys = np.column_stack([keys, context.reshape(len(counts), -1)])
            keys = keys.reshape(-1, block * keys.shape[1])
        whole = np.dtype((np.void, keys.itemsize * keys.shape[1]))
        _, first, kind = np.unique(keys.view(whole).ravel(), return_index=True, return_inverse=True)
        # Step time does not depend on the order of blocks.
        blocks = np.sort(kind.reshape(shape[0], -1), axis=1)
        steps, times = np.unique(blocks, axis=0, return_counts=True)
        within = np.arange(block)
        chosen = (block * first[:, None] + within).ravel()
        return cls(
            features=table.reshape(-1, micro_batches, features)[chosen],
            counts=counts[chosen],
            rows=(block * steps[:, :, None] + within).reshape(len(steps), -1),
            weight=times / times.sum(),
            context=context.reshape(-1, micro_batches)[chosen],
            lockstep_ranks=workload.lockstep_ranks,
            layout=TermLayout.of(cost),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PipelineSimulator:
    """1F1B on p stages over sampled steps."""

    steps: SampledSteps
    graph: OperationGraph
    """Operations sorted by depth; equal depths are independent."""
    features: np.ndarray
    """Features of the operations' micro-batches, [operations, features, rows]."""
    delay_ms: np.ndarray
    """Delay in addition to the link, [operations, 1, rows]: 0, or `_NEVER_MS` if missing."""
    passes: np.ndarray
    """Operation indices of forwards (0) and backwards (1), [2, m, p]."""
    last: np.ndarray
    """Last operation of every stage, [p]."""
    before: np.ndarray
    """The stage's previous operation, [operations]; operations + 1 + s for stage s's first."""
    shared: Mapping[int, np.ndarray]
    """Whether a block of rows runs the operation together, [operations, rows], by block size."""
    lockstep: Mapping[int, np.ndarray]
    """`shared` in stages with experts."""

    @classmethod
    def of(cls, steps: SampledSteps, stages: int) -> "PipelineSimulator":
        """Return the simulator for `stages` stages."""
        graph = planned_graph(stages, steps.features.shape[1])
        missing = graph.micro_batch[:, None] >= steps.counts
        firsts = graph.before == len(graph)
        context = steps.context.T[graph.micro_batch]
        grouped = np.maximum(context, steps.lockstep_ranks if steps.layout.has_experts else 1)
        return cls(
            steps=steps,
            graph=graph,
            features=np.ascontiguousarray(steps.features.transpose(1, 2, 0)[graph.micro_batch]),
            delay_ms=np.where(missing, _NEVER_MS, 0.0)[:, None],
            passes=_passes(graph),
            last=graph.last_of_stages(),
            before=np.where(firsts, len(graph) + 1 + graph.stage, graph.before),
            shared=_by_size(context),
            lockstep=_by_size(grouped),
        )

    @property
    def stages(self) -> int:
        return self.graph.schedule.stages

    @property
    def operations(self) -> int:
        """Number of operations over all rows."""
        return len(self.graph) * len(self.steps.counts)

    def step_ms(self, terms: np.ndarray) -> np.ndarray:
        """Return the mean step time of candidates [n, p, terms]. [n]"""
        return np.concatenate([self._step_ms(chunk) for chunk in self._chunks(terms)])

    def critical_paths(self, terms: np.ndarray) -> np.ndarray:
        """Return term weights of the critical path, mean over steps. [n, p, terms]

        Their dot product with the candidate's terms [n, p, terms] is its mean step time; with other
        candidates' terms it is a lower bound.
        """
        return np.concatenate([self._critical_paths(chunk) for chunk in self._chunks(terms)])

    def _chunks(self, terms: np.ndarray) -> list[np.ndarray]:
        at_once = max(_CHUNK_ENTRIES // self.operations, 1)
        return [terms[first : first + at_once] for first in range(0, len(terms), at_once)]

    def _step_ms(self, terms: np.ndarray) -> np.ndarray:
        end, _ = self._run(terms)
        finish_ms = self._finish_ms(end, terms).max(axis=(2, 3))
        return finish_ms @ self.steps.weight + terms[:, :, self.steps.layout.optimizer].max(axis=1)

    def _critical_paths(self, terms: np.ndarray) -> np.ndarray:
        """Return term weights of the longest path of every step, traced back from its end."""
        end, link = self._run(terms)
        alone_ms = ready_ms = np.empty((0, 0, 0))
        if self.lockstep:  # rows share passes
            ready_ms = np.maximum(end[self.graph.source] + link, end[self.before])
            alone_ms = self._alone_ms(terms)
        layout, finish_ms = self.steps.layout, self._finish_ms(end, terms)
        n, steps = finish_ms.shape[:2]
        last = finish_ms.reshape(n, -1, self.stages * finish_ms.shape[2]).argmax(axis=2)
        candidate, step = (axis.ravel() for axis in np.indices((n, steps)))
        rank, stage = np.divmod(last.ravel(), self.stages)
        weights = np.zeros((n, steps, self.stages, len(layout)))
        slowest_update = terms[:, :, layout.optimizer].argmax(axis=1)
        weights[np.arange(n), :, slowest_update, layout.optimizer] = 1
        of_kind = weights[..., layout.by_feature].reshape(n, steps, self.stages, 6, -1)
        row, operation = self.steps.rows[step, rank], self.last[stage]
        graph, backwards = self.graph, _backwards(self.graph)
        is_in_lockstep = self._is_in_lockstep(terms)
        gather, reduction = self._exposed(terms)

        def take(exposed: _Exposed, at: tuple[np.ndarray, ...]) -> None:
            """Add exposed time at the ends of paths, at (candidate, step, stage, row)."""
            candidate, step, stage, row = at
            whole = exposed.whole[candidate, stage, row]
            term = np.where(whole, exposed.whole_term, exposed.one_term)
            weights[candidate, step, stage, term] += 1
            candidate, step, stage, row = (values[whole] for values in at)
            operation, together = exposed.operation[stage, row], is_in_lockstep[stage, candidate]
            slowest = self._leading(alone_ms, (operation, candidate, row), together)
            left = np.flatnonzero(together & (slowest != row))
            if len(left):
                weights[candidate[left], step[left], stage[left], layout.without_experts] = (
                    _NO_PATH_MS
                )
            features = self.steps.features[slowest, graph.micro_batch[operation]]
            of_kind[candidate, step, stage, exposed.block] -= features
            of_kind[candidate, step, stage, exposed.share_block] += features

        take(reduction, (candidate, step, stage, row))
        while len(operation):
            backward, stage = backwards[operation], graph.stage[operation]
            place = operation, candidate, row
            together = is_in_lockstep[stage, candidate]
            slowest, last = (self._leading(of, place, together) for of in (alone_ms, ready_ms))
            left = np.flatnonzero(together & ((slowest != row) | (last != row)))
            if len(left):
                gone = candidate[left], step[left], stage[left], layout.without_experts
                weights[gone] = _NO_PATH_MS
            row = last
            features = self.steps.features[slowest, graph.micro_batch[operation]]
            of_kind[candidate, step, stage, backward] += features
            before, sender = self.before[operation], graph.source[operation]
            arrival = end[sender, candidate, row] + link[operation, candidate, row]
            waits = arrival > end[before, candidate, row]
            cut = np.where(backward, stage, stage - 1)
            sent = candidate[waits], step[waits], cut[waits], _SEND + backward[waits]
            of_kind[sent] += self.steps.features[row[waits], graph.micro_batch[operation[waits]]]
            operation = np.where(waits, sender, before)
            begun = operation > len(graph)
            take(gather, (candidate[begun], step[begun], stage[begun], row[begun]))
            going = operation < len(graph)
            operation, candidate, step, row = (
                values[going] for values in (operation, candidate, step, row)
            )
        weights[..., layout.by_feature] = of_kind.reshape(n, steps, self.stages, -1)
        return np.einsum("s,nspt->npt", self.steps.weight, weights)

    def _is_in_lockstep(self, terms: np.ndarray) -> np.ndarray:
        """Return whether expert-parallel rows run each stage in lockstep. [p, n]"""
        layout = self.steps.layout
        if self.steps.lockstep_ranks == 1 or not layout.has_experts:
            return np.zeros((self.stages, len(terms)), bool)
        return terms[:, :, layout.without_experts].T == 0

    def _leading(
        self,
        values_ms: np.ndarray,
        at: tuple[np.ndarray, np.ndarray, np.ndarray],
        together: np.ndarray,
    ) -> np.ndarray:
        """Return the row of each block with the largest value. [paths]

        Args:
            values_ms: [operations, n, rows].
            at: operation, candidate and row of each path.
            together: whether rows run the stage in lockstep, [paths].
        """
        operation, candidate, row = at
        found = row
        for blocks, of_these in ((self.shared, ~together), (self.lockstep, together)):
            for size, shared in blocks.items():
                here = np.flatnonzero(shared[operation, row] & of_these)
                members = (row[here] // size * size)[:, None] + np.arange(size)
                values = values_ms[operation[here, None], candidate[here, None], members]
                found = found.copy()
                found[here] = members[np.arange(len(here)), values.argmax(axis=1)]
        return found

    def _run(self, terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return operation ends [operations + 1 + p, n, rows] and link times.

        A 0 and each stage's earliest start follow the operations.
        """
        n, rows = len(terms), len(self.steps.counts)
        graph, backwards = self.graph, _backwards(self.graph)
        of_kind = terms[:, :, self.steps.layout.by_feature]
        of_kind = of_kind.reshape(n, self.stages, 6, -1).transpose(1, 2, 0, 3)
        together = self._is_in_lockstep(terms)[graph.stage]
        duration = self._of_block(self._alone_ms(terms), slice(None), together)
        cut = np.where(backwards, graph.stage, graph.stage - 1)
        sent = of_kind[cut, _SEND + backwards]
        sent[graph.source == len(graph)] = 0
        link = np.matmul(sent, self.features)
        if self.delay_ms.any():
            link += self.delay_ms
        end = np.empty((len(graph) + 1 + self.stages, n, rows))
        end[len(graph)] = 0.0
        end[len(graph) + 1 :] = self._exposed(terms)[0].ms.transpose(1, 0, 2)
        for first, stop in pairwise(graph.levels):
            level = slice(first, stop)
            start = end[graph.source[level]]
            start += link[level]
            np.maximum(start, end[self.before[level]], out=start)
            np.add(self._of_block(start, level, together[level]), duration[level], out=end[level])
        return end, link

    def _alone_ms(self, terms: np.ndarray) -> np.ndarray:
        """Return operation times on each row without waits for others. [operations, n, rows]"""
        of_kind = terms[:, :, self.steps.layout.by_feature]
        of_kind = of_kind.reshape(len(terms), self.stages, 6, -1).transpose(1, 2, 0, 3)
        return np.matmul(of_kind[self.graph.stage, _backwards(self.graph)], self.features)

    def _of_block(
        self, values_ms: np.ndarray, chosen: slice | np.ndarray, together: np.ndarray
    ) -> np.ndarray:
        """Return the maximum over rows that run an operation together. [operations, n, rows]

        Args:
            values_ms: [chosen operations, n, rows].
            chosen: operations.
            together: whether rows run them in lockstep, [operations, n].
        """
        if not together.any():
            return _most_of_blocks(values_ms, self.shared, chosen)
        lockstep_ms = _most_of_blocks(values_ms, self.lockstep, chosen)
        if together.all():
            return lockstep_ms
        shared_ms = _most_of_blocks(values_ms, self.shared, chosen)
        return np.where(together[..., None], lockstep_ms, shared_ms)

    def _exposed(self, terms: np.ndarray) -> tuple["_Exposed", "_Exposed"]:
        """Return the exposed all-gather of first forwards and reduction of last backwards."""
        layout, counts = self.steps.layout, self.steps.counts
        gather = layout.gather, layout.first_gather
        reduction = layout.reduction, layout.last_reduction
        return (
            self._exposed_beside(terms, _FORWARD, gather, np.zeros_like(counts)),
            self._exposed_beside(terms, _BACKWARD, reduction, np.maximum(counts - 1, 0)),
        )

    def _exposed_beside(
        self, terms: np.ndarray, block: int, exchange: tuple[int, int], micro_batch: np.ndarray
    ) -> "_Exposed":
        """Return the exposed time of an exchange overlapped by one pass of each row.

        Rows that run the pass together overlap like the slowest row.

        Args:
            block: index of the pass's time term.
            exchange: terms of the whole exchange and of one bucket's.
            micro_batch: of the pass, [rows].
        """
        share_block = {_FORWARD: _FORWARD_SHARE, _BACKWARD: _BACKWARD_SHARE}[block]
        of_kind = terms[:, :, self.steps.layout.by_feature].reshape(*terms.shape[:2], 6, -1)
        hiding = (of_kind[:, :, block] - of_kind[:, :, share_block]).transpose(1, 0, 2)
        rows = np.arange(len(micro_batch))
        hidden_ms = hiding @ self.steps.features[rows, micro_batch].T
        if self.lockstep:
            together = self._is_in_lockstep(terms)
            for number in np.unique(micro_batch).tolist():
                of_rows, passes = micro_batch == number, self.passes[block, number]
                alone_ms = np.matmul(hiding, self.features[passes])
                hidden_ms[..., of_rows] = self._of_block(alone_ms, passes, together)[..., of_rows]
        whole_ms = terms[:, :, exchange[0], None] - hidden_ms.transpose(1, 0, 2)
        one_ms = terms[:, :, exchange[1], None]
        return _Exposed(
            ms=np.maximum(whole_ms, one_ms),
            whole=whole_ms > one_ms,
            operation=self.passes[block, micro_batch].T,
            block=block,
            share_block=share_block,
            whole_term=exchange[0],
            one_term=exchange[1],
        )

    def _finish_ms(self, end: np.ndarray, terms: np.ndarray) -> np.ndarray:
        """Return every stage's reduction end, counting this rank only. [n, steps, ranks, p]"""
        reduced_ms = end[self.last].transpose(1, 0, 2) + self._exposed(terms)[1].ms
        return reduced_ms[:, :, self.steps.rows].transpose(0, 2, 3, 1)


def _backwards(graph: OperationGraph) -> np.ndarray:
    """Return 1 for backwards, 0 for forwards. [operations]"""
    return (graph.kind == Pass.BACKWARD).astype(np.int64)


def _passes(graph: OperationGraph) -> np.ndarray:
    """Return operation indices by kind, micro-batch and stage. [2, m, p]"""
    passes = np.empty((2, graph.schedule.micro_batches, graph.schedule.stages), np.int64)
    passes[_backwards(graph), graph.micro_batch, graph.stage] = np.arange(len(graph))
    return passes


def _by_size(sizes: np.ndarray) -> dict[int, np.ndarray]:
    """Return masks of block sizes above 1. [operations, rows] each"""
    return {size: sizes == size for size in np.unique(sizes[sizes > 1]).tolist()}


def _most_of_blocks(
    values_ms: np.ndarray, blocks: Mapping[int, np.ndarray], chosen: slice | np.ndarray
) -> np.ndarray:
    """Return the block maximum of `values_ms` [chosen operations, n, rows] on each row; `blocks`
    has masks by block size, [operations, rows]."""
    for size, of_size in blocks.items():
        is_block = of_size[chosen]
        if is_block.any():
            left = values_ms.reshape(*values_ms.shape[:2], -1, size)
            while (half := left.shape[3] // 2) > 0:
                # For odd sizes the middle row is in both halves.
                left = np.maximum(left[..., : left.shape[3] - half], left[..., half:])
            largest = np.repeat(left[..., 0], size, axis=2)
            values_ms = np.where(is_block[:, None], largest, values_ms)
    return values_ms


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Exposed:
    """Exposed time of an exchange overlapped by a pass."""

    ms: np.ndarray
    """Exposed time, [n, p, rows]."""
    whole: np.ndarray
    """Whether it is the whole exchange minus overlap, not the last bucket alone, [n, p, rows]."""
    operation: np.ndarray
    """Overlapping pass, [p, rows]."""
    block: int
    share_block: int
    whole_term: int
    one_term: int
