"""Trials of sizes and caps that skip choices which cannot win, by bounds and then by estimates."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from omnibal.base.worker_pool import map_unordered
from omnibal.search.engine import try_all
from omnibal.search.strategy import (
    Bound,
    Choice,
    Need,
    Setting,
    Sizing,
    Strategy,
    estimate,
    find_bound,
    may_gain,
    plan_choice,
    possible_choices,
)

CLEARLY_WORSE = 1.15
"""Factor over the best time for a choice's bound to exclude it from the ranking."""

_MAX_EXTRA = 8  # number of sizes up to which near-best sizes are kept that their bounds rule out
_ESTIMATE_SLACK, _LIKELY = 1.02, 1.25
"""Max factors of bounds and of likely times over the minimal estimate, for a choice to estimate."""
_KIND_SLACK = 1.04  # factor over the minimal estimate above which all choices of a kind are dropped
_MOST_ESTIMATED = 48  # max further choices to estimate that fit
_PLANNED_SLACK = 1.1  # factor over the minimal estimate above which a choice is not planned


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BoundedTrials:
    """Trials that skip choices which cannot win, by bounds and then by estimates."""

    setting: Setting
    processes: int
    advance: Callable[[int], None]
    least_ms: dict[Choice, float] = field(default_factory=dict)
    """Lower bounds on times per sample of choices with a pack for every rank. 0 if unknown."""
    bounds: dict[Choice, Bound] = field(default_factory=dict)
    """Bounds of choices with a state that may fit."""
    planned: dict[Choice, Strategy] = field(default_factory=dict)
    scheduled: set[Choice] = field(default_factory=set)
    """Choices planned in all schedules, others in 1F1B if that is allowed."""
    need_gib: dict[Choice, float] = field(default_factory=dict)
    """Lower bound of memory per device in 1F1B, for choices that do not fit."""
    obstacles: dict[Choice, str] = field(default_factory=dict)
    """Why choices that may fit in 1F1B can run in no schedule that was asked for."""
    estimated_ms: dict[Choice, float] = field(default_factory=dict)
    """Estimated times per sample of choices that fit, if not all are planned. In 1F1B or, of
    `compared` choices, in the best schedule."""
    compared: set[Choice] = field(default_factory=set)

    def run(self, choices: Iterable[Choice], most: int) -> None:
        """Plan new choices that may win. If there are more than `most`, estimates select them."""
        new = [choice for choice in choices if choice not in self.least_ms]
        full = possible_choices(self.setting, new, self.processes)
        self.advance(len(new) - len(full))  # choices with fewer packs than ranks
        for choice, bound in try_all(
            partial(find_bound, self.setting), full, self.processes
        ).items():
            if isinstance(bound, Need):
                # State alone is too large.
                self.least_ms[choice], self.need_gib[choice] = 0.0, bound.gib
                self.advance(1)
            else:
                self.least_ms[choice], self.bounds[choice] = bound.least_ms, bound
        # best first: early plans rule out the others
        in_order = sorted((choice for choice in full if choice in self.bounds), key=self._order)
        if len(full) > most:  # too many to plan: estimate first
            fastest = self._of_least_estimates(in_order, most)
            self._plan(fastest, True, len(fastest))
        else:
            # Parallel lookahead may plan more; `rank_strategies` drops these.
            self._plan(self._promising(in_order), False, len(full))

    def plan_all(self, choices: Sequence[Choice]) -> None:
        """Plan new choices whatever their bounds, which stay 0."""
        new = [choice for choice in dict.fromkeys(choices) if choice not in self.least_ms]
        full = possible_choices(self.setting, new, self.processes)
        self.least_ms.update(dict.fromkeys(full, 0.0))  # 0 is a bound of any time
        self._plan(full, False, len(full))

    def _plan(self, choices: Iterable[Choice], fits: bool, most: int) -> None:
        """Plan up to `most` choices in 1F1B, then in all schedules if another may be faster."""
        work = partial(plan_choice, self.setting.in_1f1b, fits)
        for choice, found in map_unordered(work, choices, max(min(self.processes, most), 1)):
            if isinstance(found, Need):
                self._drop(choice, found)
            else:
                self.planned[choice] = found
            self.advance(1)
        new = may_gain(self.setting, self.planned, self.scheduled)
        again = try_all(partial(plan_choice, self.setting, True), new, self.processes, self.advance)
        self.planned.update({c: s for c, s in again.items() if isinstance(s, Strategy)})
        self.scheduled.update(again)

    def _drop(self, choice: Choice, need: Need) -> None:
        """Record why a choice cannot be planned."""
        self.need_gib[choice] = need.gib
        if need.obstacle:
            self.obstacles[choice] = need.obstacle

    def _of_least_estimates(self, choices: Sequence[Choice], most: int) -> list[Choice]:
        """Return choices to plan, by their estimates: half of them of different sizes.

        First one choice per `_group_key` is estimated. Its ratio to its bound predicts the times of
        the group, with other expert sizes and caps.
        """
        by_bound = sorted(choices, key=lambda choice: -self.bounds[choice].about_ms)
        # A dict keeps the last choice of a group, here the one with the lowest bound.
        first = {_group_key(choice): choice for choice in by_bound}
        self._estimate(list(first.values()), len(first))
        choices = self._of_fast_kinds(choices)
        above = {
            sizes: self.estimated_ms[choice] / self.bounds[choice].about_ms
            for sizes, choice in first.items()
            if choice in self.estimated_ms
        }
        # Choices short of memory recompute more, which other expert sizes may avoid.
        usual = median(above.values()) if above else 1.0
        likely_ms = {
            choice: self.bounds[choice].about_ms * min(above.get(_group_key(choice), usual), usual)
            for choice in choices
            if choice not in first.values()
        }
        best_ms = min(
            (self.estimated_ms.get(choice, math.inf) for choice in choices), default=math.inf
        )
        likely_ms = {choice: self.bounds[choice].share * ms for choice, ms in likely_ms.items()}
        others = [
            choice
            for choice, ms in likely_ms.items()
            if self.least_ms[choice] <= _ESTIMATE_SLACK * best_ms and ms <= _LIKELY * best_ms
        ]
        others.sort(key=lambda choice: (likely_ms[choice], self._order(choice)))
        self.advance(len(likely_ms) - len(others))
        self._estimate(others, _MOST_ESTIMATED)
        estimated = [choice for choice in choices if choice in self.estimated_ms]
        fastest = self._fastest(estimated, most)
        while new := [
            choice for choice in fastest if self._least_estimate(choice) < self.estimated_ms[choice]
        ]:
            self._compare_schedules(new)
            fastest = self._fastest(estimated, most)
        return fastest

    def _fastest(self, estimated: Sequence[Choice], most: int) -> list[Choice]:
        """Return the choices that may be the fastest: half of them of different sizes."""
        least_ms = {choice: self._least_estimate(choice) for choice in estimated}
        by_ms = sorted(estimated, key=lambda choice: (least_ms[choice], self._order(choice)))
        limit_ms = _PLANNED_SLACK * least_ms[by_ms[0]] if by_ms else 0.0
        near = [choice for choice in by_ms if least_ms[choice] <= limit_ms]
        some = _first_of_sizes(near)[: most - most // 2]  # caps vary less than sizes
        return some + [choice for choice in near if choice not in some][: most - len(some)]

    def _least_estimate(self, choice: Choice) -> float:
        """Return the estimated time per sample, as if other schedules reached their bound."""
        share = 1.0 if choice in self.compared else self.bounds[choice].share
        return share * self.estimated_ms[choice]

    def _compare_schedules(self, choices: Sequence[Choice]) -> None:
        """Estimate choices in other schedules than 1F1B, too."""
        work = partial(estimate, self.setting.in_others, self.bounds)
        for choice, result in try_all(work, choices, self.processes).items():
            if not isinstance(result, Need):
                self.estimated_ms[choice] = min(result, self.estimated_ms[choice])
        self.compared.update(choices)

    def _of_fast_kinds(self, choices: Sequence[Choice]) -> list[Choice]:
        """Return choices without kinds clearly slower than the best kind.

        Choices stay if their group has no estimate.
        """
        least_ms: dict[Hashable, float] = {}
        for choice in self.estimated_ms:
            kind = _kind_key(choice)
            least_ms[kind] = min(least_ms.get(kind, math.inf), self._least_estimate(choice))
        limit_ms = _KIND_SLACK * min(self.estimated_ms.values(), default=math.inf)
        slow = {kind for kind, ms in least_ms.items() if ms > limit_ms}
        seen = set(map(_group_key, self.estimated_ms))
        fast = [
            choice
            for choice in choices
            if _kind_key(choice) not in slow or _group_key(choice) not in seen
        ]
        self.advance(
            sum(choice not in self.estimated_ms for choice in choices if choice not in fast)
        )
        return fast

    def _estimate(self, choices: Sequence[Choice], most: int) -> None:
        """Estimate choices in order until `most` of them fit."""
        found = dict[Choice, float | Need]()

        def until_enough() -> Iterator[Choice]:
            for choice in choices:
                if sum(not isinstance(result, Need) for result in found.values()) < most:
                    yield choice
                else:
                    self.advance(1)

        work = partial(estimate, self.setting, self.bounds)
        useful = max(min(self.processes, len(choices)), 1)
        for choice, result in map_unordered(work, until_enough(), useful):
            found[choice] = result
            self.advance(1)
        fitting = 0
        for choice in choices:
            # Parallel lookahead may have estimated more.
            if fitting == most:
                return
            result = found[choice]
            if isinstance(result, Need):
                self._drop(choice, result)
            else:
                self.estimated_ms[choice] = result
                fitting += 1

    def is_clearly_slower(self, choice: Choice) -> bool:
        """Whether a choice's bound is over `CLEARLY_WORSE`."""
        return self.least_ms[choice] > CLEARLY_WORSE * self.best_ms()

    def rank_strategies(self) -> list[Strategy]:
        """Return the best plan of sizes that may win by bounds and one of a few more, sorted."""
        best_ms, best = self.best_ms(), dict[Sizing, Strategy]()
        for choice in sorted(self.planned, key=self._order):
            found, sizing = self.planned[choice], choice[0]
            may_win = self.least_ms[choice] <= best_ms
            if sizing in best:
                if may_win:
                    best[sizing] = min(best[sizing], found, key=_rank)
            elif may_win or (len(best) < _MAX_EXTRA and not self.is_clearly_slower(choice)):
                best[sizing] = found
        return sorted(best.values(), key=_rank)

    def best_ms(self) -> float:
        """Min planned time per sample. Infinite if nothing is planned."""
        return min((strategy.ms_per_sample for strategy in self.planned.values()), default=math.inf)

    def estimate_unplanned(self, best: Choice, choices: Sequence[Choice]) -> float | None:
        """Min estimate, scaled to the best plan. None if none is estimated or any is planned."""
        known = [self.estimated_ms[choice] for choice in choices if choice in self.estimated_ms]
        if not known or any(choice in self.planned for choice in choices):
            return None
        best_ms = self.planned[best].ms_per_sample
        return min(known) / self.estimated_ms.get(best, best_ms) * best_ms

    def gap(self) -> float:
        """Max share of the best time that an unplanned choice may save, at least 0."""
        known = self.planned.keys() | self.need_gib.keys()
        # Choices that are neither planned nor too large for memory.
        bounds = (ms for choice, ms in self.least_ms.items() if choice not in known)
        return max(1 - min(bounds, default=math.inf) / self.best_ms(), 0.0)

    def _order(self, choice: Choice) -> tuple:
        """Sort key of choices: bounds, then sizes and caps."""
        sizing, caps = choice
        return self.least_ms[choice], str(sizing.parallel), *caps.values.tolist(), sizing.placement

    def _promising(self, choices: Iterable[Choice]) -> Iterator[Choice]:
        """Yield choices that may win, and the first fit of a few more near-best strategies."""
        for choice in choices:
            members = {sizing for sizing, _ in self.planned}
            is_shown = choice[0] not in members and len(members) < _MAX_EXTRA
            is_near = is_shown and not self.is_clearly_slower(choice)
            # later choices have larger bounds
            if self.least_ms[choice] <= self.best_ms() or is_near:
                yield choice
            else:
                self.advance(1)


def _first_of_sizes(choices: Iterable[Choice]) -> list[Choice]:
    """Return the first choice of every sizing, in order."""
    first = dict[Sizing, Choice]()
    for choice in choices:
        first.setdefault(choice[0], choice)
    return list(first.values())


def _group_key(choice: Choice) -> Hashable:
    """Key of choices that differ only in expert size and caps, with similar ratios to bounds."""
    parallel = choice[0].parallel
    sizes = parallel.tensor, parallel.pipeline, parallel.data, parallel.sharded
    return *sizes, choice[0].placement


def _kind_key(choice: Choice) -> Hashable:
    """Key of choices that are dropped together: placement and sharding."""
    return choice[0].placement, choice[0].parallel.sharding


def _rank(found: Strategy) -> tuple:
    """Sort key of strategies: time, then smallest sizes."""
    parallel, caps = found.parallel, found.caps
    sizes = parallel.tensor, parallel.pipeline, parallel.expert, parallel.sharded
    return found.ms_per_sample, *sizes, *reversed(caps.values.tolist()), found.placement
