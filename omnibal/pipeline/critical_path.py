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
(`omnibal.cost.model.side_by_side`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.cost.model import CostModel
from omnibal.pipeline.operation_graph import schedule_graph
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.simulate import (
    Joins,
    OrderedPass,
    SimulatedRows,
    block_sizes,
    order_passes,
    run_passes,
)
from omnibal.pipeline.stage_cost import PerStepCosts
from omnibal.pipeline.workload import Workload

_MAX_BATCH_OPERATIONS = 1_000_000  # entries of [operations, candidates, rows]: about 50 MB
_NO_PATH_MS = -1e12  # length of a path a candidate lacks: far below any, exact in sums with times


# A stage's terms: six blocks of one term per feature, then terms of the stage itself.
def _by_feature(first: int, blocks: int = 1) -> property:
    return property(
        lambda layout: slice(first * layout.features, (first + blocks) * layout.features)
    )


def _of_stage(number: int) -> property:
    return property(lambda layout: 6 * layout.features + number)


@dataclass(frozen=True, slots=True)
class TermLayout:
    """Indices of a stage's cost terms."""

    features: int
    has_experts: bool = False  # whether any unit runs in lockstep; adds `without_experts`

    @classmethod
    def build(cls, cost: CostModel) -> "TermLayout":
        return cls(len(cost.features), bool(cost.in_lockstep.any()))

    def __len__(self) -> int:
        return 6 * self.features + 7 + self.has_experts

    forward = _by_feature(0)  # forward time; this and the next five are per feature
    backward = _by_feature(1)
    send = _by_feature(2)  # P2P time of the activation to the next stage
    receive = _by_feature(3)  # P2P time of the gradient from it
    forward_share = _by_feature(4)  # forward time using one bucket of weights
    backward_share = _by_feature(5)  # backward time producing one bucket of gradients
    by_feature = _by_feature(0, 6)  # all per-feature terms
    reduction = _of_stage(0)  # gradient reduction time
    last_reduction = _of_stage(1)  # reduction time of the last bucket
    tied = _of_stage(2)  # reduction time of the tied matrix, after all buckets
    gather = _of_stage(3)  # weight all-gather time
    first_gather = _of_stage(4)  # all-gather time of the first bucket
    optimizer = _of_stage(5)
    buckets = _of_stage(6)  # number of buckets; on no path
    without_experts = _of_stage(7)  # 0 if the stage runs in lockstep, else 1; absent if none may

    def split_terms(self, terms: np.ndarray) -> tuple["PartTerms", PerStepCosts]:
        """Return the costs per part and per step of candidates [n, p, terms] in 1F1B."""
        by_feature = terms[..., self.by_feature].reshape(*terms.shape[:2], 6, -1).swapaxes(1, 2)
        return PartTerms(
            passes=by_feature[:, :2],
            links=by_feature[:, 2:4, :-1],
            has_experts=terms[..., self.without_experts] == 0 if self.has_experts else None,
        ), PerStepCosts(
            reduction_ms=terms[..., self.reduction],
            gather_ms=terms[..., self.gather],
            buckets=terms[..., self.buckets],
            tied_ms=terms[..., self.tied],
            update_ms=terms[..., self.optimizer],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledSteps:
    """Steps to simulate. A row is one data-parallel rank's micro-batches; equal rows are stored
    once, or equal blocks of rows if ranks share packs."""

    features: np.ndarray  # features of every micro-batch, [rows, m, features], zeros if missing
    counts: np.ndarray  # micro-batches of every row, [rows]
    rows: np.ndarray  # row of each rank, [steps, ranks]
    weight: np.ndarray  # weight of every step, [steps], summing to 1
    context: np.ndarray  # context-parallel size of every micro-batch, [rows, m]
    lockstep_ranks: int  # size of the row blocks in lockstep, due to experts or sharding
    layout: TermLayout

    @property
    def first_features(self) -> np.ndarray:
        """Features of every row's first micro-batch. [rows, features]"""
        return self.features[:, 0]

    @property
    def last_features(self) -> np.ndarray:
        """Features of every row's last micro-batch. [rows, features]"""
        return self.features[np.arange(len(self.counts)), np.maximum(self.counts - 1, 0)]

    @classmethod
    def build(cls, workload: Workload, cost: CostModel) -> "SampledSteps":
        """Return the workload's distinct steps, weighted, with the features of `cost`."""
        _, step_index = np.unique(workload.step, return_inverse=True)
        ranks = workload.data_parallel_size
        block = max(int(workload.context.max()), workload.lockstep_ranks)
        of_packs = workload.features_of(cost)
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
        # Rows as bytes: np.unique(axis=0) compares column by column, which is slow.
        row_type = np.dtype((np.void, keys.itemsize * keys.shape[1]))
        _, first, kind = np.unique(
            keys.view(row_type).ravel(), return_index=True, return_inverse=True
        )
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
            layout=TermLayout.build(cost),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartTerms:
    """Per-feature coefficients of every part of C candidates."""

    passes: np.ndarray  # by the kinds of the schedule, [C, kinds, k, f]
    links: np.ndarray  # P2P links to the next part and back, [C, 2, k - 1, f]
    has_experts: np.ndarray | None = None  # whether each part runs in lockstep, [C, k]

    def __len__(self) -> int:
        return len(self.passes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PipelineSimulator:
    """A schedule over sampled steps, for C candidates at once."""

    steps: SampledSteps
    schedule: PipelineSchedule
    stages: int
    features: np.ndarray  # features of every micro-batch, [m, f, rows]
    delay_ms: np.ndarray  # 0, or -inf for missing micro-batches, which wait for nothing, [m, rows]

    @classmethod
    def build(
        cls, steps: SampledSteps, stages: int, schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
    ) -> "PipelineSimulator":
        missing = np.arange(steps.features.shape[1])[:, None] >= steps.counts
        return cls(
            steps=steps,
            schedule=schedule,
            stages=stages,
            # Rows last: every operation of the simulation runs on contiguous vectors of rows.
            features=np.ascontiguousarray(steps.features.transpose(1, 2, 0)),
            delay_ms=np.where(missing, -np.inf, 0.0),
        )

    @property
    def operations(self) -> int:
        """Operations per candidate, over all rows."""
        per_micro_batch = len(self.schedule.passes) * self.stages * self.schedule.chunks
        return per_micro_batch * int(self.steps.counts.sum())

    def step_ms(self, terms: PartTerms, once: PerStepCosts) -> np.ndarray:
        """Return the mean step time of every candidate, given its costs [C, p]. [C]"""
        mean_ms = []
        for batch in self._batches(len(terms)):
            some, costs = rows_of(terms, batch), rows_of(once, batch)
            rows = self._rows(some)
            of_rows = rows_of(costs, np.repeat(np.arange(len(some)), len(self.steps.counts)))
            timeline = rows.simulate(rows.first_waits_ms(of_rows))
            reduced_ms = timeline.finish_ms + rows.exposed_ms(of_rows, timeline)  # [C * rows, p]
            row_ms = reduced_ms.max(axis=1).reshape(len(some), -1)
            # A step's slowest rank, then the slowest stage's update: [C, steps].
            step_ms = row_ms[:, self.steps.rows].max(axis=2) + costs.update_ms.max(axis=1)[:, None]
            mean_ms.append(step_ms @ self.steps.weight)
        return np.concatenate(mean_ms)

    def _batches(self, candidates: int) -> list[slice]:
        at_once = max(_MAX_BATCH_OPERATIONS // self.operations, 1)
        return [slice(first, first + at_once) for first in range(0, candidates, at_once)]

    def _rows(self, terms: PartTerms) -> SimulatedRows:
        """Return the rows of every candidate. [C * rows]"""
        n, counts = len(terms), self.steps.counts
        context = np.tile(self.steps.context.T[:, None], n)
        has_experts = terms.has_experts
        if has_experts is not None:
            has_experts = np.repeat(has_experts.T, len(counts), axis=1)
        return SimulatedRows(
            schedule=self.schedule,
            pass_ms=self._ms(terms.passes),
            link_ms=self._ms(terms.links) + np.tile(self.delay_ms[:, None], n),
            counts=np.tile(counts, n),
            together=block_sizes(context, self.steps.lockstep_ranks, has_experts),
        )

    def _ms(self, terms: np.ndarray) -> np.ndarray:
        """Return the times of `terms` [C, kinds, k, f] in every row. [kinds, m, k, C * rows]"""
        ms = terms.transpose(1, 2, 0, 3)[:, None] @ self.features[:, None]
        return ms.reshape(*ms.shape[:3], len(terms) * len(self.steps.counts))

    def critical_paths(self, terms: np.ndarray) -> np.ndarray:
        """Return term weights of the critical path in 1F1B, mean over steps. [n, p, terms]

        Their dot product with the candidate's terms [n, p, terms] is its mean step time; with other
        candidates' terms it is a lower bound.
        """
        batches = self._batches(len(terms))
        return np.concatenate([self._critical_paths(terms[batch]) for batch in batches])

    def _critical_paths(self, terms: np.ndarray) -> np.ndarray:
        """Return term weights of the longest path of every step, traced back from its end."""
        layout, steps, n = self.steps.layout, self.steps, len(terms)
        of_parts, once = layout.split_terms(terms)
        rows = self._rows(of_parts)
        candidate = np.repeat(np.arange(n), len(steps.counts))
        of_rows = rows_of(once, candidate)
        ready_ms = rows.first_waits_ms(of_rows).T
        turns = order_passes(schedule_graph(self.schedule, self.stages, len(self.features)))
        end_ms, finish_ms = run_passes(turns, rows.took_ms, rows.link_ms, ready_ms, rows.joins)
        exposed_ms = of_rows.exposed_ms(rows.last_ms).T
        reduced_ms = (finish_ms + exposed_ms).reshape(self.stages, n, -1)[:, :, steps.rows]
        # A path ends at the slowest rank's slowest stage.
        last = np.moveaxis(reduced_ms, 0, -1).reshape(n, len(steps.rows), -1).argmax(axis=2)
        rank, stage = np.divmod(last, self.stages)
        row = steps.rows[np.arange(len(last[0])), rank] + len(steps.counts) * np.arange(n)[:, None]
        share = np.zeros((self.stages, len(candidate)))  # of paths that end here
        np.add.at(share, (stage, row), steps.weight)
        # Only rows that end a path, and rows of their blocks, can be on one.
        size = max(int(steps.context.max()), steps.lockstep_ranks)
        blocks = np.unique(np.flatnonzero(share.any(axis=0)) // size)
        on_path = (blocks[:, None] * size + np.arange(size)).ravel()
        joins = Joins.build(None if rows.together is None else rows.together[..., on_path])
        ready_ms, exposed_ms, share = (x[:, on_path] for x in (ready_ms, exposed_ms, share))
        alone_ms, of_rows = rows.pass_ms[..., on_path], rows_of(of_rows, on_path)
        of_passes, of_links, of_ready, crossed = _trace_back(
            turns,
            alone_ms,
            rows.link_ms[..., on_path],
            ready_ms,
            end_ms[..., on_path],
            joins,
            share,
        )
        # A path has either one bucket's exchange and the full pass, or the full exchange and the
        # pass's share of one bucket, whichever is longer.
        bucket_gather_ms = of_rows.gather_ms / of_rows.buckets
        bucket_reduction_ms = of_rows.reduction_ms / of_rows.buckets + of_rows.tied_ms
        of_gather = of_ready * (ready_ms > bucket_gather_ms.T)
        of_reduction = share * (exposed_ms > bucket_reduction_ms.T)
        hiding = np.zeros_like(of_passes)
        final = np.maximum(rows.counts[on_path] - 1, 0)
        for kind, of_row, hidden in ((0, 0 * final, of_gather), (1, final, of_reduction)):
            for micro_batch in np.unique(of_row).tolist():
                for stage, of_stage in enumerate(np.where(of_row == micro_batch, hidden, 0)):
                    place = kind, micro_batch, stage
                    block = joins.at(place)
                    if block is not None:
                        slowest = block.argmax(alone_ms[place])
                        crossed[stage] += of_stage * (slowest != np.arange(len(slowest)))
                        of_stage = np.bincount(slowest, of_stage, len(slowest))
                    hiding[place] += of_stage
        of_links = np.pad(of_links, ((0, 0), (0, 0), (0, 1), (0, 0)))  # none after the last
        # In the order of the layout's blocks: [rows, p, 6, m] times features [rows, m, f].
        by_feature = np.concatenate([of_passes - hiding, of_links, hiding]).transpose(3, 2, 0, 1)
        by_feature = by_feature.reshape(len(on_path), -1, len(self.features))
        by_feature = by_feature @ self.features[..., on_path % len(steps.counts)].transpose(2, 0, 1)
        begins = np.searchsorted(candidate[on_path], np.arange(n))  # each candidate's first row
        weights = np.zeros(terms.shape)
        weights[..., layout.by_feature] = np.add.reduceat(by_feature, begins).reshape(
            n, self.stages, -1
        )
        of_stages = {
            layout.reduction: of_reduction,
            layout.last_reduction: share - of_reduction,
            layout.tied: share,
            layout.gather: of_gather,
            layout.first_gather: of_ready - of_gather,
        }
        if of_parts.has_experts is not None:
            has_experts = of_parts.has_experts[candidate[on_path]].T
            of_stages[layout.without_experts] = _NO_PATH_MS * crossed * has_experts
        for term, of_stage in of_stages.items():
            weights[..., term] = np.add.reduceat(of_stage, begins, axis=1).T
        weights[np.arange(n), once.update_ms.argmax(axis=1), layout.optimizer] = 1
        return weights


def _trace_back(
    turns: Sequence[OrderedPass],
    alone_ms: np.ndarray,
    link_ms: np.ndarray,
    ready_ms: np.ndarray,
    end_ms: np.ndarray,
    joins: Joins,
    share: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the share of longest paths on every pass, link and stage's begin, and the share that
    switches rows at the stage.

    Args:
        alone_ms: pass times of rows without waits for joined rows, [kinds, m, k, rows].
        end_ms: from `omnibal.pipeline.simulate.run_passes`, as are the shapes of other arguments.
        share: share of paths at the end of every stage, [p, rows].
    """
    of_passes, of_links, crossed = np.zeros_like(end_ms), np.zeros_like(link_ms), 0 * share
    # Shares of paths that reach a stage's next pass to trace, and a pass by its output's receiver.
    of_stages, sent = share.copy(), dict[tuple[int, int, int], np.ndarray]()
    rows = np.arange(share.shape[1])
    for stage, place, before, source, link in reversed(turns):
        shares = of_stages[stage] + sent.pop(place, 0)
        begun = ready_ms[stage] if before is None else end_ms[before]
        arrival = begun if source is None else end_ms[source] + link_ms[link]
        block = joins.at(place)
        if block is None:
            of_passes[place] = shares
        else:
            # Joined rows start with the latest row and take the slowest row's time.
            slowest = block.argmax(alone_ms[place])
            latest = block.argmax(np.maximum(begun, arrival))
            crossed[stage] += shares * ((slowest != rows) | (latest != rows))
            of_passes[place] = np.bincount(slowest, shares, len(rows))
            shares = np.bincount(latest, shares, len(rows))
        if source is not None:
            waits = arrival > begun
            sent[source] = of_links[link] = shares * waits
            shares = shares * ~waits
        of_stages[stage] = shares
    return of_passes, of_links, of_stages, crossed
