"""Search for the fastest sizes and caps: all candidates bounded, some estimated, few planned.

Candidates (`parallel_sizes`) are compared by time per sample (`trial`) at the same samples and
samples per step. Free caps are tried on a coarse grid for every strategy, then refined for the best
few.

Packs are shared by all strategies. Candidates are planned in the order of lower bounds on their
time (`omnibal.pipeline.bounds`) and skipped if the bound exceeds the best time. With more than
`_MOST_PLANNED` choices, estimates on a few steps decide which to plan
(`trial.estimated_over_bound`). Limits count trials, not time, so results depend neither on the
machine nor on the number of processes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.model.parallel import Parallel
from omnibal.search.bounded import BoundedTrials
from omnibal.search.caps import MOST_IN_GRID, cap_space
from omnibal.search.engine import whole_progress
from omnibal.search.memory_need import gib_text
from omnibal.search.parallel_sizes import possible_sizings
from omnibal.search.schedule_choice import CannotRunSchedule
from omnibal.search.strategy import MOST_SCHEDULED, Setting, Sizing, Strategy, StrategyRequest

_MOST_PLANNED, _MOST_MOVES_PLANNED = 12, 4
"""Max planned choices of sizes and caps. If there are more, estimates select them."""
_MOVE = 2**0.25  # halfway between two caps of the grid
_MOVES_OF_CAPS = 6  # for two kinds of caps: either and both, smaller and larger
_FINALISTS = 3  # plans to refine caps of: the best of every choice of sizes, then others
_LISTED_CAUSES = 2  # causes to name; longer lists are not read
_MIN_CAUSE = 0.01  # min share of the best time per sample for a cause to be named
_NAMED_GAIN = 0.005  # min possible gain of unplanned sizes to say how to plan them
_DIGIT_TOLERANCE = 1e-6  # tolerance before rounding down, as a share of the last digit shown


@dataclass(frozen=True, kw_only=True, slots=True)
class RuledOut:
    """Parallel sizes that are not in the ranking."""

    sizing: Sizing
    need_gib: float | None = None
    """Lower bound on memory per device over all caps tried. Set if none fit."""
    most_samples_per_second: float | None = None
    """Upper bound. Set if some caps may fit and all such caps have a bound."""
    why: str
    estimated_samples_per_second: float | None = None
    """Estimate, calibrated on the best plan. Set if caps were estimated and none planned."""

    @property
    def parallel(self) -> Parallel:
        return self.sizing.parallel

    @property
    def fastest(self) -> float:
        """Samples per second for sorting: estimate, else upper bound, else 0."""
        return self.estimated_samples_per_second or self.most_samples_per_second or 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySearch:
    """Ranking of strategies, and parallel sizes that were ruled out."""

    gpus: int
    samples_per_step: int
    ranking: tuple[Strategy, ...] = ()  # planned strategies, fastest first
    ruled_out: tuple[RuledOut, ...] = ()
    """Fastest first by estimate or bound, then by memory needed. `without` adds in front."""
    choices: int  # tried combinations of sizes and caps
    planned: int  # planned choices that may win by their bounds
    gap: float
    """Gap between the best time per sample and the lowest bound of an unplanned choice, relative to
    that time. Bounds ignore memory and recomputation, so the gap overstates the possible loss.
    0 if bounds rule out all unplanned choices."""

    @property
    def best(self) -> Strategy:
        return self.ranking[0]

    def with_ranking(self, ranking: Sequence[Strategy], ruled_out: Sequence[RuledOut]) -> Self:
        """Return the result with these strategies, and why each is slower than the first."""
        best = ranking[0]
        return replace(
            self,
            ranking=tuple(
                replace(strategy, why=_name_causes(strategy, best)) for strategy in ranking
            ),
            ruled_out=tuple(_against(other, best) for other in ruled_out),
        )

    def led_by(self, strategy: Strategy) -> Self:
        """Return the result with `strategy` moved to the front, as the best on all data."""
        others = [other for other in self.ranking if other != strategy]
        return self.with_ranking([strategy, *others], self.ruled_out)

    def without(self, lost: Strategy, why: str) -> Self:
        """Return the result with a strategy ruled out, which must not be the only one."""
        # Compare choices: copies of a strategy may differ in `why`, by the best at that time.
        others = [strategy for strategy in self.ranking if strategy.choice != lost.choice]
        return self.with_ranking(others, [RuledOut(sizing=lost.sizing, why=why), *self.ruled_out])


def progress_total(request: StrategyRequest) -> int:
    """Return the total of the progress that `search_strategies` reports."""
    sizings = len(possible_sizings(request))
    if request.caps is not None:
        return sizings + 2 * _MOST_PLANNED + MOST_SCHEDULED
    moves = 2 * _FINALISTS * _MOVES_OF_CAPS + 2 * _MOST_MOVES_PLANNED
    return sizings * MOST_IN_GRID + 2 * (_MOST_PLANNED + MOST_SCHEDULED) + moves


def search_strategies(
    request: StrategyRequest,
    on_progress: Callable[[int], None],
    processes: int = 1,
    *,
    is_quick: bool = False,
) -> StrategySearch:
    """Return strategies ranked by predicted time per sample. UserError if none can be planned.

    Args:
        is_quick: whether to plan the few best choices of the grid alone.
    """
    sizings = possible_sizings(request)
    setting, space = Setting(request=request.draw_samples(), packs={}), cap_space(request)
    grid = space.grid() if request.caps is None else [request.caps]
    with whole_progress(progress_total(request), on_progress) as advance:
        trials = BoundedTrials(setting=setting, processes=processes, advance=advance)
        trials.run(product(sizings, grid), _MOST_MOVES_PLANNED if is_quick else _MOST_PLANNED)
        if not trials.planned:
            sizings = possible_sizings(request, is_all=True)
            trials.run(product(sizings, grid), _MOST_PLANNED)
        if request.caps is None and trials.planned and not is_quick:
            ranked = trials.rank_strategies()
            # With few sizes, their other caps are moved too.
            others = [strategy for strategy in trials.planned.values() if strategy not in ranked]
            others.sort(key=lambda strategy: strategy.ms_per_sample)
            finalists = [*ranked, *others][:_FINALISTS]
            best_moves = space.moves(finalists[0].caps, _MOVE)
            # Also around the finalist's own caps, as if its sizes were the only ones.
            moved = [
                (strategy.sizing, caps)
                for strategy in finalists
                for caps in dict.fromkeys(best_moves + space.moves(strategy.caps, _MOVE))
            ]
            trials.run(moved, _MOST_MOVES_PLANNED)
    if not trials.planned:
        raise unusable(trials, sizings)
    return _result(trials, sizings)


def _result(trials: BoundedTrials, sizings: Sequence[Sizing]) -> StrategySearch:
    ranked = trials.rank_strategies()
    best = ranked[0]
    planned = {strategy.sizing for strategy in ranked}
    out = [_ruled_out(trials, sizing, best) for sizing in sizings if sizing not in planned]
    request, best_ms = trials.setting.request, trials.best_ms()
    found = StrategySearch(
        gpus=request.sizes.gpus,
        samples_per_step=request.samples_per_step,
        choices=len(trials.least_ms),
        planned=sum(trials.least_ms[choice] <= best_ms for choice in trials.planned),
        gap=trials.gap(),
    )
    out.sort(key=lambda other: (-other.fastest, other.need_gib or 0.0))
    return found.with_ranking(ranked, out)


def _against(ruled_out: RuledOut, best: Strategy) -> RuledOut:
    """Set `why` to the slowdown relative to the best, for sizes with an estimate or bound."""
    if not ruled_out.fastest:
        return ruled_out
    slower = 1e3 / ruled_out.fastest / best.ms_per_sample - 1
    is_estimate = ruled_out.estimated_samples_per_second is not None
    why = f"{slower:+.0%}, estimated" if is_estimate else f"at best {slower:+.0%}"
    if slower <= -_NAMED_GAIN:
        why = f"{why}; to plan it: {ruled_out.sizing.options}"
    return replace(ruled_out, why=why)


def _name_causes(strategy: Strategy, best: Strategy) -> str:
    """Return the main causes of the added time, as shares of the best's."""
    if strategy == best:
        return "best"
    own, others = strategy.lost.causes(), best.lost.causes()
    # "compute": ideal times differ by work that tensor parallelism does not divide.
    share = {
        "compute" if name == "ideal" else name: (ms - others.get(name, 0.0)) / best.ms_per_sample
        for name, ms in own.items()
    }
    most = sorted(share, key=lambda name: -share[name])[:_LISTED_CAUSES]
    named = [f"{name} {share[name]:+.0%}" for name in most if share[name] >= _MIN_CAUSE]
    return ", ".join(named) or "about as fast"


def _ruled_out(trials: BoundedTrials, sizing: Sizing, best: Strategy) -> RuledOut:
    choices = [choice for choice in trials.least_ms if choice[0] == sizing]
    if not choices:
        return RuledOut(
            sizing=sizing,
            why=f"a step has {_most_packs(trials)} packs for {sizing.parallel.data:,} ranks",
        )
    best_ms, least_ms = trials.best_ms(), trials.least_ms
    may_fit = [
        least_ms[choice]
        for choice in choices
        if least_ms[choice] > best_ms or choice not in trials.need_gib
    ]
    if may_fit:
        slower_ms = trials.estimate_unplanned((best.sizing, best.caps), choices)
        bound_ms = min(may_fit)
        return RuledOut(
            sizing=sizing,
            most_samples_per_second=1e3 / bound_ms if bound_ms else None,
            why=f"at best {bound_ms / best.ms_per_sample - 1:+.0%}",
            estimated_samples_per_second=None if slower_ms is None else 1e3 / slower_ms,
        )
    for choice in choices:
        if choice in trials.obstacles:
            return RuledOut(sizing=sizing, why=trials.obstacles[choice])
    need_gib = min(trials.need_gib[choice] for choice in choices)
    cap_gib = trials.setting.request.job.memory_cap_gib
    why = f"needs at least {gib_text(need_gib)} of {gib_text(cap_gib)} GiB"
    return RuledOut(sizing=sizing, need_gib=need_gib, why=why)


def _most_packs(trials: BoundedTrials) -> str:
    """Return max packs of a step's samples at any caps tried, rounded down to three digits."""
    if trials.setting.request.given is not None:
        return "too few"
    alone, setting = Sizing(Parallel(pipeline=1)), trials.setting  # one rank gets all packs
    packs = max(setting.micro_batches((alone, caps)) for caps in setting.packs)
    unit = 10.0 ** min(math.floor(math.log10(packs)) - 2, 0)
    return f"{math.floor(packs / unit + _DIGIT_TOLERANCE) * unit:,g}"


def unusable(trials: BoundedTrials, sizings: Sequence[Sizing]) -> UserError:
    """Return the error of trials without a plan: too few packs, or too little memory."""
    request = trials.setting.request
    if not trials.least_ms:
        fewest = min(sizing.parallel.data for sizing in sizings)
        samples = min(request.samples_per_step, len(request.lengths))
        is_given = request.given is not None
        remedy = "" if is_given else "a larger --samples-per-step, smaller caps or "
        return UserError(
            f"a step of {samples:,} samples has {_most_packs(trials)} packs, "
            f"and {request.sizes.gpus} GPUs have at least {fewest:,} data-parallel ranks, and each "
            f"must have one: give {remedy}fewer GPUs"
        )
    if trials.obstacles:
        return CannotRunSchedule(next(iter(trials.obstacles.values())))
    (sizing, caps), need_gib = min(trials.need_gib.items(), key=lambda need: need[1])
    cap_gib = request.job.memory_cap_gib
    looked_at = len({sizing for sizing, _ in trials.least_ms})
    idle = len(sizings) - looked_at
    others = f" ({idle} more have fewer packs in a step than ranks)" if idle else ""
    return DoesNotFit(
        f"none of {looked_at} ways to share {request.sizes.gpus} GPUs{others} fits "
        f"{request.job.model.name} into memory: the nearest, {sizing.options} at {caps}, "
        f"needs {gib_text(need_gib)} GiB per device at best, "
        f"and the memory cap is {gib_text(cap_gib)} GiB, which must hold every stage",
        "use more GPUs, devices with more memory or smaller caps",
    )
