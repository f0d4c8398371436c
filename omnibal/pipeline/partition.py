"""Joint search of the pipeline split and of the layers that every stage recomputes.

Objective: the simulated time of a step, mean over sampled steps of the real packs, as
`omnibal.pipeline.simulate.predict_steps` gives it: the planned schedule with every micro-batch's
own durations, the slowest data-parallel rank, gradient reduction and optimizer. Every contiguous
split with at least one layer per stage and all recomputed sets are considered; a stage must fit the
memory cap with all packs of a rank's step that the schedule holds at once, over all packs.

Branch and bound on path lengths (`omnibal.pipeline.bounds`): of the structural paths, and of the
critical paths of splits that were simulated, which are exact there and close for similar splits.

Splits are grown stage by stage, without those whose bound is not below the best step found. Those
that are left at the end are simulated in the order of their bounds; their critical paths join the
bounds of the next round, with those of a sample of what had no room, completed by the bounds. A
round in which everything has room proves the result. Where bounds are not close enough, mostly with
dozens of stages, the work allowed ends first: the result then comes with the bound that is proven,
no matter how fast the machine is.

Packs may be of several levels, each with its own costs and its own recomputed layers in every
stage, and ranks that share one wait for each other. Where a stage has few sets of recomputed layers
over all levels, the proof is over all of them. Where they are too many (`stage_options.py`), the
search is over a grid of them, then over what is near to the best; the bound is that of optimistic
sets, by which all are covered, so that a gap remains.

Memory is first looked at in the passes that are heaviest for many stages. More splits fit these few
than fit all of the run's, so a bound over them holds, and the best is the best where it fits all
passes, too; where it does not, it is searched for again with its own heaviest ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.config import ModelConfig
from omnibal.cost.model import CostModel
from omnibal.errors import DoesNotFit
from omnibal.pipeline.bounds import Structure, least_largest, least_sums
from omnibal.pipeline.critical_path import PipelineSimulator, SampledSteps
from omnibal.pipeline.least_peak import (
    least_peak_of_splits,
    least_peak_of_tables,
    peak_beside_cap,
)
from omnibal.pipeline.operation_graph import planned_graph
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_memory import (
    GIB,
    fits_cap,
    heaviest_passes,
    often_heaviest_tables,
    recomputed_at_levels,
)
from omnibal.pipeline.stage_options import (
    Choices,
    SearchProblem,
    StageOptions,
    choices_within,
    options_near,
    recompute_extremes_ms,
)
from omnibal.pipeline.units import stages_from_cuts, unit_counts
from omnibal.pipeline.workload import Workload

MAX_SAMPLED_STEPS = 32
_MIN_SAMPLED_STEPS = 4
_SAMPLED_PACKS = 2_048
"""Packs to sample: steps are added until they hold this many, within the two limits above."""
_TOLERANCE = 1e-9
"""Relative improvement below which a better split is not searched for."""
_FIRST_LIMIT = 1.15
"""First time limit, relative to an even split's; stages that alone take longer are left out until
it proves too low."""
_SLOWEST_SLACK = 1.02
"""First limit of an estimate, relative to the slowest stage of the split whose slowest is fastest,
if that is more."""
_LIMIT_STEP = 1.3
"""Factor by which the limit grows while no split is within it."""
_MAX_LIMITS = 16
"""Limits that are tried before the search goes on without one."""
_SEED_SLACKS = (0.0, 0.003, 0.01, 0.03)
"""Relative slack of the slowest stage of a first split over the fastest possible one."""
_MAX_ROUNDS = 60
_FIRST_WIDTH = 1_000
_MAX_WIDTH = 8_000
"""Partial splits kept at a time while splits are grown, doubled from round to round."""
_SAMPLE = 64
"""Splits that are simulated in a round, and at a time."""
_MIN_LEARNED, _MAX_LEARNED = 6, 16
"""Critical paths added in a round."""
_DROPPED = 4
"""Partial splits without room that are completed, per stage."""
_MAX_NEIGHBOURS = 512
"""Small changes of a split that are simulated before no better one is expected."""
_FEW = 1_024
"""Number of remaining splits up to which all are simulated."""
_MAX_STALE = 2
"""Rounds of full width in a row that may leave the proven bound as it is."""
_LEAST_RISE = 1e-5
"""Relative rise that counts as a higher bound."""
_WIDENING_RISE = 0.1
"""Share of the gap; while the bound rises by it in a round, the width stays."""
_MAX_DESCENT_WORK, _MAX_WORK = 2e8, 8e8
"""Path lengths that are computed, or as much other work, to improve a first split and to prove a
result: a second or two, and some seconds."""
_SIMULATED_WORK, _LEARNED_WORK = 3, 6
"""Work of one operation in path lengths: when simulated, and when traced for a critical path."""
_MAX_CHANGES = 20
"""Times that the sets near to the best ones are searched."""
_CHUNK_ENTRIES = 8_000_000
"""Entries of [partial splits, paths] computed at a time: bounds memory."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchResult:
    """The best stages, and how good they are proven to be."""

    stages_at: tuple[tuple[Stage, ...], ...]
    """The stages with the layers that they recompute at each level."""
    step_ms: float
    """Simulated step time, mean over the sampled steps."""
    lower_bound_ms: float
    """Proven bound over all splits and recomputed sets that fit; `step_ms` if the search ended."""
    simulated: int
    """Candidates that were simulated."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages at the first level, which is the only one where packs have no levels."""
        return self.stages_at[0]

    @property
    def gap(self) -> float:
        """Share of `step_ms` by which a better result may be faster; 0 where there is none."""
        return 1 - self.lower_bound_ms / self.step_ms if self.step_ms else 0.0


def search_stages(
    cost: CostModel,
    model: ModelConfig,
    workload: Workload,
    pipeline_size: int,
    memory_cap_bytes: float,
    *,
    prove: bool = True,
    effort: float = 1.0,
) -> SearchResult:
    """The stages of least simulated step time that are found, and what is proven of them.

    Args:
        cost: of all levels of the workload (`omnibal.pipeline.level_costs.side_by_side`).
        pipeline_size: stages; at most as many as the model has layers.
        memory_cap_bytes: of one device.
        prove: False to end with a good split: a fraction of the time, and a bound that is of the
            slowest stage alone.
        effort: share of the usual work after which improving and proving end, each with what it
            has; a small search ends before.

    Raises:
        DoesNotFit: no split fits the cap.
    """
    problem = _problem(cost, model, workload, pipeline_size, memory_cap_bytes)

    def least_peak(cap_bytes: float | None) -> float:
        if problem.levels > 1:
            return least_peak_of_tables(problem.structure.runs, problem.tables)
        if cap_bytes is None:
            return least_peak_of_splits(cost, model, workload, pipeline_size)
        return peak_beside_cap(cost, model, workload, pipeline_size, cap_bytes)

    heavier: SearchProblem | None = problem
    while heavier is not None:
        problem = heavier
        search = _descend(problem, effort, least_peak)
        heavier = _heavier(problem, cost, workload, _stages_at(problem, search.best_options))
        if heavier is None:
            found = _found(problem, search, prove, effort)
            heavier = _heavier(problem, cost, workload, found.stages_at)
    return found


def estimated_step_ms(
    cost: CostModel,
    model: ModelConfig,
    workload: Workload,
    pipeline_size: int,
    memory_cap_bytes: float,
    effort: float,
) -> float:
    """Simulated step time of a good split, in a fraction of what `search_stages` takes: memory is
    looked at in few passes, and nothing is proven.

    Raises:
        DoesNotFit: no split fits the cap.
    """
    problem = _problem(cost, model, workload, pipeline_size, memory_cap_bytes)
    limit_ms = max(_FIRST_LIMIT * _even_ms(problem), _SLOWEST_SLACK * problem.structure.slowest_ms)

    def least_peak(cap_bytes: float | None) -> float:
        return least_peak_of_tables(problem.structure.runs, problem.tables)

    return _first_split(problem, limit_ms, effort, least_peak)[0].best_ms


def _found(problem: SearchProblem, search: "_Search", prove: bool, effort: float) -> SearchResult:
    """The best stages by the problem's own memory tables."""
    complete = search.choices.complete
    if prove:
        lower_bound_ms = search.prove(effort * (_MAX_WORK if complete else _MAX_DESCENT_WORK))
    else:
        lower_bound_ms = search.quick_bound_ms()
    best, best_ms, simulated = search.best_options, search.best_ms, search.simulated
    if not complete:
        best, best_ms, more = _changed(problem, search)
        optimistic = search.over_optimistic(best_ms)
        lower_bound_ms = (
            optimistic.prove(effort * _MAX_WORK) if prove else optimistic.quick_bound_ms()
        )
        simulated += more + optimistic.simulated
    return SearchResult(
        stages_at=_stages_at(problem, best),
        step_ms=best_ms,
        lower_bound_ms=min(lower_bound_ms, best_ms),
        simulated=simulated,
    )


def _stages_at(
    problem: SearchProblem, best: Sequence[StageOptions]
) -> tuple[tuple[Stage, ...], ...]:
    """The stages of a split at every level; `best` has one option of each."""
    cuts = [int(option.end[0]) for option in best[:-1]]
    recomputed = [np.split(option.recomputed[0], problem.levels) for option in best]
    return tuple(
        stages_from_cuts(problem.model, cuts, [of_stage[level].tolist() for of_stage in recomputed])
        for level in range(problem.levels)
    )


def _changed(problem: SearchProblem, search: "_Search") -> tuple[list[StageOptions], float, int]:
    """The best split with the best of the sets that differ little from its own, its time, and the
    splits simulated."""
    best, best_ms, simulated = search.best_options, search.best_ms, 0
    for _ in range(_MAX_CHANGES):
        options = [options_near(problem, *each) for each in enumerate(best)]
        near = _Search(problem, Choices(fitting=options, optimistic=options, complete=False))
        near.cuts = search.cuts
        near.descend()
        simulated += near.simulated
        if near.best_ms >= best_ms * (1 - _TOLERANCE):
            break
        best, best_ms = near.best_options, near.best_ms
    return best, best_ms, simulated


def _heavier(
    problem: SearchProblem,
    cost: CostModel,
    workload: Workload,
    stages_at: Sequence[Sequence[Stage]],
) -> SearchProblem | None:
    """The problem with passes in which stages that were found do not fit; None if they all fit."""
    counts = np.stack([unit_counts(cost.kinds, stage) for stage in stages_at[0]])
    recomputed = recomputed_at_levels(cost.kinds, stages_at)
    heaviest = heaviest_passes(cost, workload, counts, recomputed)
    peaks = [
        table.peak_bytes(*each) for table, *each in zip(heaviest, counts, recomputed, strict=True)
    ]
    if fits_cap(np.array(peaks), problem.memory_cap_bytes).all():
        return None
    tables = [few.joined(more) for few, more in zip(problem.tables, heaviest, strict=True)]
    return replace(problem, tables=tables)


def sampled_steps(workload: Workload) -> Workload:
    """The steps that are simulated: at most 32 of the run's, and fewer the more packs they have."""
    packs_per_step = len(workload.step) / len(np.unique(workload.step))
    wanted = np.clip(_SAMPLED_PACKS / packs_per_step, _MIN_SAMPLED_STEPS, MAX_SAMPLED_STEPS)
    return workload.some_steps(int(wanted))


def _problem(
    cost: CostModel,
    model: ModelConfig,
    workload: Workload,
    pipeline_size: int,
    memory_cap_bytes: float,
) -> SearchProblem:
    simulator = PipelineSimulator.of(SampledSteps.of(sampled_steps(workload), cost), pipeline_size)
    structure = Structure.of(cost, model, simulator.steps, pipeline_size)
    return SearchProblem(
        model=model,
        structure=structure,
        tables=often_heaviest_tables(cost, workload, pipeline_size),
        memory_cap_bytes=memory_cap_bytes,
        simulator=simulator,
        extreme_ms=recompute_extremes_ms(simulator.steps, structure.recompute_ms, cost.levels),
        levels=cost.levels,
        same_at_levels=workload.in_step > 1,
    )


def _descend(
    problem: SearchProblem, effort: float, least_peak: Callable[[float | None], float]
) -> "_Search":
    """A search with a good split, over all options that are not too slow to be in a better one.

    Args:
        effort: as in `search_stages`.
        least_peak: least memory of the fullest stage over all splits; beside a cap, what tells
            whether any fits it.

    Raises:
        DoesNotFit: no split fits the cap.
    """
    first_ms = _FIRST_LIMIT * _even_ms(problem)
    search, limit_ms = _first_split(problem, first_ms, effort, least_peak)
    return search if search.best_ms <= limit_ms else search.with_options_of_better()


def _first_split(
    problem: SearchProblem,
    limit_ms: float,
    effort: float,
    least_peak: Callable[[float | None], float],
) -> tuple["_Search", float]:
    """A search with a good split over all options within a limit, the first one that some are
    within, and that limit.

    Args:
        limit_ms: the first that is tried.

    Raises:
        DoesNotFit: no split fits the cap.
    """
    for tried in range(_MAX_LIMITS + 1):
        limit_ms = limit_ms if tried < _MAX_LIMITS else np.inf
        search = _Search(problem, choices_within(problem, limit_ms))
        if search.descend(effort * _MAX_DESCENT_WORK):
            return search, limit_ms
        if not tried:
            need = least_peak(problem.memory_cap_bytes)
            if not fits_cap(need, problem.memory_cap_bytes):
                break
        limit_ms *= _LIMIT_STEP
    raise DoesNotFit(_infeasible(problem, least_peak(None)))


def _even_ms(problem: SearchProblem) -> float:
    """Time of a step whose stages are equal, without links: the longest chain of operations, with
    forwards as long as backwards."""
    steps, stages = problem.simulator.steps, problem.stages
    counts, row = np.unique(steps.counts, return_inverse=True)
    chain = np.array([planned_graph(stages, count).depths for count in counts.tolist()])[row]
    whole = problem.structure.runs.prefix[-1]
    layout = steps.layout
    work_ms = steps.features.sum(axis=1) @ (whole[layout.forward] + whole[layout.backward])
    row_ms = work_ms * (chain / 2) / np.maximum(steps.counts, 1) / stages
    return float(row_ms[steps.rows].max(axis=1) @ steps.weight)


def _infeasible(problem: SearchProblem, least_peak: float) -> str:
    """The smallest cap that some split would fit, and what else would help."""
    need, cap = least_peak / GIB, problem.memory_cap_bytes / GIB
    return (
        f"{problem.model.name} on {problem.stages} pipeline stages needs {need:.2f} GiB per device "
        f"at best, with recomputation where it helps: {need - cap:.2f} GiB more than the memory "
        f"cap of {cap:.2f} GiB, which must hold every stage; raise the memory cap, use more "
        "pipeline stages or tensor parallelism, or pack to smaller caps"
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Bounds:
    """Cost of each kept option, and of the stages before and after a position, by cut."""

    kept: list[StageOptions]
    costs: list[np.ndarray]
    """Costs of every stage's options, [options, cuts] each."""
    before: list[np.ndarray]
    """Least cost of the stages before each position, [p + 1] of [units + 1, cuts]."""
    after: list[np.ndarray]
    """Least cost of the stages after each position, [p + 1] of [units + 1, cuts]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Partials:
    """The first stages of splits."""

    splits: np.ndarray
    """Indices into the kept options, [n, stages]."""
    position: np.ndarray
    """Position at which the next stage starts, [n]."""
    length: np.ndarray
    """Length of the paths so far, [n, cuts]."""
    bound_ms: np.ndarray
    """Lower bound over all ways to complete them, [n]."""

    def __len__(self) -> int:
        return len(self.splits)

    def take(self, chosen: np.ndarray) -> "_Partials":
        """Some of them, in that order."""
        return _Partials(
            splits=self.splits[chosen],
            position=self.position[chosen],
            length=self.length[chosen],
            bound_ms=self.bound_ms[chosen],
        )


class _Search:
    """Options that may still be in a better split, the best split so far, and the paths known.

    A split is an index into each stage's options. [p]
    """

    def __init__(self, problem: SearchProblem, choices: Choices) -> None:
        self.problem = problem
        self.choices = choices
        self.options = options = choices.fitting
        self.kept = [np.arange(len(found)) for found in options]
        """Options of each stage that have not been ruled out."""
        self.simulated = 0
        self.work = 0.0
        """Work done, in path lengths."""
        self.best_ms = np.inf
        self.best = np.zeros(problem.stages, np.int64)
        self.cuts = np.zeros((0, problem.stages, len(problem.structure.layout)))
        self.seen: set[bytes] = set()

    def descend(self, most_work: float = _MAX_DESCENT_WORK) -> bool:
        """Find a split and improve it by small changes until none helps or the work allowed is
        done; whether there is any."""
        if not all(map(len, self.options)):
            return False
        splits = _seeds(self.options, self.problem.units)
        self._simulate(splits)
        improved = True
        while improved and self.work < most_work:
            # Most changes do not touch what made the step long.
            self._learn(self.best[None])
            splits = _neighbours(self.options, self.best, self.problem.units)
            improved = self._improve(splits)
        few = splits[:: -(-len(splits) // _SAMPLE)]
        self._learn(np.concatenate([self.best[None], few]))
        return True

    def with_options_of_better(self) -> "_Search":
        """The same split and paths, over all options that a better split may have."""
        # A little more, for the rounding of bounds that are exact.
        choices = choices_within(self.problem, self.best_ms * (1 + _TOLERANCE))
        # Where there are fewer runs, other sets are chosen of each.
        pairs = zip(choices.fitting, self.best_options, strict=True)
        choices = replace(choices, fitting=[found.including(best) for found, best in pairs])
        search = _Search(self.problem, choices)
        search.simulated, search.cuts, search.best_ms = self.simulated, self.cuts, self.best_ms
        for stage, best in enumerate(self.best_options):
            search.best[stage] = choices.fitting[stage].place(best)
        return search

    def over_optimistic(self, best_ms: float) -> "_Search":
        """A search with the same paths that bounds all splits faster than `best_ms`, complete or
        not: what it finds may not fit."""
        choices = replace(self.choices, fitting=self.choices.optimistic)
        search = _Search(self.problem, choices)
        search.cuts, search.best_ms = self.cuts, best_ms
        return search

    @property
    def best_options(self) -> list[StageOptions]:
        """The option of every stage in the best split."""
        return [option.take(self.best[[stage]]) for stage, option in enumerate(self.options)]

    def quick_bound_ms(self) -> float:
        """Lower bound on every split, by its slowest stage and by each known path alone."""
        edges = [(o.start, o.end) for o in self.options]
        slowest_ms = least_largest(edges, [o.bound_ms for o in self.options], self.problem.units)
        return max(slowest_ms, float(self._bounds().before[-1][-1].max(initial=0.0)))

    def _improve(self, splits: np.ndarray) -> bool:
        """Simulate the most promising of the splits until one is better; whether one is."""
        before_ms = self.best_ms
        bound_ms = self._path_ms(self._terms(splits), self.cuts).max(axis=1)
        promising = np.argsort(bound_ms, kind="stable")
        promising = promising[bound_ms[promising] < self._target_ms]
        for first in range(0, min(len(promising), _MAX_NEIGHBOURS), _SAMPLE):
            self._simulate(splits[promising[first : first + _SAMPLE]])
            if self.best_ms < before_ms:
                return True
        return False

    def prove(self, most_work: float) -> float:
        """Search until nothing better is left or the work allowed is done; the bound that is
        proven."""
        self.work = lower_bound_ms = 0.0
        width, stale = _FIRST_WIDTH, 0
        for _ in range(_MAX_ROUNDS):
            self._rule_out()
            if not all(map(len, self.kept)):
                return self.best_ms
            splits, bound_ms, dropped, dropped_ms = self._grow(width)
            fresh = np.array([split.tobytes() not in self.seen for split in splits], bool)
            splits, bound_ms = splits[fresh], bound_ms[fresh]
            if dropped_ms == np.inf and len(splits) <= _FEW:
                self._simulate_all(splits, bound_ms)
                return self.best_ms
            open_ms = min(bound_ms.min(initial=np.inf), dropped_ms)
            risen = open_ms - lower_bound_ms
            stale = 0 if risen > _LEAST_RISE * self.best_ms or width < _MAX_WIDTH else stale + 1
            wider = risen < _WIDENING_RISE * (self.best_ms - lower_bound_ms)
            lower_bound_ms = max(lower_bound_ms, open_ms)
            if stale == _MAX_STALE or self.work > most_work:
                break
            sample = np.concatenate([splits[_spread(len(splits), _SAMPLE // 2)], dropped])
            self._simulate(sample)
            self._learn(sample)
            width = min(2 * width, _MAX_WIDTH) if wider else width
        return float(min(lower_bound_ms, self.best_ms))

    def _simulate_all(self, splits: np.ndarray, bound_ms: np.ndarray) -> None:
        """Simulate splits in the order of their bounds, up to where none can be better."""
        for first in range(0, len(splits), _SAMPLE):
            if bound_ms[first] >= self._target_ms:
                return
            self._simulate(splits[first : first + _SAMPLE])

    @property
    def _target_ms(self) -> float:
        """Time in ms that a split must be below to be simulated."""
        return self.best_ms * (1 - _TOLERANCE)

    def _terms(self, splits: np.ndarray) -> np.ndarray:
        """Cost terms of splits [n, p]. [n, p, terms]"""
        return np.stack([o.terms[splits[:, stage]] for stage, o in enumerate(self.options)], axis=1)

    def _simulate(self, splits: np.ndarray) -> None:
        """Simulate those of the splits [n, p] that may be better, once each, and keep the best."""
        terms = self._terms(splits)
        promising = self._path_ms(terms, self.cuts).max(axis=1, initial=0.0) < self._target_ms
        fresh = np.array([split.tobytes() not in self.seen for split in splits], bool)
        chosen = np.flatnonzero(promising & fresh)
        if not len(chosen):
            return
        self.seen.update(splits[i].tobytes() for i in chosen)
        self.simulated += len(chosen)
        self.work += _SIMULATED_WORK * len(chosen) * self.problem.simulator.operations
        step_ms = self.problem.simulator.step_ms(terms[chosen])
        if step_ms.min() < self._target_ms:
            self.best, self.best_ms = splits[chosen[step_ms.argmin()]], float(step_ms.min())

    @staticmethod
    def _path_ms(terms: np.ndarray, paths: np.ndarray) -> np.ndarray:
        """Lengths of paths [k, p, terms] in splits [n, p, terms]. [n, k]"""
        return np.tensordot(terms, paths, axes=((1, 2), (1, 2)))

    def _learn(self, splits: np.ndarray) -> None:
        """Add critical paths of the splits, each the one that does most beside those before it."""
        self.work += _LEARNED_WORK * len(splits) * self.problem.simulator.operations
        terms = self._terms(splits)
        paths = self.problem.simulator.critical_paths(terms)
        length = np.minimum(self._path_ms(terms, paths), self._target_ms)
        known = self._path_ms(terms, self.cuts).max(axis=1, initial=0.0)
        added: list[int] = []
        while len(added) < _MAX_LEARNED:
            gain = np.maximum(length - known[:, None], 0).sum(axis=0)
            most = int(gain.argmax())
            if gain[most] <= 0:
                break
            added.append(most)
            known = np.maximum(known, length[:, most])
        # A few of whatever else there is, for splits unlike those that were looked at.
        spread = np.linspace(0, len(splits) - 1, max(_MIN_LEARNED - len(added), 0)).astype(int)
        added += sorted(set(spread.tolist()) - set(added))
        self.cuts = np.concatenate([self.cuts, paths[added]])

    def _bounds(self) -> _Bounds:
        kept = [o.take(k) for o, k in zip(self.options, self.kept, strict=True)]
        costs = [o.terms @ self.cuts[:, stage].T for stage, o in enumerate(kept)]
        units = self.problem.units
        self.work += sum(map(np.size, costs))
        return _Bounds(
            kept=kept,
            costs=costs,
            before=least_sums([(o.start, o.end) for o in kept], costs, 0, units),
            after=least_sums([(o.end, o.start) for o in kept[::-1]], costs[::-1], units, units)[
                ::-1
            ],
        )

    def _rule_out(self) -> None:
        """Drop options that no better split can have."""
        for stage, (found, kept) in enumerate(zip(self.options, self.kept, strict=True)):
            self.kept[stage] = kept[found.bound_ms[kept] < self._target_ms]
        left = np.inf
        while left > (left := sum(map(len, self.kept))):
            if not all(map(len, self.kept)):
                return
            bounds = self._bounds()
            for stage, (found, kept) in enumerate(zip(bounds.kept, self.kept, strict=True)):
                length = bounds.costs[stage] + bounds.before[stage][found.start]
                length += bounds.after[stage + 1][found.end]
                self.kept[stage] = kept[length.max(axis=1) < self._target_ms]

    def _grow(self, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Splits that the bounds allow [n, p] by rising bound, their bounds [n], some of those that
        had no room, completed [k, p], and the least bound of these."""
        bounds = self._bounds()
        grown = _Partials(
            splits=np.zeros((1, 0), np.int64),
            position=np.zeros(1, np.int64),
            length=np.zeros((1, len(self.cuts))),
            bound_ms=np.zeros(1),
        )
        dropped: list[_Partials] = []
        dropped_ms = np.inf
        for stage in range(self.problem.stages):
            parent, option, bound_ms = self._children(bounds, stage, grown)
            chosen = np.flatnonzero(bound_ms < self._target_ms)
            if len(chosen) > width:
                chosen = chosen[np.argsort(bound_ms[chosen], kind="stable")]
                dropped_ms = min(dropped_ms, bound_ms[chosen[width]])
                some = chosen[width:][_spread(len(chosen) - width, _DROPPED)]
                few = _extended(bounds, stage, grown, parent[some], option[some], bound_ms[some])
                dropped.append(self._completed(bounds, stage + 1, few))
                chosen = np.sort(chosen[:width])
            picked = parent[chosen], option[chosen], bound_ms[chosen]
            grown = _extended(bounds, stage, grown, *picked)
        order = np.argsort(grown.bound_ms, kind="stable")
        return (
            self._of_options(grown.splits[order]),
            grown.bound_ms[order],
            self._of_options(_sample(dropped, self.problem.stages)),
            float(dropped_ms),
        )

    def _children(
        self, bounds: _Bounds, stage: int, grown: _Partials
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All ways to add a stage: which are extended, by which kept option, and their bounds."""
        start, end = bounds.kept[stage].start, bounds.kept[stage].end
        low = np.searchsorted(start, grown.position)
        number = np.searchsorted(start, grown.position, "right") - low
        parent = np.repeat(np.arange(len(grown)), number)
        first = np.cumsum(number) - number
        option = np.arange(len(parent)) - np.repeat(first - low, number)
        # Cost that an option adds to any split.
        rest = bounds.costs[stage] + bounds.after[stage + 1][end]
        self.work += len(parent) * rest.shape[1]
        bound_ms = np.empty(len(parent))
        at_once = max(_CHUNK_ENTRIES // rest.shape[1], 1)
        for begin in range(0, len(parent), at_once):
            chunk = slice(begin, begin + at_once)
            bound_ms[chunk] = (grown.length[parent[chunk]] + rest[option[chunk]]).max(axis=1)
        return parent, option, bound_ms

    def _completed(self, bounds: _Bounds, stage: int, grown: _Partials) -> _Partials:
        """Complete partial splits, stage by stage, with the option that raises the bound least."""
        for later in range(stage, self.problem.stages):
            parent, option, bound_ms = self._children(bounds, later, grown)
            order = np.lexsort((option, bound_ms, parent))
            best = order[np.unique(parent[order], return_index=True)[1]]
            grown = _extended(bounds, later, grown, parent[best], option[best], bound_ms[best])
        return grown

    def _of_options(self, splits: np.ndarray) -> np.ndarray:
        """Splits of kept options as splits of all options. [n, p]"""
        return np.stack([kept[splits[:, s]] for s, kept in enumerate(self.kept)], axis=1)


def _extended(
    bounds: _Bounds,
    stage: int,
    grown: _Partials,
    parent: np.ndarray,
    option: np.ndarray,
    bound_ms: np.ndarray,
) -> _Partials:
    """Some partial splits with an option of the next stage, and their bounds. [n] each"""
    return _Partials(
        splits=np.column_stack([grown.splits[parent], option]),
        position=bounds.kept[stage].end[option],
        length=grown.length[parent] + bounds.costs[stage][option],
        bound_ms=bound_ms,
    )


def _spread(count: int, most: int) -> np.ndarray:
    """Indices of at most `most` of `count` sorted splits: half the lowest, half spread out."""
    spread = np.linspace(0, count - 1, min(most // 2, count)).astype(np.int64)
    return np.unique(np.concatenate([np.arange(min(most // 2, count)), spread]))


def _sample(completed: Sequence[_Partials], stages: int) -> np.ndarray:
    """Some of the splits, the lowest bounds of each first, and no split twice. [n, p]"""
    splits = np.concatenate([np.zeros((0, stages), np.int64), *(each.splits for each in completed)])
    bound_ms = np.concatenate([np.zeros(0), *(each.bound_ms for each in completed)])
    splits, first = np.unique(splits, axis=0, return_index=True)
    order = np.argsort(bound_ms[first], kind="stable")
    return splits[order[_spread(len(order), _SAMPLE // 2)]]


def _seeds(options: Sequence[StageOptions], units: int) -> np.ndarray:
    """Splits whose slowest stage is about as fast as can be, and their sum small. [seeds, p]"""
    edges = [(o.start, o.end) for o in options]
    slowest_ms = least_largest(edges, [o.bound_ms for o in options], units)
    splits = []
    for slack in _SEED_SLACKS:
        limit_ms = slowest_ms * (1 + slack)
        costs = [np.where(o.bound_ms <= limit_ms, o.bound_ms, np.inf)[:, None] for o in options]
        before = least_sums(edges, costs, 0, units)
        split, position = np.zeros(len(options), np.int64), units
        for stage in reversed(range(len(options))):
            start, end = edges[stage]
            total = np.where(end == position, before[stage][start, 0] + costs[stage][:, 0], np.inf)
            split[stage] = total.argmin()
            position = start[split[stage]]
        splits.append(split)
    return np.unique(splits, axis=0)


def _neighbours(options: Sequence[StageOptions], split: np.ndarray, units: int) -> np.ndarray:
    """The split with cuts moved by one unit, any row of them together, or with one stage
    recomputing another set. [n, p]"""
    edges = np.array([0, *(o.end[i] for o, i in zip(options, split, strict=True))])
    moved = [edges]
    for low in range(1, len(split)):
        for high in range(low, len(split)):
            for by in (-1, 1):
                moved.append(edges.copy())
                moved[-1][low : high + 1] += by
    moves = np.array(moved)
    found = np.empty((len(moves), len(split)), np.int64)
    others = []
    for stage, option in enumerate(options):
        run = option.start * (units + 1) + option.end
        wanted = moves[:, stage] * (units + 1) + moves[:, stage + 1]
        # The first option of a run has its smallest bound.
        place = np.minimum(np.searchsorted(run, wanted), len(run) - 1)
        found[:, stage] = np.where(run[place] == wanted, place, -1)
        same = np.flatnonzero(run == run[split[stage]])
        other = np.repeat(split[None], len(same), axis=0)
        other[:, stage] = same
        others.append(other)
    # Options that stay where they are keep their recomputed sets.
    unmoved = (moves[:, :-1] == edges[:-1]) & (moves[:, 1:] == edges[1:])
    found = np.where(unmoved, split, found)
    return np.unique(np.concatenate([found[(found >= 0).all(axis=1)], *others]), axis=0)
