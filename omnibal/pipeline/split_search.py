"""Search for splits by descent, with proof by branch and bound on path lengths.

Paths are structural (`omnibal.pipeline.bounds`) or critical paths of simulated splits, which are
exact there and close for similar splits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.base.arrays import expand_ranges
from omnibal.pipeline.bounds import min_largest, min_path_costs
from omnibal.pipeline.stage_options import Choices, SearchProblem, StageOptions, choices_within

MIN_SPLIT_GAIN = 1e-9  # relative improvement below which the search ends
# Of a first split's slowest stage over the fastest possible.
_SEED_SLACKS = (0.0, 0.003, 0.01, 0.03)
_MAX_GROWTH_ROUNDS = 60  # max rounds of growing splits
_FIRST_WIDTH = 1_000  # partial splits kept in the first round
_MAX_WIDTH = 8_000  # max partial splits kept while growing, doubled every round
_SPLITS_PER_BATCH = 64  # splits simulated per round and per batch
_MIN_LEARNED, _MAX_LEARNED = 6, 16  # critical paths added per round
_DROPPED_SAMPLES = 4  # dropped partial splits that are completed, per stage
_MAX_NEIGHBOURS = 512  # max neighbours simulated without improvement
_MAX_ENUMERATED = 1_024  # remaining splits below which all are simulated
_MAX_STALE = 2  # max full-width rounds in a row without a higher bound
_MIN_RISE = 1e-5  # min relative rise that counts as a higher bound
_WIDENING_RISE = 0.1  # keep the width while the bound rises by this share of the gap per round
MAX_DESCENT_WORK, MAX_WORK = 2e8, 8e8  # path lengths for descent, 1 to 2 s, and for proof, several
_SIMULATED_WORK, _LEARNED_WORK = 3, 6  # path lengths per operation simulated, and traced
_MAX_LENGTH_ENTRIES = 8_000_000  # entries of [partial splits, paths] per chunk: limits memory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Bounds:
    """Cost of kept options, and of the stages before and after a position, by cut."""

    kept: list[StageOptions]
    costs: list[np.ndarray]  # [options, cuts] per stage
    # Min cost of the stages before and after each node, [p + 1] of [nodes + 1, cuts].
    before: list[np.ndarray]
    after: list[np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Partials:
    """Prefixes of splits."""

    splits: np.ndarray  # indices into the kept options, [n, stages]
    node: np.ndarray  # cut before the next stage, [n]
    length: np.ndarray  # path lengths of the prefix, [n, cuts]
    bound_ms: np.ndarray  # lower bound over all completions, [n]

    def __len__(self) -> int:
        return len(self.splits)


class SplitSearch:
    """Options of a better split, the best split (an option index per stage [p]) and known paths.

    Paths (`cuts`, as in cutting planes) bound any split's step time from below by a dot product.
    """

    def __init__(
        self,
        problem: SearchProblem,
        choices: Choices,
        cuts: np.ndarray | None = None,
        best_ms: float = np.inf,
    ) -> None:
        self.problem = problem
        self.choices = choices
        self.options = options = choices.fitting
        self.kept = [np.arange(len(of_stage)) for of_stage in options]
        self.work = 0.0
        self.best_ms = best_ms
        self.best = np.zeros(problem.task.stages, np.int64)
        no_cuts = np.zeros((0, problem.task.stages, len(problem.structure.layout)))
        self.cuts = no_cuts if cuts is None else cuts
        self.seen: set[bytes] = set()

    def descend(self, max_work: float = MAX_DESCENT_WORK) -> bool:
        """Find a split and improve it by small changes. Return whether any split fits."""
        if not all(map(len, self.options)):
            return False
        splits = _make_seeds(self.options, self.choices.nodes)
        self._simulate(splits)
        improved = True
        while improved and self.work < max_work:
            # Most changes do not affect the critical path.
            self._learn(self.best[None])
            splits = _list_neighbours(self.choices, self.best, self.problem.units)
            improved = self._improve(splits)
        few = splits[:: -(-len(splits) // _SPLITS_PER_BATCH)]
        self._learn(np.concatenate([self.best[None], few]))
        return True

    def with_options_of_better(self) -> "SplitSearch":
        """Return a search from this split and its paths, over all options of a better split."""
        # Slightly more, to cover rounding of exact bounds.
        choices = choices_within(self.problem, self.best_ms * (1 + MIN_SPLIT_GAIN))
        # With fewer runs, each run may get other sets (`stage_choices`), so add the best again.
        pairs = zip(choices.fitting, self.best_options, strict=True)
        choices = replace(choices, fitting=[options.including(best) for options, best in pairs])
        search = SplitSearch(self.problem, choices, self.cuts, self.best_ms)
        for stage, best in enumerate(self.best_options):
            search.best[stage] = choices.fitting[stage].place(best)
        return search

    @property
    def best_options(self) -> list[StageOptions]:
        return [option.take(self.best[[stage]]) for stage, option in enumerate(self.options)]

    def _improve(self, splits: np.ndarray) -> bool:
        """Simulate the most promising splits until a better split. Return whether there is any."""
        before_ms = self.best_ms
        bound_ms = self._path_ms(self._terms(splits), self.cuts).max(axis=1)
        promising = np.argsort(bound_ms, kind="stable")
        promising = promising[bound_ms[promising] < self._target_ms]
        for first in range(0, min(len(promising), _MAX_NEIGHBOURS), _SPLITS_PER_BATCH):
            self._simulate(splits[promising[first : first + _SPLITS_PER_BATCH]])
            if self.best_ms < before_ms:
                return True
        return False

    def prove(self, max_work: float) -> float:
        """Search until no better split is left, or to the work limit. Return the proven bound."""
        self.work = lower_bound_ms = 0.0
        width, stale = _FIRST_WIDTH, 0
        for _ in range(_MAX_GROWTH_ROUNDS):
            self._rule_out()
            if not all(map(len, self.kept)):
                return self.best_ms
            splits, bound_ms, dropped, dropped_ms = self._grow(width)
            fresh = np.array([split.tobytes() not in self.seen for split in splits], bool)
            splits, bound_ms = splits[fresh], bound_ms[fresh]
            if dropped_ms == np.inf and len(splits) <= _MAX_ENUMERATED:
                # In order of their bounds, until none can be better.
                for first in range(0, len(splits), _SPLITS_PER_BATCH):
                    if bound_ms[first] >= self._target_ms:
                        break
                    self._simulate(splits[first : first + _SPLITS_PER_BATCH])
                return self.best_ms
            open_ms = min(bound_ms.min(initial=np.inf), dropped_ms)
            risen = open_ms - lower_bound_ms
            stale = 0 if risen > _MIN_RISE * self.best_ms or width < _MAX_WIDTH else stale + 1
            wider = risen < _WIDENING_RISE * (self.best_ms - lower_bound_ms)
            lower_bound_ms = max(lower_bound_ms, open_ms)
            if stale == _MAX_STALE or self.work > max_work:
                break
            sample = np.concatenate(
                [splits[_spread_indices(len(splits), _SPLITS_PER_BATCH // 2)], dropped]
            )
            self._simulate(sample)
            self._learn(sample)
            width = min(2 * width, _MAX_WIDTH) if wider else width
        return float(min(lower_bound_ms, self.best_ms))

    @property
    def _target_ms(self) -> float:
        """Time below which a split is simulated, in ms."""
        return self.best_ms * (1 - MIN_SPLIT_GAIN)

    def _terms(self, splits: np.ndarray) -> np.ndarray:
        """Return cost terms of splits [n, p]. [n, p, terms]"""
        return np.stack([o.terms[splits[:, stage]] for stage, o in enumerate(self.options)], axis=1)

    def _simulate(self, splits: np.ndarray) -> None:
        """Simulate possibly better splits [n, p] once each, and keep the best."""
        terms = self._terms(splits)
        promising = self._path_ms(terms, self.cuts).max(axis=1, initial=0.0) < self._target_ms
        fresh = np.array([split.tobytes() not in self.seen for split in splits], bool)
        chosen = np.flatnonzero(promising & fresh)
        if not len(chosen):
            return
        self.seen.update(splits[i].tobytes() for i in chosen)
        self.work += _SIMULATED_WORK * len(chosen) * self.problem.simulator.operations
        step_ms = self.problem.simulator.step_ms(
            *self.problem.structure.layout.split_terms(terms[chosen])
        )
        if step_ms.min() < self._target_ms:
            self.best, self.best_ms = splits[chosen[step_ms.argmin()]], float(step_ms.min())

    @staticmethod
    def _path_ms(terms: np.ndarray, paths: np.ndarray) -> np.ndarray:
        """Return the lengths of paths [k, p, terms] in splits [n, p, terms]. [n, k]"""
        return np.tensordot(terms, paths, axes=((1, 2), (1, 2)))

    def _learn(self, splits: np.ndarray) -> None:
        """Add the critical paths that raise the bounds most, greedily."""
        self.work += _LEARNED_WORK * len(splits) * self.problem.simulator.operations
        terms = self._terms(splits)
        paths = self.problem.simulator.critical_paths(terms)
        # Bounds above the target prune equally well, so they count no more than it.
        length = np.minimum(self._path_ms(terms, paths), self._target_ms)  # [n, paths]
        known = self._path_ms(terms, self.cuts).max(axis=1, initial=0.0)
        added: list[int] = []
        while len(added) < _MAX_LEARNED:
            gain = np.maximum(length - known[:, None], 0).sum(axis=0)
            best = int(gain.argmax())
            if gain[best] <= 0:
                break
            added.append(best)
            known = np.maximum(known, length[:, best])
        # A few other paths, for splits unlike the simulated splits.
        spread = np.linspace(0, len(splits) - 1, max(_MIN_LEARNED - len(added), 0)).astype(int)
        added += sorted(set(spread.tolist()) - set(added))
        self.cuts = np.concatenate([self.cuts, paths[added]])

    def _bounds(self) -> _Bounds:
        kept = [o.take(k) for o, k in zip(self.options, self.kept, strict=True)]
        costs = [o.terms @ self.cuts[:, stage].T for stage, o in enumerate(kept)]
        nodes, edges = self.choices.nodes, [o.edges for o in kept]
        back = [(head, tail) for tail, head in reversed(edges)]
        self.work += sum(map(np.size, costs))
        return _Bounds(
            kept=kept,
            costs=costs,
            before=min_path_costs(edges, costs, 0, nodes),
            after=min_path_costs(back, costs[::-1], nodes, nodes)[::-1],
        )

    def _rule_out(self) -> None:
        """Drop options that no better split can use."""
        for stage, (option, kept) in enumerate(zip(self.options, self.kept, strict=True)):
            self.kept[stage] = kept[option.bound_ms[kept] < self._target_ms]
        left = np.inf
        while left > (left := sum(map(len, self.kept))):
            if not all(map(len, self.kept)):
                return
            bounds = self._bounds()
            for stage, (option, kept) in enumerate(zip(bounds.kept, self.kept, strict=True)):
                # The shortest split through an option by each path alone, [options, cuts].
                length = bounds.costs[stage] + bounds.before[stage][option.tail]
                length += bounds.after[stage + 1][option.head]
                self.kept[stage] = kept[length.max(axis=1) < self._target_ms]

    def _grow(self, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Return splits that the bounds allow [n, p] by increasing bound, their bounds [n], a
        sample of dropped prefixes, completed [k, p], and the min bound of all dropped (beam search:
        at most `width` prefixes per stage are kept)."""
        bounds = self._bounds()
        grown = _Partials(
            splits=np.zeros((1, 0), np.int64),
            node=np.zeros(1, np.int64),
            length=np.zeros((1, len(self.cuts))),
            bound_ms=np.zeros(1),
        )
        dropped: list[_Partials] = []
        dropped_ms = np.inf
        for stage in range(self.problem.task.stages):
            parent, option, bound_ms = self._children(bounds, stage, grown)
            chosen = np.flatnonzero(bound_ms < self._target_ms)
            if len(chosen) > width:
                chosen = chosen[np.argsort(bound_ms[chosen], kind="stable")]
                dropped_ms = min(dropped_ms, bound_ms[chosen[width]])
                drawn = chosen[width:][_spread_indices(len(chosen) - width, _DROPPED_SAMPLES)]
                few = _extend(bounds, stage, grown, parent[drawn], option[drawn], bound_ms[drawn])
                dropped.append(self._complete(bounds, stage + 1, few))
                chosen = np.sort(chosen[:width])
            picked = parent[chosen], option[chosen], bound_ms[chosen]
            grown = _extend(bounds, stage, grown, *picked)
        order = np.argsort(grown.bound_ms, kind="stable")
        # Distinct completed prefixes, lowest bounds first.
        no_splits = np.zeros((0, self.problem.task.stages), np.int64)
        completed = np.concatenate([no_splits, *(few.splits for few in dropped)])
        completed_ms = np.concatenate([no_splits[:, 0], *(p.bound_ms for p in dropped)])
        completed, first = np.unique(completed, axis=0, return_index=True)
        by_bound = np.argsort(completed_ms[first], kind="stable")
        sample = completed[by_bound[_spread_indices(len(by_bound), _SPLITS_PER_BATCH // 2)]]
        return (
            self._kept_to_options(grown.splits[order]),
            grown.bound_ms[order],
            self._kept_to_options(sample),
            float(dropped_ms),
        )

    def _children(
        self, bounds: _Bounds, stage: int, grown: _Partials
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return all ways to add a stage: parents, kept options, bounds."""
        tail, head = bounds.kept[stage].edges
        # Options are sorted by tail, so a prefix's children are a range of them.
        low = np.searchsorted(tail, grown.node)
        parent, option = expand_ranges(low, np.searchsorted(tail, grown.node, "right") - low)
        # Min cost of an option with the stages after it, [options, cuts].
        added = bounds.costs[stage] + bounds.after[stage + 1][head]
        self.work += len(parent) * added.shape[1]
        bound_ms = np.empty(len(parent))
        at_once = max(_MAX_LENGTH_ENTRIES // added.shape[1], 1)
        for begin in range(0, len(parent), at_once):
            chunk = slice(begin, begin + at_once)
            bound_ms[chunk] = (grown.length[parent[chunk]] + added[option[chunk]]).max(axis=1)
        return parent, option, bound_ms

    def _complete(self, bounds: _Bounds, stage: int, grown: _Partials) -> _Partials:
        """Complete prefixes stage by stage with the option of min bound."""
        for later in range(stage, self.problem.task.stages):
            parent, option, bound_ms = self._children(bounds, later, grown)
            order = np.lexsort((option, bound_ms, parent))
            best = order[np.unique(parent[order], return_index=True)[1]]
            grown = _extend(bounds, later, grown, parent[best], option[best], bound_ms[best])
        return grown

    def _kept_to_options(self, splits: np.ndarray) -> np.ndarray:
        """Convert indices of kept options to indices of all options. [n, p]"""
        return np.stack([kept[splits[:, s]] for s, kept in enumerate(self.kept)], axis=1)


def _extend(
    bounds: _Bounds,
    stage: int,
    grown: _Partials,
    parent: np.ndarray,
    option: np.ndarray,
    bound_ms: np.ndarray,
) -> _Partials:
    """Extend prefixes by an option of the next stage. [n] each"""
    return _Partials(
        splits=np.column_stack([grown.splits[parent], option]),
        node=bounds.kept[stage].head[option],
        length=grown.length[parent] + bounds.costs[stage][option],
        bound_ms=bound_ms,
    )


def _spread_indices(count: int, limit: int) -> np.ndarray:
    """Return at most `limit` indices of `count` sorted splits: half the lowest, half spread out."""
    spread = np.linspace(0, count - 1, min(limit // 2, count)).astype(np.int64)
    return np.unique(np.concatenate([np.arange(min(limit // 2, count)), spread]))


def _make_seeds(options: Sequence[StageOptions], nodes: int) -> np.ndarray:
    """Return splits with a near-minimal slowest stage and a small sum. [seeds, p]"""
    edges = [o.edges for o in options]
    slowest_ms = min_largest(edges, [o.bound_ms for o in options], nodes)
    splits = []
    for slack in _SEED_SLACKS:
        limit_ms = slowest_ms * (1 + slack)
        costs = [np.where(o.bound_ms <= limit_ms, o.bound_ms, np.inf)[:, None] for o in options]
        before = min_path_costs(edges, costs, 0, nodes)
        split, node = np.zeros(len(options), np.int64), nodes
        for stage in reversed(range(len(options))):
            tail, head = edges[stage]
            total = np.where(head == node, before[stage][tail, 0] + costs[stage][:, 0], np.inf)
            split[stage] = total.argmin()
            node = tail[split[stage]]
        splits.append(split)
    return np.unique(splits, axis=0)


def move_cuts(cuts: np.ndarray) -> np.ndarray:
    """Return the cuts [k + 1] with every range of inner cuts moved by one unit. [moves, k + 1]"""
    inner = np.arange(1, len(cuts) - 1)
    first, last = (axis.ravel() for axis in np.meshgrid(inner, inner, indexing="ij"))
    place = np.arange(len(cuts))
    is_moved = (first[:, None] <= place) & (place <= last[:, None])  # [moves, k + 1]
    moved = cuts + np.array([-1, 1])[:, None] * is_moved[first <= last][:, None]
    return moved.reshape(-1, len(cuts))


def _list_neighbours(choices: Choices, split: np.ndarray, units: int) -> np.ndarray:
    """Return splits with cuts moved by one unit, the recomputed set of one stage changed, or the
    numbers changed that all stages share. [n, p]"""
    options, nodes = choices.fitting, choices.nodes
    cuts = np.array([0, *(o.head[i] for o, i in zip(options, split, strict=True))])
    copies, is_inner = nodes // (units - 1), np.arange(len(cuts)) % len(split) > 0
    # Changing the shared number moves all inner cuts to another copy of their nodes.
    other = np.arange(1 - copies, copies)[:, None] * (units - 1)
    moves = np.concatenate([cuts[None], move_cuts(cuts), cuts + other * is_inner])
    splits = np.empty((len(moves), len(split)), np.int64)
    others = []
    for stage, option in enumerate(options):
        run = option.tail * (nodes + 1) + option.head
        wanted = moves[:, stage] * (nodes + 1) + moves[:, stage + 1]
        # The first option of a run has its min bound.
        place = np.minimum(np.searchsorted(run, wanted), len(run) - 1)
        splits[:, stage] = np.where(run[place] == wanted, place, -1)
        sets = np.flatnonzero(run == run[split[stage]])
        changed = np.repeat(split[None], len(sets), axis=0)
        changed[:, stage] = sets
        others.append(changed)
    # Unmoved options keep their recomputed sets.
    unmoved = (moves[:, :-1] == cuts[:-1]) & (moves[:, 1:] == cuts[1:])
    splits = np.where(unmoved, split, splits)
    return np.unique(np.concatenate([splits[(splits >= 0).all(axis=1)], *others]), axis=0)
