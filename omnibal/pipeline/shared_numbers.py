"""Search for recompute numbers shared by all stages, and for their split.

Larger numbers save memory but take time. Numbers are tried upward in the order of their bounds,
until the bound without memory of the rest exceeds the best step. A language number is tried only if
some stage fits with it but not with one less, and only on splits that do not fit smaller numbers;
these are searched as usual (`split_search.py`), reusing all known critical paths.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np

from omnibal.model.targets import RecomputeFreedom
from omnibal.pipeline.bounds import least_largest, least_largest_with
from omnibal.pipeline.recompute_numbers import LOOKED_FOR, NONE_FITS, LeastNumbers, StageNumbers
from omnibal.pipeline.split_search import TOLERANCE, SplitSearch
from omnibal.pipeline.stage_options import (
    Choices,
    SearchProblem,
    StageOptions,
    choices_within,
    recomputing,
    runs_within,
)

Numbers = tuple[int, ...]
"""Recomputed layers of every encoder, then of the language model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberChoices:
    """Numbers allowed by the trainer."""

    encoders: tuple[tuple[int, ...], ...]
    """Numbers of every encoder, increasing; only 0 without a backward."""
    language_layers: int
    all_or_none: bool
    """Whether the language model recomputes all or none of its layers."""

    @classmethod
    def of(cls, freedom: RecomputeFreedom, least: LeastNumbers) -> "NumberChoices":
        """Return the choices for a trainer with shared numbers."""
        return cls(
            encoders=tuple(least.layers.encoder_numbers),
            language_layers=int((least.layers.stop - least.layers.first)[-1]),
            all_or_none=freedom is RecomputeFreedom.ALL,
        )

    def larger_encoders(self, numbers: Numbers) -> Iterator[Numbers]:
        """Yield numbers with the next larger number of an encoder, and 0 for the language model."""
        for place, (number, choices) in enumerate(zip(numbers, self.encoders, strict=False)):
            for later in choices[choices.index(number) + 1 :][:1]:
                yield (*numbers[:place], later, *numbers[place + 1 : -1], 0)

    def smaller_encoders(self, numbers: Numbers) -> Iterator[Numbers]:
        """Yield numbers with the next smaller number of an encoder."""
        for place, (number, choices) in enumerate(zip(numbers, self.encoders, strict=False)):
            for earlier in choices[: choices.index(number)][-1:]:
                yield (*numbers[:place], earlier, *numbers[place + 1 :])

    def larger_language(self, numbers: Numbers, worth: np.ndarray) -> Numbers | None:
        """Return numbers with the next larger language number in `worth` (unsorted), or None."""
        larger = worth[(worth > numbers[-1]) & (worth < NONE_FITS)]
        if not len(larger):
            return None
        return (*numbers[:-1], self.language_layers if self.all_or_none else int(larger.min()))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Found:
    """A search with given numbers, and a bound on its splits that do not fit smaller numbers."""

    search: SplitSearch
    bound_ms: float


@dataclass(kw_only=True, slots=True, eq=False)
class NumberSearch:
    """Searches over all numbers that a better result may have, and the best so far."""

    problem: SearchProblem
    choices_of_numbers: NumberChoices
    limit_ms: float
    """Max step time searched."""
    earlier: dict[Numbers, _Found] = field(default_factory=dict)
    """Searches under another limit."""
    found: dict[Numbers, _Found] = field(default_factory=dict)
    best: SplitSearch | None = None
    best_ms: float = np.inf
    least: dict[Numbers, list[np.ndarray]] = field(default_factory=dict)
    """Smallest fitting language number of each run at every stage, by the encoders' numbers."""

    def descend(self, most_work: float) -> bool:
        """Find the best split over all numbers within `most_work`, trying each number's first
        splits anyway; return whether there is any."""
        usable = runs_within(self.problem, self._ceiling_ms)
        if not all(map(len, usable)):
            return False
        none = (0,) * (len(self.choices_of_numbers.encoders) + 1)
        waiting, seen = [(0.0, none)], {none}
        while waiting:
            bound_ms, numbers = heappop(waiting)
            if bound_ms >= self._ceiling_ms * (1 - TOLERANCE):
                break
            anything = [np.zeros(len(runs)) for runs in usable]
            if np.isfinite(self._largest_of_new(numbers, usable, anything)):
                given, shared = self._numbers(numbers), numbers[-1]
                # One option per run of every stage, in order, whether it fits or not.
                options = [
                    recomputing(
                        self.problem, stage, r, given.recomputed(r, np.full(len(r), shared))
                    )
                    for stage, r in enumerate(usable)
                ]
                # Larger numbers take no less time.
                edges = [(option.start, option.end) for option in options]
                bounds_ms = [option.bound_ms for option in options]
                least_ms = least_largest(edges, bounds_ms, self.problem.units)
                bound_ms = max(bound_ms, least_ms)
                if bound_ms >= self._ceiling_ms * (1 - TOLERANCE):
                    continue
                most_work -= self._look_at(numbers, usable, options, most_work)
            worth = np.concatenate(self._least(numbers, usable))
            more = self.choices_of_numbers.larger_language(numbers, worth)
            for larger in (*self.choices_of_numbers.larger_encoders(numbers), more):
                if larger is not None and larger not in seen:
                    seen.add(larger)
                    heappush(waiting, (bound_ms, larger))
        return self.best is not None

    def with_options_of_better(self) -> "NumberSearch":
        """Return a search from the best result on, over all options of a better result."""
        search = NumberSearch(
            problem=self.problem,
            choices_of_numbers=self.choices_of_numbers,
            limit_ms=self.best_ms * (1 + TOLERANCE),
            earlier=self.found,
            best=self.best,
            best_ms=self.best_ms,
        )
        search.descend(0.0)
        return search

    def prove(self, most_work: float) -> float:
        """Search until nothing better is left or the work limit; return the proven bound."""
        lower_bound_ms = np.inf
        for found in sorted(self.found.values(), key=lambda found: found.bound_ms):
            search, own_ms = found.search, found.search.best_ms
            if found.bound_ms >= self.best_ms * (1 - TOLERANCE):
                continue
            search.best_ms = min(own_ms, self.best_ms)
            proven_ms = max(search.prove(max(most_work, 0.0)), found.bound_ms)
            most_work -= search.work
            lower_bound_ms = min(lower_bound_ms, proven_ms)
            if search.best_ms < self.best_ms:
                self.best, self.best_ms = search, search.best_ms
        return min(lower_bound_ms, self.best_ms)

    def quick_bound_ms(self) -> float:
        """Lower bound on every split with any numbers."""
        bounds_ms = [max(f.bound_ms, f.search.quick_bound_ms()) for f in self.found.values()]
        return min([*bounds_ms, self.best_ms])

    @property
    def best_options(self) -> list[StageOptions]:
        assert self.best is not None
        return self.best.best_options

    @property
    def simulated(self) -> int:
        return sum(found.search.simulated for found in self.found.values())

    @property
    def choices(self) -> Choices:
        """Options of every stage, with the numbers of the best split."""
        assert self.best is not None
        return self.best.choices

    @property
    def _ceiling_ms(self) -> float:
        return min(self.limit_ms, self.best_ms)

    def _numbers(self, numbers: Numbers) -> StageNumbers:
        assert self.problem.numbers is not None
        return replace(self.problem.numbers, fixed=(*numbers[:-1], LOOKED_FOR), shared=numbers[-1])

    def _least(self, numbers: Numbers, usable: list[np.ndarray]) -> list[np.ndarray]:
        """Return the smallest fitting language number of each run at every stage. [runs] each"""
        encoders = numbers[:-1]
        if encoders not in self.least:
            given = self._numbers(numbers)
            found = [given.least.find(*each, given.fixed) for each in enumerate(usable)]
            self.least[encoders] = found
        return self.least[encoders]

    def _look_at(
        self,
        numbers: Numbers,
        usable: list[np.ndarray],
        options: list[StageOptions],
        most_work: float,
    ) -> float:
        """Search with these numbers if they may be better; return the work done."""
        sizes_ms = [option.bound_ms for option in options]
        bound_ms = self._largest_of_new(numbers, usable, sizes_ms)
        if bound_ms >= self._ceiling_ms * (1 - TOLERANCE):
            return 0.0
        problem = replace(self.problem, numbers=self._numbers(numbers))
        search = SplitSearch(problem, choices_within(problem, self._ceiling_ms))
        earlier = self.earlier.get(numbers)
        if earlier is not None:
            search.simulated, search.cuts = earlier.search.simulated, earlier.search.cuts
        elif search.descend(max(most_work, 0.0)) and search.best_ms < self.best_ms:
            self.best, self.best_ms = search, search.best_ms
        self.found[numbers] = _Found(search=search, bound_ms=bound_ms)
        return search.work

    def _largest_of_new(
        self, numbers: Numbers, usable: list[np.ndarray], sizes: list[np.ndarray]
    ) -> float:
        """Return the min over splits of the largest size [runs], for splits that fit these numbers
        but no smaller numbers, infinite if there are none."""
        least, units = self._least(numbers, usable), self.problem.units
        runs = self.problem.structure.runs
        edges = [(runs.start[each], runs.end[each]) for each in usable]
        of_fitting = [
            np.where(each <= numbers[-1], size, np.inf)
            for each, size in zip(least, sizes, strict=True)
        ]
        larger_than = [
            [each > numbers[-1] for each in self._least(smaller, usable)]
            for smaller in self.choices_of_numbers.smaller_encoders(numbers)
        ]
        if numbers[-1]:
            smaller_number = 0 if self.choices_of_numbers.all_or_none else numbers[-1] - 1
            larger_than.append([each > smaller_number for each in least])
        with_new = [least_largest_with(edges, of_fitting, new, units) for new in larger_than]
        return max([least_largest(edges, of_fitting, units), *with_new])
