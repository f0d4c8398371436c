"""Step times of many candidate pipelines at once, and the critical paths that prove them.

A step's time is the longest path through its operations, so the length of any path, with any
durations, is a lower bound of it; with the durations that made the path critical it is the time.
A path's length is a sum over stages of terms that are linear in what the stage costs, so one found
for one candidate bounds every other at the price of a dot product.

What a stage costs is a vector of terms, as `TermLayout` has them: coefficients over the features of
a micro-batch, of its forward, of its backward, of the activation it sends on and of the gradient it
receives for that, of a bucket's share of its forward and backward, then exchanges and optimizer in
ms. A path's weights are laid out alike. A path begins with the gather of all weights, on which a
bucket's share of the stage's first forward follows, or with that of the first bucket and the whole
forward; it ends with the reduction of all gradients after a share of the last backward, or with
that of the last bucket after all of it (`omnibal.pipeline.stage_cost.PerStepCosts`). Where ranks
run that forward or backward together, it hides as much as it lasts, by the slowest of them.

Ranks that share a pack start every pass of it together, when the last of them can, and take as long
as the slowest. A path then goes on with the rank that was the last, or takes the time of the
slowest: it is a sum of the same terms. So it is with ranks that share out experts, but in stages
that hold experts alone: a path that has gone over to another rank there is none of a candidate
whose stage holds no experts. It counts against that candidate so much that it bounds nothing, by a
term that is 1 in stages without experts. Costs and features are of all levels, one after another
(`omnibal.pipeline.level_costs`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.operation_graph import (
    OperationGraph,
    planned_graph,
    require_in_order,
    require_prefix_closed,
)
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.workload import Workload

_CHUNK_ENTRIES = 1_000_000
"""Entries of [operations, candidates, rows] computed at a time: bounds memory."""
_NO_PATH_MS = -1e12
"""Length of a path that a candidate does not have; far below any, and exact beside other times."""
_NEVER_MS = -1e30
"""Arrival at a micro-batch that does not exist, which waits for nothing."""


def _by_feature(first: int, blocks: int = 1) -> property:
    """Places of terms that are by feature."""
    return property(
        lambda layout: slice(first * layout.features, (first + blocks) * layout.features)
    )


def _of_stage(number: int) -> property:
    """Place of a term that is one number of a stage."""
    return property(lambda layout: 6 * layout.features + number)


@dataclass(frozen=True, slots=True)
class TermLayout:
    """Places of the terms of what a stage costs."""

    features: int
    """Number of features of a micro-batch."""
    has_experts: bool = False
    """Whether the model has experts, and stages a term that says which hold none."""

    @classmethod
    def of(cls, cost: CostModel) -> "TermLayout":
        """The layout of a model's costs."""
        return cls(len(cost.features), bool(cost.in_lockstep.any()))

    @classmethod
    def of_length(cls, length: int) -> "TermLayout":
        """The layout of so many terms."""
        features, more = divmod(length - 5, 6)
        return cls(features, bool(more))

    def __len__(self) -> int:
        return 6 * self.features + 5 + self.has_experts

    forward = _by_feature(0)
    """Time of a forward; this and the next three are by feature."""
    backward = _by_feature(1)
    """Time of a backward."""
    send = _by_feature(2)
    """Time of the link to the next stage."""
    receive = _by_feature(3)
    """Time of the link back from it."""
    forward_share = _by_feature(4)
    """Part of a forward that uses one bucket of weights."""
    backward_share = _by_feature(5)
    """Part of a backward that makes one bucket of gradients."""
    by_feature = _by_feature(0, 6)
    """All of these together."""
    reduction = _of_stage(0)
    """Time of the gradient reduction, and of a tied matrix's after it."""
    last_reduction = _of_stage(1)
    """Time of the last bucket's part of it."""
    gather = _of_stage(2)
    """Time to gather the weights."""
    first_gather = _of_stage(3)
    """Time to gather the first bucket of them."""
    optimizer = _of_stage(4)
    """Time of the weight update."""
    without_experts = _of_stage(5)
    """1 where the stage holds no experts, else 0; only where the model has any."""


_FORWARD, _BACKWARD, _SEND, _FORWARD_SHARE, _BACKWARD_SHARE = 0, 1, 2, 4, 5
"""Blocks of the layout."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledSteps:
    """Steps to simulate. A row is what one data-parallel rank runs; equal rows are kept once.

    Where ranks share packs, rows are in blocks as large as the largest of theirs, and it is equal
    blocks that are kept once.
    """

    features: np.ndarray
    """Features of every micro-batch, [rows, m, features]; 0 where a row has no such micro-batch."""
    counts: np.ndarray
    """Number of micro-batches, [rows]."""
    rows: np.ndarray
    """Row that each rank of a step runs, [steps, ranks]."""
    weight: np.ndarray
    """Weight of every step, [steps], 1 in all."""
    context: np.ndarray
    """Rows that share the micro-batch, an aligned block of them, [rows, m]."""
    lockstep_ranks: int
    """Rows that run stages with experts in lockstep, an aligned block of them."""
    layout: TermLayout
    """Layout of the terms of what a stage costs on these steps."""

    @classmethod
    def of(cls, workload: Workload, cost: CostModel) -> "SampledSteps":
        """All steps of the workload, with features as `cost` has them."""
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
        # A micro-batch may be nothing but zeros, so the number of them tells rows apart, too.
        keys = np.column_stack([counts, table.reshape(len(counts), -1)])
        if block > 1:
            keys = np.column_stack([keys, context.reshape(len(counts), -1)])
            keys = keys.reshape(-1, block * keys.shape[1])
        whole = np.dtype((np.void, keys.itemsize * keys.shape[1]))
        _, first, kind = np.unique(keys.view(whole).ravel(), return_index=True, return_inverse=True)
        # A step lasts as long with its blocks in any order.
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
    """The planned schedule on p stages over sampled steps."""

    steps: SampledSteps
    graph: OperationGraph
    """Operations sorted by depth: none needs another of the same depth."""
    features: np.ndarray
    """Features of the operation's micro-batch, [operations, features, rows]."""
    delay_ms: np.ndarray
    """Delay besides the link, [operations, 1, rows]: 0, or `_NEVER_MS` where a row lacks it."""
    passes: np.ndarray
    """Forwards (0) and backwards (1) of every micro-batch and stage, [2, m, p]."""
    last: np.ndarray
    """Last operation of every stage, [p]."""
    before: np.ndarray
    """Operation that its stage runs before each one, [operations]; before stage s's first one, the
    number of operations + 1 + s."""
    shared: Mapping[int, np.ndarray]
    """Whether so many rows run the operation together, [operations, rows], by size of the blocks;
    only where there are any."""
    lockstep: Mapping[int, np.ndarray]
    """Rows that run the operation together in stages with experts, as they share these out."""

    @classmethod
    def of(cls, steps: SampledSteps, stages: int) -> "PipelineSimulator":
        """The schedule of `stages` stages."""
        graph = planned_graph(stages, steps.features.shape[1])
        require_in_order(graph)
        missing = graph.micro_batch[:, None] >= steps.counts
        firsts = graph.before == len(graph)
        context = steps.context.T[graph.micro_batch]
        grouped = np.maximum(context, steps.lockstep_ranks if steps.layout.has_experts else 1)
        if missing.any():
            require_prefix_closed(graph.schedule)
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
        """Number of pipeline stages."""
        return self.graph.schedule.stages

    @property
    def operations(self) -> int:
        """Number of operations, of all rows of the steps."""
        return len(self.graph) * len(self.steps.counts)

    def step_ms(self, terms: np.ndarray) -> np.ndarray:
        """Mean step time of candidates [n, p, terms]. [n]"""
        return np.concatenate([self._step_ms(chunk) for chunk in self._chunks(terms)])

    def critical_paths(self, terms: np.ndarray) -> np.ndarray:
        """Weights of a longest path of every step, mean over the steps. [n, p, terms]

        Their product with the candidate's own terms [n, p, terms] is its mean step time; with any
        other's it is at most that one's.
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
        """Weights of a longest path of every step, followed back from its end."""
        end, link = self._run(terms)
        alone_ms, ready_ms = self._of_rows(terms, end, link)
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
            """Add what is exposed at an end of paths, each at (candidate, step, stage, row)."""
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

    def _of_rows(
        self, terms: np.ndarray, end: np.ndarray, link: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Time of every operation on each row, and when the row can start it; [operations, n, rows]
        each, or nothing where no rows share any."""
        if not self.lockstep:
            return np.empty((0, 0, 0)), np.empty((0, 0, 0))
        ready_ms = np.maximum(end[self.graph.source] + link, end[self.before])
        return self._alone_ms(terms), ready_ms

    def _is_in_lockstep(self, terms: np.ndarray) -> np.ndarray:
        """Whether rows that share out experts run each stage in lockstep, by candidate. [p, n]"""
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
        """Rows of the same blocks in which a value is the largest. [paths]

        Args:
            values_ms: [operations, n, rows].
            at: operation, candidate and row that each path has come to.
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
        """End of operations [operations + 1 + p, n, rows], and their links' times.

        After the operations come a 0 and the time at which each stage has weights to begin with.
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
        """Time of operations on each row, had it no others to wait for. [operations, n, rows]"""
        of_kind = terms[:, :, self.steps.layout.by_feature]
        of_kind = of_kind.reshape(len(terms), self.stages, 6, -1).transpose(1, 2, 0, 3)
        return np.matmul(of_kind[self.graph.stage, _backwards(self.graph)], self.features)

    def _of_block(
        self, values_ms: np.ndarray, chosen: slice | np.ndarray, together: np.ndarray
    ) -> np.ndarray:
        """The largest value of the rows that run an operation together, on each. [operations, n,
        rows]

        Args:
            values_ms: of the chosen operations, [operations, n, rows].
            chosen: which operations these are.
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
        """What the first forwards do not hide of the gather, and the last backwards of the
        reduction."""
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
        """What one pass of each row does not hide of an exchange of candidates [n, p, terms].

        Rows that run the pass together hide as much as the slowest of them, which it lasts for.

        Args:
            block: of the pass's time.
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
        """End of every stage's reduction, did it wait for this rank alone. [n, steps, ranks, p]"""
        reduced_ms = end[self.last].transpose(1, 0, 2) + self._exposed(terms)[1].ms
        return reduced_ms[:, :, self.steps.rows].transpose(0, 2, 3, 1)


def _backwards(graph: OperationGraph) -> np.ndarray:
    """Whether each operation is a backward (1) or a forward (0). [operations]"""
    return (graph.kind == Pass.BACKWARD).astype(np.int64)


def _passes(graph: OperationGraph) -> np.ndarray:
    """Operations by kind, micro-batch and stage, [2, m, p]."""
    passes = np.empty((2, graph.schedule.micro_batches, graph.schedule.stages), np.int64)
    passes[_backwards(graph), graph.micro_batch, graph.stage] = np.arange(len(graph))
    return passes


def _by_size(sizes: np.ndarray) -> dict[int, np.ndarray]:
    """Where blocks have each size above 1. [operations, rows] each"""
    return {size: sizes == size for size in np.unique(sizes[sizes > 1]).tolist()}


def _most_of_blocks(
    values_ms: np.ndarray, blocks: Mapping[int, np.ndarray], chosen: slice | np.ndarray
) -> np.ndarray:
    """The largest value of every block of rows, on each of them. [operations, n, rows]

    Args:
        values_ms: of the chosen operations, [operations, n, rows].
        blocks: where there are any of each size, [operations, rows].
    """
    for size, of_size in blocks.items():
        is_block = of_size[chosen]
        if is_block.any():
            left = values_ms.reshape(*values_ms.shape[:2], -1, size)
            while (half := left.shape[3] // 2) > 0:
                # Of an odd number, the middle one is in both halves.
                left = np.maximum(left[..., : left.shape[3] - half], left[..., half:])
            largest = np.repeat(left[..., 0], size, axis=2)
            values_ms = np.where(is_block[:, None], largest, values_ms)
    return values_ms


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Exposed:
    """What a pass does not hide of the exchange beside it."""

    ms: np.ndarray
    """Exposed time, [n, p, rows]."""
    whole: np.ndarray
    """Whether it is the whole exchange less what is hidden, and not the one bucket that nothing
    can hide, [n, p, rows]."""
    operation: np.ndarray
    """The pass that it is beside, [p, rows]."""
    block: int
    share_block: int
    whole_term: int
    one_term: int
