"""Exact joint search of the pipeline split and of the layers that every stage recomputes.

Objective: the simulated time of a step, mean over sampled steps of the real packs, as
`omnibal.pipeline.simulate.predict_steps` gives it: 1F1B with every micro-batch's own durations, the
slowest data-parallel rank, gradient reduction and optimizer. Every contiguous split with at least
one layer per stage and all recomputed sets are considered; stage s must fit the memory cap with
every min(p - s, m) consecutive packs of a rank's step in flight, over all packs.

Branch and bound on path lengths (`omnibal.pipeline.critical_path`). The length of one path in every
sampled step, averaged, is a bound that is a sum over stages, so the least that it can be over all
ways to complete a part of a split is a shortest path. The bounds used:

1. Structural paths. To the first forward of stage s, through all it does, and to its reduction, or
   on from its last backward to the last one of stage 0. Instead of the forwards that s runs before
   its first backward, the first micro-batch's round trip through the later stages; instead of the
   backwards after its last forward, the last one's; or both. What precedes and follows stage s is
   the same however it is split, so each possible stage is bounded on its own.
2. Critical paths of splits that were simulated: exact there, and close for similar splits.

Splits are grown stage by stage, without those whose bound is not below the best step found. Those
that are left at the end are simulated in the order of their bounds; their critical paths join the
bounds of the next round. A round in which nothing is left out proves the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.config import ModelConfig
from omnibal.cost.model import FEATURES, CostModel
from omnibal.errors import DoesNotFit
from omnibal.pipeline.critical_path import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    RECEIVE,
    REDUCTION,
    SEND,
    TERMS,
    PipelineSimulator,
    SampledSteps,
)
from omnibal.pipeline.recompute import least_peak_bytes, useful_recomputes
from omnibal.pipeline.stage_cost import GIB, MemoryTable, in_flight_features, memory_table
from omnibal.pipeline.units import (
    LANGUAGE_LAYER,
    UNITS,
    VISION_LAYER,
    stages_from_cuts,
    unit_sequence,
)
from omnibal.pipeline.workload import Workload
from omnibal.plan import Stage

MAX_SAMPLED_STEPS = 32
_MIN_SAMPLED_STEPS = 4
_SAMPLED_PACKS = 2_048
"""Steps are sampled until they have so many packs, within the two limits above."""
_COMPUTE = slice(FORWARD.start, BACKWARD.stop)
_LINKS = slice(SEND.start, RECEIVE.stop)
_TOLERANCE = 1e-9
"""Relative; what is better by less is not looked for."""
_FIRST_LIMIT = 1.15
"""Of an even split's time; stages that alone take longer are left out until that proves wrong."""
_LIMIT_STEP = 1.3
"""What the limit grows by while no split is within it."""
_SEED_SLACKS = (0.0, 0.003, 0.01, 0.03)
"""How much slower than possible the slowest stage of a first split may be."""
_MAX_ROUNDS = 20
_FIRST_WIDTH = 1_000
_MAX_WIDTH = 8_000
"""Partial splits kept at a time while splits are grown, doubled from round to round."""
_SAMPLE = 64
"""Splits that are simulated in a round, and at a time."""
_MIN_LEARNED, _MAX_LEARNED = 6, 16
"""Critical paths added in a round."""
_FEW = 1_024
"""So many splits that are left are all simulated."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchResult:
    """The best stages, and how good they are proven to be."""

    stages: tuple[Stage, ...]
    step_ms: float
    """Simulated, mean over the sampled steps."""
    lower_bound_ms: float
    """No split and recomputed sets that fit take less; equal to `step_ms` if the search ended."""
    simulated: int
    """Candidates that were simulated."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Runs:
    """Every run of units that may be a stage."""

    start: np.ndarray
    """[runs] position of the first unit."""
    end: np.ndarray
    """[runs] position after the last unit."""
    counts: np.ndarray
    """[runs, kinds]."""
    terms: np.ndarray
    """[runs, TERMS], without recomputation."""
    prefix: np.ndarray
    """[units + 1, TERMS] of everything before each position."""
    cut: np.ndarray
    """[units + 1, TERMS] of a cut at each position."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Options:
    """What one stage may be, sorted by start: a run with a recomputed set that fits."""

    start: np.ndarray
    """[options], and so all but the last."""
    end: np.ndarray
    vision: np.ndarray
    """Recomputed layers."""
    language: np.ndarray
    terms: np.ndarray
    """[options, TERMS]."""
    bound_ms: np.ndarray
    """[options]; longest structural path."""

    def __len__(self) -> int:
        return len(self.start)

    def take(self, kept: np.ndarray) -> "_Options":
        """Some of them, in the same order."""
        return _Options(
            start=self.start[kept],
            end=self.end[kept],
            vision=self.vision[kept],
            language=self.language[kept],
            terms=self.terms[kept],
            bound_ms=self.bound_ms[kept],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Problem:
    model: ModelConfig
    unit_terms: np.ndarray
    """[kinds, TERMS]."""
    runs: _Runs
    tables: Sequence[MemoryTable]
    memory_cap_bytes: float
    simulator: PipelineSimulator
    structural: np.ndarray
    """Weights of the structural paths. [p, paths, p, TERMS]"""
    extreme_ms: np.ndarray
    """[2, 2]; see `useful_recomputes`."""

    @property
    def stages(self) -> int:
        return len(self.tables)

    @property
    def units(self) -> int:
        return int(self.runs.end.max())


def search_stages(
    cost: CostModel,
    model: ModelConfig,
    workload: Workload,
    pipeline_size: int,
    memory_cap_bytes: float,
) -> SearchResult:
    """The stages of least simulated step time.

    Args:
        pipeline_size: stages; at most as many as the model has layers.
        memory_cap_bytes: of one device.

    Raises:
        DoesNotFit: no split fits the cap.
    """
    search = _descend(_problem(cost, model, workload, pipeline_size, memory_cap_bytes))
    lower_bound_ms = search.prove()
    best = [o.take(search.best[[s]]) for s, o in enumerate(search.options)]
    return SearchResult(
        stages=stages_from_cuts(
            model,
            [int(option.end[0]) for option in best[:-1]],
            [(int(option.vision[0]), int(option.language[0])) for option in best],
        ),
        step_ms=search.best_ms,
        lower_bound_ms=lower_bound_ms,
        simulated=search.simulated,
    )


def sampled_steps(workload: Workload) -> Workload:
    """The steps that are simulated: at most 32 of the run's, and fewer the more packs they have."""
    packs_per_step = len(workload.step) / len(np.unique(workload.step))
    wanted = np.clip(_SAMPLED_PACKS / packs_per_step, _MIN_SAMPLED_STEPS, MAX_SAMPLED_STEPS)
    return workload.some_steps(int(wanted))


def least_peak_of_splits(
    cost: CostModel, model: ModelConfig, workload: Workload, pipeline_size: int
) -> float:
    """Bytes of the smallest memory cap that some split and recomputed sets fit."""
    return _least_peak(_runs(cost, model), _memory_tables(cost, workload, pipeline_size))


def _problem(
    cost: CostModel,
    model: ModelConfig,
    workload: Workload,
    pipeline_size: int,
    memory_cap_bytes: float,
) -> _Problem:
    simulator = PipelineSimulator.of(SampledSteps.of(sampled_steps(workload)), pipeline_size)
    unit_terms = _unit_terms(cost)
    return _Problem(
        model=model,
        unit_terms=unit_terms,
        runs=_runs(cost, model),
        tables=_memory_tables(cost, workload, pipeline_size),
        memory_cap_bytes=memory_cap_bytes,
        simulator=simulator,
        structural=_structural_paths(simulator.steps, unit_terms, pipeline_size),
        extreme_ms=_extreme_ms(simulator.steps, unit_terms),
    )


def _descend(problem: _Problem) -> "_Search":
    """A search with a good split, over all options that are not too slow to be in a better one.

    Raises:
        DoesNotFit: no split fits the cap.
    """
    limit_ms = _FIRST_LIMIT * _even_ms(problem)
    simulated = 0
    feasible = False
    while True:
        search = _Search(problem, _options(problem, limit_ms), simulated)
        found = search.descend()
        simulated = search.simulated
        if found and search.best_ms <= limit_ms:
            return search
        if found:
            limit_ms = search.best_ms
            continue
        if not feasible:
            need = _least_peak(problem.runs, problem.tables)
            if need > problem.memory_cap_bytes:
                raise DoesNotFit(_infeasible(problem, need))
            feasible = True
        limit_ms *= _LIMIT_STEP


def _memory_tables(cost: CostModel, workload: Workload, pipeline_size: int) -> list[MemoryTable]:
    return [
        memory_table(
            cost,
            in_flight_features(workload.features, workload.slot, pipeline_size - stage),
            workload.features,
        )
        for stage in range(pipeline_size)
    ]


def _runs(cost: CostModel, model: ModelConfig) -> _Runs:
    sequence = unit_sequence(model)
    kinds = np.array([[unit == kind for kind in UNITS] for unit in sequence], np.int64)
    before = np.concatenate([np.zeros((1, len(UNITS)), np.int64), np.cumsum(kinds, axis=0)])
    start, end = np.triu_indices(len(sequence) + 1, k=1)
    counts = before[end] - before[start]
    has_layer = counts[:, VISION_LAYER] + counts[:, LANGUAGE_LAYER] > 0
    start, end, counts = start[has_layer], end[has_layer], counts[has_layer]
    unit_terms = _unit_terms(cost)
    terms = counts @ unit_terms
    last = np.array([UNITS.index(unit) for unit in sequence])[end - 1]
    for link in (SEND, RECEIVE):
        terms[:, link] = np.where((end < len(sequence))[:, None], unit_terms[last, link], 0.0)
    terms[:, OPTIMIZER] += cost.optimizer_ms_fixed
    prefix = before @ unit_terms
    cut = np.zeros_like(prefix)
    cut[1:-1] = unit_terms[[UNITS.index(unit) for unit in sequence[:-1]]]
    return _Runs(start=start, end=end, counts=counts, terms=terms, prefix=prefix, cut=cut)


def _unit_terms(cost: CostModel) -> np.ndarray:
    """What a unit of each kind adds to a stage, and a cut right after it. [kinds, TERMS]"""
    fixed = np.zeros(len(FEATURES))
    fixed[0] = cost.link_latency_ms
    terms = np.zeros((len(UNITS), TERMS))
    for kind, unit in enumerate(UNITS):
        unit_cost = cost.units[unit]
        returns = unit_cost.output_gradient_bytes.any()
        terms[kind, FORWARD] = unit_cost.forward_ms
        terms[kind, BACKWARD] = unit_cost.backward_ms
        terms[kind, SEND] = fixed + cost.link_ms_per_byte * unit_cost.output_bytes
        terms[kind, RECEIVE] = (
            fixed * returns + cost.link_ms_per_byte * unit_cost.output_gradient_bytes
        )
        trained = unit_cost.trained_parameters
        terms[kind, REDUCTION] = cost.gradient_reduction_ms_per_parameter * trained
        terms[kind, OPTIMIZER] = cost.optimizer_ms_per_parameter * trained
    return terms


def _structural_paths(steps: SampledSteps, unit_terms: np.ndarray, stages: int) -> np.ndarray:
    """Weights of paths through each stage, averaged over the steps. [p, paths, p, TERMS]

    Each is taken on the ranks that are slowest in vision, in language and in both layers.
    """
    layer_ms = unit_terms[[VISION_LAYER, LANGUAGE_LAYER]]
    layer_ms = layer_ms[:, FORWARD] + layer_ms[:, BACKWARD]
    load = steps.features.sum(axis=1) @ np.stack([*layer_ms, layer_ms.sum(axis=0)]).T
    slowest = load[steps.rows].argmax(axis=1)  # [steps, loads]
    rows = np.unique(np.take_along_axis(steps.rows, slowest, axis=1).T, axis=0)
    return np.stack(
        [
            np.concatenate([_paths_through(steps, row, stage, stages) for row in rows])
            for stage in range(stages)
        ]
    )


def _paths_through(steps: SampledSteps, row: np.ndarray, stage: int, stages: int) -> np.ndarray:
    """The structural paths through a stage, on one row of every step. [8, p, TERMS]

    Four ways through, each followed by the stage's reduction or by the last backwards before it.
    """
    features, count = steps.features[row], steps.counts[row]
    every = np.arange(len(row))
    last = np.maximum(count - 1, 0)
    # Forwards 1 to `ahead` run before the first backward, and as many backwards between the last
    # forward and the last backward.
    ahead = np.minimum(stages - 1 - stage, last)
    total = np.concatenate([np.zeros((len(row), 1, features.shape[2])), features.cumsum(axis=1)], 1)
    opening, closing, everything = features[:, 0], features[every, last], total[:, -1]
    forwards = everything - total[every, ahead + 1] + opening
    backwards = total[every, last - ahead] + closing
    # With both detours, the first backward must come before the last forward.
    both = (last > ahead)[:, None]
    ways = (
        (everything, everything, np.zeros_like(opening)),
        (forwards, everything, opening),
        (everything, backwards, closing),
        (forwards, np.where(both, backwards, everything), opening + np.where(both, closing, 0.0)),
    )
    weights = np.zeros((2, len(ways), stages, TERMS))
    for i, (own_forward, own_backward, later) in enumerate(ways):
        way = weights[:, i]
        for forward, backward in ((FORWARD, BACKWARD), (SEND, RECEIVE)):
            way[:, :stage, forward] = steps.weight @ opening
            way[0, :stage, backward] = steps.weight @ closing
            way[:, stage:, forward] = way[:, stage:, backward] = steps.weight @ later
        way[:, stage, FORWARD] = steps.weight @ own_forward
        way[:, stage, BACKWARD] = steps.weight @ own_backward
    weights[0, :, 0, REDUCTION] = weights[1, :, stage, REDUCTION] = 1
    weights[:, :, stage, OPTIMIZER] = 1
    return weights.reshape(-1, stages, TERMS)


def _stage_bounds(
    problem: _Problem, stage: int, start: np.ndarray, end: np.ndarray, terms: np.ndarray
) -> np.ndarray:
    """Longest structural path through a stage, for each thing that it may be. [options]

    Infinite where the position does not allow it. Links are counted at the stage's own ends only.
    """
    weights, runs = problem.structural[stage], problem.runs
    at_start = (start == 0) == (stage == 0)
    at_end = (end == problem.units) == (stage == problem.stages - 1)
    length = terms @ weights[:, stage].T
    if stage > 0:
        earlier = weights[:, stage - 1]
        before = runs.prefix[:, _COMPUTE] @ earlier[:, _COMPUTE].T
        before += runs.cut[:, _LINKS] @ earlier[:, _LINKS].T
        length += before[start]
    if stage < problem.stages - 1:
        later = weights[:, stage + 1, _COMPUTE]
        length += ((runs.prefix[-1] - runs.prefix)[:, _COMPUTE] @ later.T)[end]
    return np.where(at_start & at_end, length.max(axis=1), np.inf)


def _even_ms(problem: _Problem) -> float:
    """A step in which every stage takes as long as every other, without links."""
    steps, stages = problem.simulator.steps, problem.stages
    whole = problem.runs.prefix[-1]
    work_ms = steps.features.sum(axis=1) @ (whole[FORWARD] + whole[BACKWARD])
    row_ms = work_ms * (steps.counts + stages - 1) / np.maximum(steps.counts, 1) / stages
    return float(row_ms[steps.rows].max(axis=1) @ steps.weight)


def _options(problem: _Problem, limit_ms: float) -> list[_Options]:
    """For every stage, all that it may be in a split of at most `limit_ms`."""
    runs = problem.runs
    fast = [
        _stage_bounds(problem, stage, runs.start, runs.end, runs.terms) <= limit_ms
        for stage in range(problem.stages)
    ]
    usable = _on_paths([(runs.start[f], runs.end[f]) for f in fast], problem.units)
    options = []
    for stage, (f, u) in enumerate(zip(fast, usable, strict=True)):
        found = _with_recomputes(problem, stage, np.flatnonzero(f)[u])
        options.append(found.take(np.flatnonzero(found.bound_ms <= limit_ms)))
    kept = _on_paths([(found.start, found.end) for found in options], problem.units)
    return [found.take(k) for found, k in zip(options, kept, strict=True)]


def _with_recomputes(problem: _Problem, stage: int, chosen: np.ndarray) -> _Options:
    """The chosen runs with every recomputed set that fits at that stage and may be the best."""
    runs, unit_terms = problem.runs, problem.unit_terms
    layer_forward = unit_terms[[VISION_LAYER, LANGUAGE_LAYER], FORWARD]
    counts, kind = np.unique(runs.counts[chosen], axis=0, return_inverse=True)
    sets = useful_recomputes(
        problem.tables[stage], counts, problem.extreme_ms, problem.memory_cap_bytes
    )
    first = np.searchsorted(sets.stage, np.arange(len(counts) + 1))
    number = np.diff(first)[kind]
    run = np.repeat(chosen, number)
    place = np.arange(len(run)) - np.repeat(np.cumsum(number) - number, number)
    which = np.repeat(first[kind], number) + place
    vision, language = sets.vision[which], sets.language[which]
    terms = runs.terms[run].copy()
    terms[:, BACKWARD] += np.stack([vision, language], axis=1) @ layer_forward
    start, end = runs.start[run], runs.end[run]
    bound_ms = _stage_bounds(problem, stage, start, end, terms)
    options = _Options(
        start=start, end=end, vision=vision, language=language, terms=terms, bound_ms=bound_ms
    )
    return options.take(np.lexsort((vision, bound_ms, end, start)))


def _on_paths(edges: Sequence[tuple[np.ndarray, np.ndarray]], units: int) -> list[np.ndarray]:
    """Which (starts, ends) of each stage lie on a way through all stages."""
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


def _extreme_ms(steps: SampledSteps, unit_terms: np.ndarray) -> np.ndarray:
    """Forward of a vision and a language layer, where they differ most either way. [2, 2]"""
    real = np.arange(steps.features.shape[1]) < steps.counts[:, None]
    layers_ms = steps.features[real] @ unit_terms[[VISION_LAYER, LANGUAGE_LAYER], FORWARD].T
    share = layers_ms[:, 0] / np.maximum(layers_ms.sum(axis=1), np.finfo(float).tiny)
    return layers_ms[[share.argmin(), share.argmax()]]


def _least_peak(runs: _Runs, tables: Sequence[MemoryTable]) -> float:
    """Of all splits, the smallest largest peak of a stage."""
    counts, kind = np.unique(runs.counts, axis=0, return_inverse=True)
    reached = np.full(int(runs.end.max()) + 1, np.inf)
    reached[0] = 0.0
    for table in tables:
        peaks = np.maximum(least_peak_bytes(table, counts)[kind], reached[runs.start])
        reached = np.full_like(reached, np.inf)
        np.minimum.at(reached, runs.end, peaks)
    return float(reached[-1])


def _infeasible(problem: _Problem, least_peak: float) -> str:
    """The smallest cap that some split would fit, and what else would help."""
    need, cap = least_peak / GIB, problem.memory_cap_bytes / GIB
    return (
        f"{problem.model.name} on {problem.stages} pipeline stages needs {need:.2f} GiB per device "
        f"at best, with recomputation where it helps: {need - cap:.2f} GiB more than the memory "
        f"cap of {cap:.2f} GiB, which must hold every stage; raise the memory cap, use more "
        "pipeline stages or tensor parallelism, or pack to smaller caps (max_tiles, max_tokens)"
    )


class _Search:
    """Options that may still be in a better split, the best split so far, and the paths known.

    A split is an index into each stage's options. [p]
    """

    def __init__(self, problem: _Problem, options: list[_Options], simulated: int) -> None:
        self.problem = problem
        self.options = options
        self.kept = [np.arange(len(found)) for found in options]
        """Of each stage, the options that have not been ruled out."""
        self.simulated = simulated
        self.best_ms = np.inf
        self.best = np.zeros(problem.stages, np.int64)
        self.cuts = np.zeros((0, problem.stages, TERMS))
        self.seen: set[bytes] = set()

    def descend(self) -> bool:
        """Find a split and improve it by small changes; whether there is any."""
        if not all(map(len, self.options)):
            return False
        splits = _seeds(self.options, self.problem.units)
        while True:
            before_ms = self.best_ms
            self._simulate(splits)
            if self.best_ms >= before_ms:
                break
            # Most changes do not touch what made the step long.
            self._learn(self.best[None])
            splits = _neighbours(self.options, self.best, self.problem.units)
        few = splits[:: -(-len(splits) // _SAMPLE)]
        self._learn(np.concatenate([self.best[None], few]))
        return True

    def prove(self) -> float:
        """Search until nothing better is left or the budget is spent; the bound that is proven."""
        lower_bound_ms = 0.0
        for number in range(_MAX_ROUNDS):
            self._rule_out()
            if not all(map(len, self.kept)):
                return self.best_ms
            splits, bound_ms, dropped_ms = self._grow(min(_FIRST_WIDTH << number, _MAX_WIDTH))
            fresh = np.array([split.tobytes() not in self.seen for split in splits], bool)
            splits, bound_ms = splits[fresh], bound_ms[fresh]
            if dropped_ms == np.inf and len(splits) <= _FEW:
                self._simulate_all(splits, bound_ms)
                return self.best_ms
            lower_bound_ms = max(lower_bound_ms, min(bound_ms.min(initial=np.inf), dropped_ms))
            if not len(splits):
                break
            sample = _sample(len(splits))
            self._simulate(splits[sample])
            self._learn(splits[sample])
        return float(min(lower_bound_ms, self.best_ms))

    def _simulate_all(self, splits: np.ndarray, bound_ms: np.ndarray) -> None:
        """Simulate splits in the order of their bounds, up to where none can be better."""
        for first in range(0, len(splits), _SAMPLE):
            if bound_ms[first] >= self._target_ms:
                return
            self._simulate(splits[first : first + _SAMPLE])

    @property
    def _target_ms(self) -> float:
        """What a split must be below to be looked at."""
        return self.best_ms * (1 - _TOLERANCE)

    def _terms(self, splits: np.ndarray) -> np.ndarray:
        """[n, p, TERMS]."""
        return np.stack([o.terms[splits[:, stage]] for stage, o in enumerate(self.options)], axis=1)

    def _simulate(self, splits: np.ndarray) -> None:
        """Simulate those of the splits [n, p] that may be better, once each, and keep the best."""
        terms = self._terms(splits)
        promising = self._path_ms(terms, self.cuts).max(axis=1, initial=0.0) < self._target_ms
        fresh = [split.tobytes() not in self.seen for split in splits]
        chosen = np.flatnonzero(promising & fresh)
        if not len(chosen):
            return
        self.seen.update(splits[i].tobytes() for i in chosen)
        self.simulated += len(chosen)
        step_ms = self.problem.simulator.step_ms(terms[chosen])
        if step_ms.min() < self._target_ms:
            self.best, self.best_ms = splits[chosen[step_ms.argmin()]], float(step_ms.min())

    @staticmethod
    def _path_ms(terms: np.ndarray, paths: np.ndarray) -> np.ndarray:
        """Lengths of paths [k, p, TERMS] in splits [n, p, TERMS]. [n, k]"""
        return np.tensordot(terms, paths, axes=((1, 2), (1, 2)))

    def _learn(self, splits: np.ndarray) -> None:
        """Add critical paths of the splits, each the one that does most beside those before it."""
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

    def _bounds(self) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """By cut: what each kept option costs [options, cuts], and the least that stages before
        and after each position cost [units + 1, cuts]."""
        kept = [o.take(k) for o, k in zip(self.options, self.kept, strict=True)]
        costs = [o.terms @ self.cuts[:, stage].T for stage, o in enumerate(kept)]
        units = self.problem.units
        before = _least([(o.start, o.end) for o in kept], costs, 0, units)
        after = _least([(o.end, o.start) for o in kept[::-1]], costs[::-1], units, units)[::-1]
        return costs, before, after

    def _rule_out(self) -> None:
        """Drop options that no better split can have."""
        for stage, (found, kept) in enumerate(zip(self.options, self.kept, strict=True)):
            self.kept[stage] = kept[found.bound_ms[kept] < self._target_ms]
        left = np.inf
        while left > (left := sum(map(len, self.kept))):
            if not all(map(len, self.kept)):
                return
            costs, before, after = self._bounds()
            for stage, (found, kept) in enumerate(zip(self.options, self.kept, strict=True)):
                start, end = found.start[kept], found.end[kept]
                length = before[stage][start] + costs[stage] + after[stage + 1][end]
                self.kept[stage] = kept[length.max(axis=1) < self._target_ms]

    def _grow(self, width: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Splits that the bounds allow [n, p] by rising bound, their bounds, and the least bound of
        those that had no room."""
        costs, _, after = self._bounds()
        splits, position = np.zeros((1, 0), np.int64), np.zeros(1, np.int64)
        length, bound_ms = np.zeros((1, len(self.cuts))), np.zeros(1)
        dropped_ms = np.inf
        for stage, (found, kept) in enumerate(zip(self.options, self.kept, strict=True)):
            start, end = found.start[kept], found.end[kept]
            low, high = np.searchsorted(start, position), np.searchsorted(start, position, "right")
            parent = np.repeat(np.arange(len(position)), high - low)
            first = np.cumsum(high - low) - (high - low)
            option = np.arange(len(parent)) - np.repeat(first - low, high - low)
            grown = length[parent] + costs[stage][option]
            bound_ms = (grown + after[stage + 1][end[option]]).max(axis=1)
            chosen = np.flatnonzero(bound_ms < self._target_ms)
            if len(chosen) > width:
                chosen = chosen[np.argsort(bound_ms[chosen], kind="stable")]
                dropped_ms = min(dropped_ms, bound_ms[chosen[width]])
                chosen = np.sort(chosen[:width])
            splits = np.column_stack([splits[parent[chosen]], kept[option[chosen]]])
            position, length, bound_ms = end[option[chosen]], grown[chosen], bound_ms[chosen]
        order = np.argsort(bound_ms, kind="stable")
        return splits[order], bound_ms[order], float(dropped_ms)


def _sample(count: int) -> np.ndarray:
    """Of so many splits by rising bound, the lowest and as many spread over the rest."""
    spread = np.linspace(0, count - 1, _SAMPLE // 2).astype(np.int64)
    return np.unique(np.concatenate([np.arange(min(_SAMPLE // 2, count)), spread]))


def _least(
    edges: Sequence[tuple[np.ndarray, np.ndarray]],
    costs: Sequence[np.ndarray],
    source: int,
    units: int,
) -> list[np.ndarray]:
    """Least cost of reaching each position through the first stages, from none to all of them.

    Args:
        edges: of each stage, the positions that its options lead from and to.
        costs: [options, cuts] of each stage.

    Returns:
        [stages + 1] of [units + 1, cuts].
    """
    reached = [np.full((units + 1, costs[0].shape[1]), np.inf)]
    reached[0][source] = 0.0
    for (tail, head), cost in zip(edges, costs, strict=True):
        order = np.argsort(head, kind="stable")
        heads, first = np.unique(head[order], return_index=True)
        least = np.full_like(reached[0], np.inf)
        least[heads] = np.minimum.reduceat((reached[-1][tail] + cost)[order], first, axis=0)
        reached.append(least)
    return reached


def _seeds(options: Sequence[_Options], units: int) -> np.ndarray:
    """Splits whose slowest stage is about as fast as can be, and their sum small. [seeds, p]"""
    edges = [(o.start, o.end) for o in options]
    reached = np.where(np.arange(units + 1) == 0, 0.0, np.inf)
    for (start, end), found in zip(edges, options, strict=True):
        slowest = np.maximum(reached[start], found.bound_ms)
        reached = np.full(units + 1, np.inf)
        np.minimum.at(reached, end, slowest)
    splits = []
    for slack in _SEED_SLACKS:
        limit_ms = reached[-1] * (1 + slack)
        costs = [np.where(o.bound_ms <= limit_ms, o.bound_ms, np.inf)[:, None] for o in options]
        before = _least(edges, costs, 0, units)
        split, position = np.zeros(len(options), np.int64), units
        for stage in reversed(range(len(options))):
            start, end = edges[stage]
            total = np.where(end == position, before[stage][start, 0] + costs[stage][:, 0], np.inf)
            split[stage] = total.argmin()
            position = start[split[stage]]
        splits.append(split)
    return np.unique(splits, axis=0)


def _neighbours(options: Sequence[_Options], split: np.ndarray, units: int) -> np.ndarray:
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
