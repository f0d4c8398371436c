"""Joint search of the pipeline split and every stage's recomputed layers.

Objective: mean step time over sampled steps of the real packs
(`omnibal.pipeline.simulate.predict_steps`). All contiguous splits with at least one layer per stage
and all recompute sets are considered. Every stage must fit the memory cap over all packs.

Branch and bound on path lengths (`omnibal.pipeline.bounds`, `omnibal.pipeline.split_search`):
splits grow stage by stage, without those bounded above the best step. Remaining splits are
simulated in order of their bounds, and their critical paths tighten the next round's bounds. A
round that drops nothing proves the result; if the work limit comes first, the result has the bound
proven so far, independent of machine speed.

With several levels the proof is over all recompute sets if they are few, else over a grid with
optimistic sets (`omnibal.pipeline.stage_options`), which leaves a gap. Memory is checked first in
the heaviest passes for many stages, which keeps bounds valid; if the best split does not fit all
passes, the search repeats with its own heaviest passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.model.targets import RecomputeFreedom
from omnibal.pipeline.bounds import Structure, min_slowest_ms
from omnibal.pipeline.critical_path import PipelineSimulator, SampledSteps
from omnibal.pipeline.least_peak import min_peak_of_splits, min_peak_of_tables
from omnibal.pipeline.passes import all_passes
from omnibal.pipeline.recompute_ways import FittingNumbers, TowerNumbers
from omnibal.pipeline.split_search import MAX_DESCENT_WORK, MAX_WORK, MIN_SPLIT_GAIN, SplitSearch
from omnibal.pipeline.split_task import SplitTask, limits_in_words, memory_error
from omnibal.pipeline.stage_memory import (
    build_tables,
    contents_of,
    fits_cap,
    heaviest_passes,
    often_heaviest_tables,
    stage_runs,
)
from omnibal.pipeline.stage_options import (
    SearchProblem,
    StageOptions,
    choices_within,
    options_near,
    recompute_extremes_ms,
)
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.pipeline.workload import Workload

MAX_SAMPLED_STEPS = 32  # max steps simulated per split
_MIN_SAMPLED_STEPS = 4  # min steps simulated per split
_SAMPLED_PACKS = 2_048  # packs to sample, within the two limits above
# First time limit relative to `min_slowest_ms`; excludes slower stages at first.
_SLOWEST_SLACK = 1.02
_LIMIT_STEP = 1.3  # growth factor of the limit while no split is within it
_MAX_LIMITS = 16  # limits tried before searching without one
_MAX_CHANGES = 20  # max searches of sets near the best


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchResult:
    """The best stages and their proven bound."""

    stages_at: tuple[tuple[Stage, ...], ...]  # stages with their recomputed layers at each level
    step_ms: float  # simulated step time, mean over the sampled steps
    lower_bound_ms: float  # proven bound over all splits and recompute sets; `step_ms` if optimal

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages at the first level."""
        return self.stages_at[0]

    @property
    def gap(self) -> float:
        """Max gain of a better result as a share of `step_ms`."""
        return 1 - self.lower_bound_ms / self.step_ms if self.step_ms else 0.0


def search_stages(task: SplitTask, *, prove: bool = True, effort: float = 1.0) -> SearchResult:
    """Return the 1F1B stages with the min simulated step time found, and the proven lower bound.

    Args:
        prove: False to return a good split quickly, bounded by the slowest stage only.
        effort: share of the usual work for descent and proof.

    Raises:
        DoesNotFit: no split fits the memory cap.
    """
    problem = _make_problem(task)
    # Bounds over options in a few passes hold for all passes, which only remove options.
    heavier: SearchProblem | None = problem
    while heavier is not None:
        problem = heavier
        search, limit_ms = _first_split(problem, effort, min_peak_of_splits)
        if search.best_ms > limit_ms:
            search = search.with_options_of_better()
        heavier = _add_heavier_passes(problem, _stages_at(problem, search.best_options))
        if heavier is None:
            result = _finish_search(problem, search, prove, effort)
            heavier = _add_heavier_passes(problem, result.stages_at)
    return result


def estimated_step_ms(task: SplitTask, effort: float = 1.0) -> float:
    """Return the step time of a good split, without proof and with memory checked in few passes.
    Arguments and errors as in `search_stages`."""
    return _first_split(_make_problem(task), effort)[0].best_ms


def _finish_search(
    problem: SearchProblem, search: SplitSearch, prove: bool, effort: float
) -> SearchResult:
    """Return the result: prove a bound, and improve recompute sets beyond the grid."""
    complete = search.choices.complete
    if prove:
        lower_bound_ms = search.prove(effort * (MAX_WORK if complete else MAX_DESCENT_WORK))
    else:
        lower_bound_ms = min_slowest_ms(problem.structure)
    best, best_ms = search.best_options, search.best_ms
    if not complete:
        # Descend through recompute sets near the best split's.
        for _ in range(_MAX_CHANGES):
            options = [options_near(problem, s, option) for s, option in enumerate(best)]
            choices = replace(search.choices, fitting=options, optimistic=options)
            near = SplitSearch(problem, choices, search.cuts)
            near.descend()
            if near.best_ms >= best_ms * (1 - MIN_SPLIT_GAIN):
                break
            best, best_ms = near.best_options, near.best_ms
        if prove:
            # Only optimistic sets bound the sets that the grid leaves out.
            choices = replace(search.choices, fitting=search.choices.optimistic)
            optimistic = SplitSearch(problem, choices, search.cuts, best_ms)
            lower_bound_ms = optimistic.prove(effort * MAX_WORK)
    return SearchResult(
        stages_at=_stages_at(problem, best),
        step_ms=best_ms,
        lower_bound_ms=min(lower_bound_ms, best_ms),
    )


def _stages_at(
    problem: SearchProblem, best: Sequence[StageOptions]
) -> tuple[tuple[Stage, ...], ...]:
    """Return the stages at every level, from the split's option of each stage."""
    cuts = [int(option.end[0]) for option in best[:-1]]
    model, levels = problem.task.model, problem.task.cost.levels
    recomputed = [np.split(option.recomputed[0], levels) for option in best]
    return tuple(
        stages_from_cuts(model, cuts, [of_stage[level].tolist() for of_stage in recomputed])
        for level in range(levels)
    )


def _add_heavier_passes(
    problem: SearchProblem, stages_at: Sequence[Sequence[Stage]]
) -> SearchProblem | None:
    """Add each stage's heaviest pass to the problem, or return None if `stages_at` fit."""
    task = problem.task
    cost, workload, cap_bytes = task.cost, task.workload, task.memory_cap_bytes
    kinds, runs_of = len(cost.kinds), stage_runs(cost, stages_at)
    counts, recomputed = map(np.stack, zip(*(contents_of(kinds, r) for r in runs_of), strict=True))
    features, stages = workload.features_of(cost), len(counts)
    heaviest = enumerate(heaviest_passes(cost, workload, counts, recomputed))
    passes = [all_passes(features, workload, stages, s, np.array([index])) for s, index in heaviest]
    tables = build_tables(cost, workload, passes)
    contents = zip(tables, counts, recomputed, strict=True)
    peaks = [table.peak_bytes(*content) for table, *content in contents]
    if fits_cap(np.array(peaks), cap_bytes).all():
        return None
    tables = [few.join_passes(more) for few, more in zip(problem.tables, tables, strict=True)]
    numbers = problem.numbers
    if numbers is not None:
        pairs = zip(numbers, tables, strict=True)
        numbers = [of_stage.on([table], cap_bytes) for of_stage, table in pairs]
    return replace(problem, tables=tables, numbers=numbers)


def sampled_steps(workload: Workload) -> Workload:
    """Return the steps to simulate: all or 4 to 32, fewer the more packs a step has."""
    packs_per_step = len(workload.step) / len(np.unique(workload.step))
    wanted = np.clip(_SAMPLED_PACKS / packs_per_step, _MIN_SAMPLED_STEPS, MAX_SAMPLED_STEPS)
    return workload.some_steps(int(wanted))


def _make_problem(task: SplitTask) -> SearchProblem:
    cost, freedom = task.cost, task.rules.recompute
    simulator = PipelineSimulator.build(
        SampledSteps.build(sampled_steps(task.workload), cost), task.stages
    )
    structure = Structure.build(task, simulator.steps)
    tables = often_heaviest_tables(cost, task.workload, task.stages)
    numbers = None
    if freedom is not RecomputeFreedom.LAYERS:
        ways, cap_bytes = TowerNumbers.build(task, structure.runs), task.memory_cap_bytes
        numbers = [
            FittingNumbers(tables=[table], cap_bytes=cap_bytes, ways=ways) for table in tables
        ]
    return SearchProblem(
        task=task,
        structure=structure,
        tables=tables,
        simulator=simulator,
        extreme_ms=recompute_extremes_ms(simulator.steps, structure.recompute_ms, cost.levels),
        numbers=numbers,
    )


def _first_split(
    problem: SearchProblem, effort: float, min_peak: Callable[[SplitTask], float] | None = None
) -> tuple[SplitSearch, float]:
    """Raise the step time limit until a split fits; return that search and its limit.

    Raises:
        DoesNotFit: with the larger of `min_peak` and the tables' min over splits of max peaks.
    """
    task, peak_bytes = problem.task, 0.0
    limit_ms = _SLOWEST_SLACK * min_slowest_ms(problem.structure)
    for tried in range(_MAX_LIMITS + 1):
        limit_ms = limit_ms if tried < _MAX_LIMITS else np.inf
        search = SplitSearch(problem, choices_within(problem, limit_ms))
        if search.descend(effort * MAX_DESCENT_WORK):
            return search, limit_ms
        if not tried:
            peak_bytes = min_peak_of_tables(problem.structure.runs, problem.tables)
            if not fits_cap(peak_bytes, task.memory_cap_bytes):
                break
        limit_ms *= _LIMIT_STEP
    min_bytes = min_peak(task) if min_peak else 0.0
    # Encoders stay on stage 0, which has more micro-batches in flight with more stages.
    fixed = task.rules.encoders_on_first and task.model.encoders
    sizes = (
        "other pipeline or tensor sizes" if fixed else "more pipeline stages or tensor parallelism"
    )
    remedy = f"raise the memory cap, use {sizes}, or pack to smaller caps"
    raise memory_error(task, limits_in_words(task), max(min_bytes, peak_bytes), remedy)
