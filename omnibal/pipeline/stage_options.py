"""Options of every pipeline stage: a run of units with its recomputed layers.

Options have all useful sets of layers that fit, or the sets of a trainer's recompute numbers
(`omnibal.pipeline.recompute_ways`). With many sets at several levels they have a grid of sets, and
optimistic sets bound the rest (`omnibal.pipeline.recompute`).

A split is a path through a graph whose nodes are positions of cuts. If all stages share a recompute
number, the graph has a copy of the inner positions for every number, so that no path mixes numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy.linalg import block_diag

from omnibal.base.arrays import expand_ranges, rows_of
from omnibal.pipeline.bounds import Structure, min_largest, min_largest_with_marked
from omnibal.pipeline.critical_path import PipelineSimulator, SampledSteps
from omnibal.pipeline.recompute import LevelFit, sets_near, useful_sets
from omnibal.pipeline.recompute_ways import NO_NUMBER, FittingNumbers, TowerNumbers
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_memory import MemoryTable

_MAX_OPTIONS = 20_000  # max recompute sets of a stage at several levels, over all runs of units


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageOptions:
    """Options of one stage, sorted by tail. Each is a run of units with its recomputed layers."""

    start: np.ndarray  # position of the first unit; this and the next four are [options]
    end: np.ndarray  # position after the last unit
    tail: np.ndarray  # node of the cut before the stage; the position, unless numbers are shared
    head: np.ndarray  # node of the cut after the stage
    shared: np.ndarray  # key of the way and number that all stages share, 0 if not shared
    recomputed: np.ndarray  # counts of recomputed layers, [options, levels * layer kinds]
    terms: np.ndarray  # cost terms with recomputation, [options, terms]
    bound_ms: np.ndarray  # lower bound on step time: longest structural path, [options]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        return self.tail, self.head

    def place(self, option: "StageOptions") -> int:
        """Return the index of an equal option, or -1 if absent; `option` is a single one."""
        same = (self.start == option.start) & (self.end == option.end)
        same &= (self.shared == option.shared) & (self.recomputed == option.recomputed).all(axis=1)
        return int(same.argmax()) if same.any() else -1

    def including(self, option: "StageOptions") -> "StageOptions":
        """Return the options with a single option added if absent."""
        return self if self.place(option) >= 0 else join_options([self, option])

    def take(self, kept: np.ndarray) -> "StageOptions":
        """Return options by index, in the order of `kept`."""
        return rows_of(self, kept)


def join_options(options: Sequence[StageOptions]) -> StageOptions:
    """Return all options, sorted by tail, head, bound and recomputed layers."""
    columns = {
        column.name: np.concatenate([getattr(of_stage, column.name) for of_stage in options])
        for column in fields(StageOptions)
    }
    unsorted = StageOptions(**columns)
    # np.lexsort sorts by its last key first.
    keys = *unsorted.recomputed.T[::-1], unsorted.bound_ms, unsorted.head, unsorted.tail
    return unsorted.take(np.lexsort(keys))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchProblem:
    """Bounds, memory and recompute choices of a 1F1B split search."""

    task: SplitTask
    structure: Structure
    tables: Sequence[MemoryTable]  # [stages]
    simulator: PipelineSimulator
    extreme_ms: np.ndarray  # see `recompute_extremes_ms`, [extremes, levels * layer kinds]
    numbers: Sequence[FittingNumbers] | None = None  # [stages]; None: any layers may be recomputed

    @property
    def same_at_levels(self) -> bool:
        """Whether a stage recomputes the same layers at all levels."""
        return self.task.workload.lockstep_ranks > 1

    @property
    def units(self) -> int:
        return self.structure.runs.units


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choices:
    """Options of every stage."""

    fitting: list[StageOptions]
    optimistic: list[StageOptions]  # bound all fitting options; equal to them if `complete`
    complete: bool
    nodes: int  # last node, after all units; node 0 is before them


def choices_within(problem: SearchProblem, limit_ms: float) -> Choices:
    """Return each stage's options that, by bounds, may be in a split of at most `limit_ms`."""
    complete, nodes = True, problem.units
    # First leave out runs that exceed the limit even without recomputation.
    structure, runs = problem.structure, problem.structure.runs
    candidates = np.flatnonzero(structure.own_ms <= limit_ms)  # a quick filter
    fast = [
        candidates[structure.longest_of_runs_ms(stage, candidates) <= limit_ms]
        for stage in range(problem.task.stages)
    ]
    on_path = on_paths([(runs.start[f], runs.end[f]) for f in fast], problem.units)
    usable = [f[is_on] for f, is_on in zip(fast, on_path, strict=True)]
    if problem.numbers is not None:
        options, nodes = _numbered_options(problem, problem.numbers, usable, limit_ms)
        both = [options, options.copy()]
    else:
        choices = [stage_choices(problem, *stage_runs) for stage_runs in enumerate(usable)]
        fitting, optimistic, of_stages = zip(*choices, strict=True)
        both, complete = [[*fitting], [*optimistic]], all(of_stages)
    for options in both:
        short = [
            of_stage.take(np.flatnonzero(of_stage.bound_ms <= limit_ms)) for of_stage in options
        ]
        kept = on_paths([of_stage.edges for of_stage in short], nodes)
        options[:] = [of_stage.take(k) for of_stage, k in zip(short, kept, strict=True)]
    return Choices(fitting=both[0], optimistic=both[1], complete=complete, nodes=nodes)


def _numbered_options(
    problem: SearchProblem,
    numbers: Sequence[FittingNumbers],
    usable: Sequence[np.ndarray],
    limit_ms: float,
) -> tuple[list[StageOptions], int]:
    """Return every stage's fitting options by recompute numbers, and the last node."""
    units = problem.units
    if not numbers[0].ways.is_shared:
        # A larger number only costs time, so each run has one option.
        fewest = _min_fitting_numbers(numbers, usable, 0)
        fits = [of_stage < NO_NUMBER for of_stage in fewest]
        usable, fewest = (
            [values[f] for values, f in zip(of_stages, fits, strict=True)]
            for of_stages in (usable, fewest)
        )
        return _recompute_numbers(problem, numbers, usable, 0, fewest), units
    none = [chosen[:0] for chosen in usable]
    copies = [*_shared_numbers(problem, numbers, usable, limit_ms)]
    last = max(len(copies), 1) * (units - 1) + 1
    placed = [_recompute_numbers(problem, numbers, none, 0, none)]
    for copy, options in enumerate(copies):
        shift = copy * (units - 1)  # each number has its own copy of the inner nodes
        placed.append(
            [
                replace(
                    of_stage,
                    tail=np.where(of_stage.start > 0, of_stage.start + shift, 0),
                    head=np.where(of_stage.end < units, of_stage.end + shift, last),
                )
                for of_stage in options
            ]
        )
    return [join_options(of_stage) for of_stage in zip(*placed, strict=True)], last


def _shared_numbers(
    problem: SearchProblem,
    numbers: Sequence[FittingNumbers],
    usable: Sequence[np.ndarray],
    limit_ms: float,
) -> Iterator[list[StageOptions]]:
    """Yield every stage's fitting options for each way and number that may be best: a split of at
    most `limit_ms` fits with it, but not with a smaller number or an encoder fewer recomputed."""
    ways, runs, units = numbers[0].ways, problem.structure.runs, problem.units
    assert isinstance(ways, TowerNumbers)  # other ways are not shared
    edges = [(runs.start[chosen], runs.end[chosen]) for chosen in usable]
    min_numbers = [_min_fitting_numbers(numbers, usable, way) for way in range(len(ways))]
    for way, fewest in enumerate(min_numbers):
        smaller = -1
        for number in ways.shared_numbers(fewest):
            # One option per usable run, also if it does not fit, in the order of `fewest`.
            equal = [np.full(len(chosen), number) for chosen in usable]
            options = _recompute_numbers(problem, numbers, usable, way, equal)
            sizes_ms = [of_stage.bound_ms for of_stage in options]
            if min_largest(edges, sizes_ms, units) > limit_ms:
                break  # larger numbers take no less time
            fits = [of_stage <= number for of_stage in fewest]
            sizes_ms = [np.where(f, ms, np.inf) for f, ms in zip(fits, sizes_ms, strict=True)]
            # With the smaller number, and with each smaller way, some run must not fit.
            needs = [[of_stage > smaller for of_stage in fewest]]
            for fewer in ways.smaller_ways(way):
                needs.append([of_stage > number for of_stage in min_numbers[fewer]])
            smaller = number
            if (
                max(min_largest_with_marked(edges, sizes_ms, need, units) for need in needs)
                <= limit_ms
            ):
                key = way + len(ways) * number
                yield [
                    replace(of_stage, shared=of_stage.shared + key).take(np.flatnonzero(f))
                    for of_stage, f in zip(options, fits, strict=True)
                ]


def _min_fitting_numbers(
    numbers: Sequence[FittingNumbers], usable: Sequence[np.ndarray], way: int
) -> list[np.ndarray]:
    """Return for every stage the min number to fit of each usable run, or `NO_NUMBER`. [runs]"""
    return [
        of_stage.find(chosen[:, None], np.full(len(chosen), way))
        for of_stage, chosen in zip(numbers, usable, strict=True)
    ]


def _recompute_numbers(
    problem: SearchProblem,
    numbers: Sequence[FittingNumbers],
    usable: Sequence[np.ndarray],
    way: int,
    number: Sequence[np.ndarray],
) -> list[StageOptions]:
    """Return an option for each usable run of every stage, with its number [runs] in `way`."""
    options = []
    for stage, (chosen, of_stage) in enumerate(zip(usable, number, strict=True)):
        ways = numbers[stage].ways
        layers = ways.count_recomputed(chosen[:, None], np.full(len(chosen), way), of_stage)
        options.append(recompute_options(problem, stage, chosen, layers[:, 0, ways.kinds]))
    return options


def stage_choices(
    problem: SearchProblem, stage: int, chosen: np.ndarray
) -> tuple[StageOptions, StageOptions, bool]:
    """Return fitting and optimistic options of chosen runs, and whether the former are all."""
    runs, levels = problem.structure.runs, problem.task.cost.levels
    counts, kind = np.unique(runs.counts[chosen], axis=0, return_inverse=True)
    sets = useful_sets(
        problem.tables[stage],
        counts,
        problem.extreme_ms,
        problem.task.memory_cap_bytes,
        np.inf if levels == 1 else max(_MAX_OPTIONS // max(len(chosen), 1), 1),
        same_at_levels=problem.same_at_levels,
    )
    options = []
    for of_kind in sets:
        # Sets are sorted by kind of run: repeat each run for its range of them.
        first = np.searchsorted(of_kind.stage, np.arange(len(counts) + 1))
        row, place = expand_ranges(first[kind], np.diff(first)[kind])
        options.append(recompute_options(problem, stage, chosen[row], of_kind.layers[place]))
    return options[0], options[1], sets[0] is sets[1]


def options_near(problem: SearchProblem, stage: int, option: StageOptions) -> StageOptions:
    """Return fitting options of a single option's run, with recomputed layers near its own."""
    runs = problem.structure.runs
    run = np.flatnonzero((runs.start == option.start[0]) & (runs.end == option.end[0]))
    fit = LevelFit.build(
        problem.tables[stage],
        runs.counts[run],
        problem.task.memory_cap_bytes,
        same_at_levels=problem.same_at_levels,
    )
    sets = sets_near(fit, option.recomputed[0])
    return recompute_options(problem, stage, np.repeat(run, len(sets)), sets)


def recompute_options(
    problem: SearchProblem, stage: int, run: np.ndarray, recomputed: np.ndarray
) -> StageOptions:
    """Return sorted options of runs [n] with recomputed layers [n, levels * layer kinds]."""
    structure, runs = problem.structure, problem.structure.runs
    terms = runs.terms[run]
    layout = structure.layout
    terms[:, layout.backward] += recomputed @ structure.recompute_ms
    if problem.task.cost.slowness:  # at least 1, so that bounds over units hold
        slowness = problem.task.cost.slowness_of(problem.task.stages)
        terms[:, layout.forward.start : layout.backward.stop] *= slowness[stage]
    terms = structure.with_buckets(terms, stage)
    start, end = runs.start[run], runs.end[run]
    options = StageOptions(
        start=start,
        end=end,
        tail=start,
        head=end,
        shared=0 * start,
        recomputed=recomputed,
        terms=terms,
        bound_ms=structure.longest_ms(stage, start, end, terms),
    )
    return join_options([options])


def on_paths(edges: Sequence[tuple[np.ndarray, np.ndarray]], units: int) -> list[np.ndarray]:
    """Return each stage's mask of (start, end) edges on a path from 0 to `units`. [edges]"""
    ahead = [np.arange(units + 1) == 0]
    for start, end in edges:
        reached = np.zeros(units + 1, bool)
        reached[end[ahead[-1][start]]] = True
        ahead.append(reached)
    behind = np.arange(units + 1) == units
    kept = []
    for (start, end), reached in zip(reversed(edges), reversed(ahead[:-1]), strict=True):
        kept.append(reached[start] & behind[end])
        behind = np.zeros(units + 1, bool)
        behind[start[kept[-1]]] = True
    return kept[::-1]


def recompute_extremes_ms(steps: SampledSteps, recompute_ms: np.ndarray, levels: int) -> np.ndarray:
    """Return relative recompute times per layer of each kind, [extremes, levels * layer kinds].

    Every micro-batch's times are a non-negative combination of the extremes of its level. An
    extreme gives all kinds their min share of a micro-batch's total time, and one kind the rest.

    Args:
        recompute_ms: ms per feature, [levels * layer kinds, levels * features].
    """
    real = np.arange(steps.features.shape[1]) < steps.counts[:, None]
    layers_ms = steps.features[real] @ recompute_ms.T
    extremes = []
    for of_level in np.split(layers_ms, levels, axis=1):  # [micro-batches, layer kinds]
        total_ms = of_level.sum(axis=1)
        if not total_ms.any():
            extremes.append(np.zeros((1, of_level.shape[1])))
            continue
        # Micro-batches without recompute time are left out: all sets are equal on them.
        lowest = (of_level[total_ms > 0] / total_ms[total_ms > 0, None]).min(axis=0)
        extremes.append(lowest + max(1 - lowest.sum(), 0) * np.eye(len(lowest)))
    return block_diag(*extremes)
