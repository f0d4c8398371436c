"""Options of every pipeline stage: a run of units with its recomputed layers.

With one level all useful sets that fit are options, or the sets given by a trainer's numbers
(`omnibal.pipeline.recompute_ways`). With several levels also all if few, else a grid with
optimistic sets that bound the rest (`omnibal.pipeline.recompute`).

A split is a path through a graph whose nodes are positions of cuts. Numbers of recomputed layers
that all stages share make one copy of the inner positions for every number, so a path keeps to one
number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy.linalg import block_diag

from omnibal.base.arrays import rows_of
from omnibal.model.config import ModelConfig
from omnibal.model.targets import FREE, StageRules
from omnibal.pipeline.bounds import Structure, min_largest, min_largest_with_marked
from omnibal.pipeline.critical_path import PipelineSimulator, SampledSteps
from omnibal.pipeline.recompute import LevelFit, sets_near, useful_sets
from omnibal.pipeline.recompute_ways import NO_NUMBER, FittingNumbers, TowerNumbers
from omnibal.pipeline.stage_memory import MemoryTable

_MAX_OPTIONS = 20_000  # max recompute sets of a stage at several levels, over all runs of units


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageOptions:
    """Options of one stage, sorted by tail. Each is a run of units with its recomputed layers."""

    start: np.ndarray  # position of the first unit; this and the next four are [options]
    end: np.ndarray  # position after the last unit
    tail: np.ndarray  # node of the cut before the stage; without shared numbers the position
    head: np.ndarray  # node of the cut after the stage
    shared: np.ndarray  # key of the numbers that all stages share, 0 if none
    recomputed: np.ndarray  # recomputed layers, [options, levels * layer kinds]
    terms: np.ndarray  # cost terms with recomputation, [options, terms]
    bound_ms: np.ndarray  # lower bound on the step: longest structural path, [options]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        return self.tail, self.head

    def place(self, option: "StageOptions") -> int:
        """Return the index of a single option, or -1 if absent."""
        same = (self.start == option.start) & (self.end == option.end)
        same &= (self.shared == option.shared) & (self.recomputed == option.recomputed).all(axis=1)
        return int(same.argmax()) if same.any() else -1

    def including(self, option: "StageOptions") -> "StageOptions":
        """Return the options with a single option added."""
        return self if self.place(option) >= 0 else join_options([self, option])

    def take(self, kept: np.ndarray) -> "StageOptions":
        """Return options by index, in the order of `kept`."""
        return rows_of(self, kept)


def join_options(options: Sequence[StageOptions]) -> StageOptions:
    """Return all options, sorted so that each run's smallest bound comes first."""
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
    """Model, bounds, memory and recompute choices of a split search."""

    model: ModelConfig
    structure: Structure
    tables: Sequence[MemoryTable]  # of every stage
    memory_cap_bytes: float
    simulator: PipelineSimulator
    extreme_ms: np.ndarray  # [extremes, levels * layer kinds]; see `useful_sets`
    levels: int
    same_at_levels: bool  # whether a stage recomputes the same layers at all levels
    rules: StageRules = FREE
    numbers: Sequence[FittingNumbers] | None = None  # [stages]; None: any layers may be recomputed
    slowness: np.ndarray | None = None  # at least 1, so that bounds over units hold, [stages]

    @property
    def stages(self) -> int:
        return len(self.tables)

    @property
    def units(self) -> int:
        return self.structure.runs.units


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choices:
    """Options of every stage."""

    fitting: list[StageOptions]
    optimistic: list[StageOptions]  # bound all fitting options; equal to them if `complete`
    complete: bool
    nodes: int  # node of the last cut; node 0 is the first


def choices_within(problem: SearchProblem, limit_ms: float) -> Choices:
    """Return the options of every stage that may be in a split of at most `limit_ms`."""
    complete, nodes = True, problem.units
    # First the runs that a stage may hold within the limit without recomputation.
    structure, runs = problem.structure, problem.structure.runs
    candidates = np.flatnonzero(structure.own_ms <= limit_ms)  # quick, before the stages' own paths
    fast = [
        candidates[structure.longest_of_runs_ms(stage, candidates) <= limit_ms]
        for stage in range(problem.stages)
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
    """Return every stage's options by recompute numbers, and the last node."""
    units = problem.units
    if not numbers[0].ways.is_shared:
        # More recomputation only costs time, so every run has its min number.
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
    """Yield every stage's fitting options with each number that some split of at most `limit_ms`
    needs: a split that fits neither a smaller number nor one encoder less."""
    ways, runs, units = numbers[0].ways, problem.structure.runs, problem.units
    assert isinstance(ways, TowerNumbers)  # other ways are not shared
    edges = [(runs.start[chosen], runs.end[chosen]) for chosen in usable]
    min_numbers = [_min_fitting_numbers(numbers, usable, way) for way in range(len(ways))]
    for way, fewest in enumerate(min_numbers):
        smaller = -1
        for number in ways.shared_numbers(fewest):
            # One option per usable run, in order, whether it fits or not.
            equal = [np.full(len(chosen), number) for chosen in usable]
            options = _recompute_numbers(problem, numbers, usable, way, equal)
            sizes_ms = [of_stage.bound_ms for of_stage in options]
            if min_largest(edges, sizes_ms, units) > limit_ms:
                break  # larger numbers take no less time
            fits = [of_stage <= number for of_stage in fewest]
            sizes_ms = [np.where(f, ms, np.inf) for f, ms in zip(fits, sizes_ms, strict=True)]
            # Some run must need more than the smaller number, and some run every encoder.
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
    """Return the min number of each run to fit at every stage. [runs] each"""
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
    """Return an option for each run [runs] at every stage, with its number [runs] in a way."""
    options = []
    for stage, (chosen, of_stage) in enumerate(zip(usable, number, strict=True)):
        ways = numbers[stage].ways
        layers = ways.count_recomputed(chosen[:, None], np.full(len(chosen), way), of_stage)
        options.append(recompute_options(problem, stage, chosen, layers[:, 0, ways.kinds]))
    return options


def stage_choices(
    problem: SearchProblem, stage: int, chosen: np.ndarray
) -> tuple[StageOptions, StageOptions, bool]:
    """Return fitting and optimistic options of chosen runs, and whether they are complete."""
    runs, table, cap_bytes = problem.structure.runs, problem.tables[stage], problem.memory_cap_bytes
    counts, kind = np.unique(runs.counts[chosen], axis=0, return_inverse=True)
    sets = useful_sets(
        table,
        counts,
        problem.extreme_ms,
        cap_bytes,
        np.inf if problem.levels == 1 else max(_MAX_OPTIONS // max(len(chosen), 1), 1),
        same_at_levels=problem.same_at_levels,
    )
    options = []
    for of_kind in (sets.fitting, sets.optimistic):
        # Sets are sorted by kind of run: repeat each run for its range of them.
        first = np.searchsorted(of_kind.stage, np.arange(len(counts) + 1))
        number = np.diff(first)[kind]
        place = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
        layers = of_kind.layers[np.repeat(first[kind], number) + place]
        options.append(recompute_options(problem, stage, np.repeat(chosen, number), layers))
    return options[0], options[1], sets.complete


def options_near(problem: SearchProblem, stage: int, option: StageOptions) -> StageOptions:
    """Return options of a single option's run, with recomputed layers near its own."""
    runs = problem.structure.runs
    run = np.flatnonzero((runs.start == option.start[0]) & (runs.end == option.end[0]))
    fit = LevelFit.build(
        problem.tables[stage],
        runs.counts[run],
        problem.memory_cap_bytes,
        same_at_levels=problem.same_at_levels,
    )
    sets = sets_near(fit, option.recomputed[0])
    return recompute_options(problem, stage, np.repeat(run, len(sets)), sets)


def recompute_options(
    problem: SearchProblem, stage: int, run: np.ndarray, recomputed: np.ndarray
) -> StageOptions:
    """Return options of runs [n] with recomputed layers [n, levels * layer kinds]."""
    structure, runs = problem.structure, problem.structure.runs
    terms = runs.terms[run]
    layout = structure.layout
    terms[:, layout.backward] += recomputed @ structure.recompute_ms
    if problem.slowness is not None:
        terms[:, layout.forward.start : layout.backward.stop] *= problem.slowness[stage]
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
    """Return masks of each stage's (starts, ends) on a path through all stages."""
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
    """Return recompute times per layer kind that span every micro-batch's times, for `recompute_ms`
    [levels * layer kinds, levels * features]. [extremes, levels * layer kinds], each of one level.

    Every kind has a min share of the recompute time over a level's micro-batches. An extreme gives
    all kinds their min share and one kind the remaining time, so every micro-batch is a mean of
    extremes. With two kinds the extremes are two micro-batches.
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
