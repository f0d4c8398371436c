"""Search for the tensor, pipeline, data and expert parallel sizes of least time on some devices.

Every product of the first three that the model and the cluster allow, with every expert size that
these allow, is compared at the same number of samples per step, on the same samples, in the same
packs, by the time per sample of `omnibal.search.trial`, so as `omnibal caps` compares caps.
Sequence parallelism goes with every tensor size above 1.

Caps that are not given are tried on a few levels, for every strategy, as the best caps depend on
how much memory is left and how long the pipeline is. Then smaller moves around the caps of the best
strategy are tried for the best few; the others keep the best of the levels.

Two things make this fast. Packs depend on the caps alone, so they are made once for all strategies.
And what cannot win is not planned: first a lower bound of the time of all splits is known
(`omnibal.pipeline.bounds`). Strategies are looked at in the order of their bounds: the least memory
of all splits says whether one fits, and then it is planned. Those whose bound is clearly above the
best time, and all but a few of those whose bound is above it, are listed with their bound, whether
they fit or not, and are not in the ranking, which has the fastest all the same.

Where there are more than `_MOST_PLANNED` choices of sizes and caps, some are estimated on a few
steps (`omnibal.search.trial.estimated_ms_per_sample`): one of every tensor, pipeline and data size,
then others in the order of their likely times. Of those, the ones with estimates near the least are
planned. The others are listed with their estimates or bounds, and the result says how much faster
than the best one they may be by their bounds. Limits are of trials and not of time, so that results
depend neither on the machine nor on the number of processes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from omnibal.config import ClusterConfig
from omnibal.data.scan_pool import map_unordered
from omnibal.errors import DoesNotFit, UserError
from omnibal.parallel import Parallel, expert_sizes
from omnibal.plan_data import limited_features
from omnibal.search.caps import cap_space, usual_samples_per_step
from omnibal.search.feasible import gib_text
from omnibal.search.strategy import (
    Bound,
    Choice,
    Estimate,
    Evaluate,
    FindBound,
    Need,
    PackSamples,
    Setting,
    Strategy,
    StrategyRequest,
)

CLEARLY_WORSE = 1.15
"""Factor over the best time per sample; a choice whose bound is above it is not planned
and not in the ranking."""

_SHOWN = 8
"""Strategies that are planned although their bounds say that they are not the best."""
_MOST_PLANNED, _MOST_MOVES_PLANNED = 12, 4
"""Choices of sizes and caps that are planned; of more, estimates tell which."""
_ESTIMATE_SLACK, _LIKELY = 1.02, 1.25
"""Factors over the least estimate of one choice of every tensor, pipeline and data size; another
one whose bound is above the first, or whose likely time is above the second, is not estimated."""
_MOST_ESTIMATED = 48
"""Choices that are estimated besides, of those that fit."""
_NEAR = 1.1
"""Factor over the least estimate; a choice whose estimate is above it is not planned."""
_LEVELS = tuple(2 ** (step / 2) for step in range(4))
"""Token caps to try where none are given, relative to the least."""
_MOVE = 2**0.25
_MOVES = 6
_FINALISTS = 3
_USUAL_MICRO_BATCHES = 8
_NAMED_CAUSES = 2
_LEAST_CAUSE = 0.01
"""Share of the best time per sample below which a cause is not named."""
_ROUNDING = 1e-6
"""Tolerance before rounding down, as a share of the last digit shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuledOut:
    """Parallel sizes that were not planned."""

    parallel: Parallel
    need_gib: float | None
    """Memory of one device at the best caps tried and in the best split, at least; set where none
    fit."""
    most_samples_per_second: float | None
    """Upper bound; set where some caps may fit and all of these have a bound."""
    why: str
    estimated_samples_per_second: float | None = None
    """Estimate; set where bounds did not tell that the best strategy is faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySearch:
    """Result of a strategy search: a ranking, and what was ruled out."""

    gpus: int
    samples_per_step: int
    ranking: tuple[Strategy, ...]
    """Strategies that were planned, the fastest first."""
    ruled_out: tuple[RuledOut, ...]
    """Strategies that are slower, by their bounds; then those that do not fit, by need."""
    choices: int
    """Parallel sizes with caps, of those that were tried."""
    planned: int
    """Choices that were planned, without those that are slower by their bounds."""
    gap: float
    """Gap between the best plan's time per sample and the lowest bound of a choice that was not
    planned, as a share of the former. Bounds count neither memory nor recomputation, so that it
    says how little is proven and not how much is lost. 0 where bounds rule out all choices that
    were not planned, and 1 where one has no bound."""

    @property
    def best(self) -> Strategy:
        """The fastest strategy."""
        return self.ranking[0]


def strategy_samples_per_step(gpus: int, cluster: ClusterConfig) -> int:
    """Samples per step where none are given: 8 packs of 4.5 samples for every node."""
    return usual_samples_per_step(max(gpus // cluster.gpus_per_node, 1), _USUAL_MICRO_BATCHES)


def progress_total(request: StrategyRequest) -> int:
    """Total of the progress that `search_strategies` reports."""
    parallels = len(possible_parallels(request))
    if request.caps is not None:
        return parallels + _MOST_PLANNED
    moves = _FINALISTS * _MOVES + _MOST_MOVES_PLANNED
    return parallels * len(_LEVELS) + _MOST_PLANNED + moves


def search_strategies(
    request: StrategyRequest, on_progress: Callable[[int], None], processes: int = 1
) -> StrategySearch:
    """Rank all strategies by predicted time per sample.

    Args:
        request: equal requests give equal results.
        on_progress: called with what is done since the last call, `progress_total` in all.
        processes: number of processes that evaluate strategies.

    Raises:
        DoesNotFit: no strategy fits into memory.
        UserError: no parallel sizes are possible, a sample exceeds the caps, or a step has too few
            packs.
    """
    parallels = possible_parallels(request)
    setting = Setting(request=request.drawn(), packs={})
    space = cap_space(request, limited_features(request.job.model))
    left = progress_total(request)

    def advance(done: int) -> None:
        nonlocal left
        left -= done
        on_progress(done)

    trials = _StrategyTrials(setting=setting, processes=processes, advance=advance)
    if request.caps is None:
        levels = [space.level(factor)[-1] for factor in _LEVELS]
    else:
        levels = [request.caps]
    every = [(parallel, caps) for parallel in parallels for caps in dict.fromkeys(levels)]
    trials.run(every, _MOST_PLANNED)
    if request.caps is None and trials.planned:
        finalists = trials.ranked()[:_FINALISTS]
        moves = space.moves(finalists[0].caps, _MOVE)
        moved = [(each.parallel, caps) for each in finalists for caps in dict.fromkeys(moves)]
        trials.run(moved, _MOST_MOVES_PLANNED)
    on_progress(left)
    if not trials.planned:
        raise _unusable(trials, parallels)
    return _result(trials, parallels)


def possible_parallels(request: StrategyRequest) -> list[Parallel]:
    """List all parallel sizes whose product is the devices, by tensor, pipeline and expert size.

    Raises:
        UserError: there are none, with what is possible.
    """
    _check_given(request)
    found = [
        Parallel(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            sequence_parallel=tensor > 1,
            expert=expert,
        )
        for tensor in _divisors(request.gpus)
        for pipeline in _divisors(request.gpus // tensor)
        for data in [request.gpus // (tensor * pipeline)]
        for expert in expert_sizes(request.job.model, tensor, data)
    ]
    possible = [parallel for parallel in found if _is_possible(request, parallel)]
    if possible:
        return possible
    raise UserError(_impossible(request, list(filter(request.job.allows, found))))


def _check_given(request: StrategyRequest) -> None:
    """Refuse sizes that were given and can never be, whatever the others."""
    measured = request.job.cost_source.tensor
    if measured is not None and request.tensor not in (None, measured):
        raise UserError(
            f"--tp {request.tensor} was given with a profile of tensor size "
            f"{measured}, and costs of another size cannot be taken from it: leave "
            f"--tp out, give a profile of tensor size {request.tensor}, or count without --profile"
        )
    fixed = request.given
    product = math.prod(fixed.values())
    if request.gpus % product:
        sizes = " x ".join(f"{name} {size}" for name, size in fixed.items())
        below, above = request.gpus // product * product, -(-request.gpus // product) * product
        near = f"{below} or {above}" if below else str(above)
        raise UserError(
            f"{request.gpus} GPUs are no multiple of {sizes} = {product}, and the parallel sizes "
            f"must multiply to the GPUs: use {near} GPUs or change the sizes"
        )
    tensor, expert = request.tensor or 1, request.expert or 1
    stages = request.pipeline or 1
    for alone in (
        Parallel(tensor=tensor, pipeline=stages, sequence_parallel=tensor > 1),
        Parallel(pipeline=1, data=expert, expert=expert),
    ):
        request.job.check_sizes(alone)


def _is_possible(request: StrategyRequest, parallel: Parallel) -> bool:
    wanted = (request.tensor, request.pipeline, request.data, request.expert)
    sizes = (parallel.tensor, parallel.pipeline, parallel.data, parallel.expert)
    as_given = all(want in (None, size) for want, size in zip(wanted, sizes, strict=True))
    return as_given and request.job.allows(parallel)


def _impossible(request: StrategyRequest, others: Sequence[Parallel]) -> str:
    """Message for given sizes that are impossible; `others` are possible if none is given."""
    given = request.given | ({} if request.expert is None else {"--ep": request.expert})
    fixed = " ".join(f"{name} {size}" for name, size in given.items())
    model = request.job.pipeline_model
    allowed = sorted({each.tensor for each in others})
    measured = request.job.cost_source.tensor
    tensors = (
        "tensor sizes that divide its heads and fit a node"
        if measured is None
        else f"the profile is of tensor size {measured} alone"
    )
    expert = "" if request.expert is None else ", or give an --ep that divides tensor x data size"
    if others:
        remedy = (
            f"with {request.gpus} GPUs, tensor sizes may be {', '.join(map(str, allowed))}, and "
            f"for each the rest is shared by pipeline and data size: leave a size out{expert}"
        )
    else:
        other = "" if measured is None else ", or a profile of another tensor size"
        remedy = f"use another number of GPUs{other}"
    return (
        f"no parallel sizes multiply to {request.gpus} GPUs{f' with {fixed}' if fixed else ''}: "
        f"{model.name} on {request.job.cluster.name} allows at most {model.layers} pipeline "
        f"stages, one per layer, and {tensors}; {remedy}"
    )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _StrategyTrials:
    """Strategies at caps, evaluated on the same samples."""

    setting: Setting
    processes: int
    advance: Callable[[int], None]
    least_ms: dict[Choice, float] = field(default_factory=dict)
    """Lower bounds on the times per sample of choices with a pack for every rank; 0 where none is
    known."""
    bounds: dict[Choice, Bound] = field(default_factory=dict)
    """What bounds say of those whose state may fit."""
    planned: dict[Choice, Strategy] = field(default_factory=dict)
    need_gib: dict[Choice, float] = field(default_factory=dict)
    """Memory of one device, at least, of choices that do not fit."""
    estimated_ms: dict[Choice, float] = field(default_factory=dict)
    """Estimated times per sample of choices that fit, where there are more than are planned."""

    def run(self, choices: Iterable[Choice], most: int) -> None:
        """Plan those of the new choices that fit and may be among the best; of more than `most`,
        those of the least estimates."""
        new = [choice for choice in choices if choice not in self.least_ms]
        packs = self.setting.packs
        caps = list(dict.fromkeys(caps for _, caps in new if caps not in packs))
        packs |= dict(map_unordered(PackSamples(setting=self.setting), caps, self._useful(caps)))
        full = [choice for choice in new if self.setting.micro_batches(choice) >= 1]
        self.advance(len(new) - len(full))
        in_order = sorted(self._bound(full), key=self._order)
        if len(full) > most:
            fastest = self._of_least_estimates(in_order, most)
            self._plan(fastest, Evaluate(setting=self.setting, fits=True), len(fastest))
            return
        # More processes may look at more, which are left out of the result.
        work = Evaluate(setting=self.setting)
        self._plan(self._promising(in_order), work, len(full))

    def _bound(self, choices: Sequence[Choice]) -> list[Choice]:
        """Find the bounds of choices; those whose state may fit."""
        find = FindBound(setting=self.setting)
        found = dict(map_unordered(find, choices, self._useful(choices)))
        for choice in choices:
            each = found[choice]
            if isinstance(each, Need):
                self.least_ms[choice], self.need_gib[choice] = 0.0, each.gib
                self.advance(1)
            else:
                self.least_ms[choice], self.bounds[choice] = each.least_ms, each
        return [choice for choice in choices if choice in self.bounds]

    def _plan(self, choices: Iterable[Choice], work: Evaluate, most: int) -> None:
        for choice, found in map_unordered(work, choices, max(min(self.processes, most), 1)):
            if isinstance(found, Strategy):
                self.planned[choice] = found
            else:
                self.need_gib[choice] = found.gib
            self.advance(1)

    def _of_least_estimates(self, choices: Sequence[Choice], most: int) -> list[Choice]:
        """Of choices in the order of their bounds, those to plan by their estimates: one of each
        of the fastest sizes, then the fastest whatever their sizes.

        First one choice of every tensor, pipeline and data size is estimated. How far it is above
        its bound says what the others, of other expert sizes and caps, may take.
        """
        by_bound = sorted(choices, key=lambda choice: -self.bounds[choice].about_ms)
        first = {_without_experts(choice): choice for choice in by_bound}
        self._estimate(list(first.values()), len(first))
        above = {
            sizes: self.estimated_ms[choice] / self.bounds[choice].about_ms
            for sizes, choice in first.items()
            if choice in self.estimated_ms
        }
        # What is short of memory recomputes much, which is less with other expert sizes.
        usual = median(above.values()) if above else 1.0
        likely_ms = {
            choice: self.bounds[choice].about_ms
            * min(above.get(_without_experts(choice), usual), usual)
            for choice in choices
            if choice not in first.values()
        }
        best_ms = min((self.estimated_ms.get(each, math.inf) for each in choices), default=math.inf)
        others = [
            choice
            for choice, ms in likely_ms.items()
            if self.least_ms[choice] <= _ESTIMATE_SLACK * best_ms and ms <= _LIKELY * best_ms
        ]
        others.sort(key=lambda choice: (likely_ms[choice], self._order(choice)))
        self.advance(len(likely_ms) - len(others))
        self._estimate(others, _MOST_ESTIMATED)
        by_ms = [choice for choice in choices if choice in self.estimated_ms]
        by_ms.sort(key=lambda choice: (self.estimated_ms[choice], self._order(choice)))
        limit_ms = _NEAR * self.estimated_ms[by_ms[0]] if by_ms else 0.0
        near = [choice for choice in by_ms if self.estimated_ms[choice] <= limit_ms]
        return _some_of_each(near, most)

    def _estimate(self, choices: Sequence[Choice], most: int) -> None:
        """Estimate choices in this order until so many that fit are estimated."""
        found = dict[Choice, float | Need]()

        def until_enough() -> Iterator[Choice]:
            for choice in choices:
                if sum(not isinstance(each, Need) for each in found.values()) < most:
                    yield choice
                else:
                    self.advance(1)

        work = Estimate(setting=self.setting)
        for choice, each in map_unordered(work, until_enough(), self._useful(choices)):
            found[choice] = each
            self.advance(1)
        fitting = 0
        for choice in choices:
            # More processes may have looked at more.
            if fitting == most:
                return
            each, bound = found[choice], self.bounds[choice]
            if isinstance(each, Need):
                self.need_gib[choice] = each.gib
            else:
                self.estimated_ms[choice] = each * bound.about_ms / bound.of_nearest_ms
                fitting += 1

    def is_clearly_slower(self, choice: Choice) -> bool:
        """Whether its bound alone says that a choice is none of the best."""
        return self.least_ms[choice] > CLEARLY_WORSE * self.best_ms()

    def ranked(self) -> list[Strategy]:
        """Best plan of each strategy that may have been the best of all by its bound, and of a few
        more.

        More processes may have planned more, which are left out.
        """
        best_ms, best = self.best_ms(), dict[Parallel, Strategy]()
        for choice in sorted(self.planned, key=self._order):
            found, (parallel, _) = self.planned[choice], choice
            may_win = self.least_ms[choice] <= best_ms
            if parallel in best:
                if may_win:
                    best[parallel] = min(best[parallel], found, key=_rank)
            elif may_win or (len(best) < _SHOWN and not self.is_clearly_slower(choice)):
                best[parallel] = found
        return sorted(best.values(), key=_rank)

    def best_ms(self) -> float:
        """Least time per sample planned; infinite without any."""
        return min((each.ms_per_sample for each in self.planned.values()), default=math.inf)

    def estimate_beside(self, best: Strategy, choices: Sequence[Choice]) -> float | None:
        """Least estimate of choices of which none was planned, on the scale of the best plan's
        time; None where none was estimated."""
        known = [self.estimated_ms[choice] for choice in choices if choice in self.estimated_ms]
        if not known or any(choice in self.planned for choice in choices):
            return None
        of_best = self.estimated_ms.get((best.parallel, best.caps), best.ms_per_sample)
        return min(known) / of_best * best.ms_per_sample

    def planned_open(self) -> int:
        """Choices that were planned and may have been the best by their bounds."""
        best_ms = self.best_ms()
        return sum(self.least_ms[choice] <= best_ms for choice in self.planned)

    def gap(self) -> float:
        """Share of the best time by which a choice that is not planned may be faster."""
        known = self.planned.keys() | self.need_gib.keys()
        bounds = (ms for choice, ms in self.least_ms.items() if choice not in known)
        return max(1 - min(bounds, default=math.inf) / self.best_ms(), 0.0)

    def _order(self, choice: Choice) -> tuple:
        """Key by which choices are looked at: their bounds."""
        parallel, caps = choice
        return self.least_ms[choice], str(parallel), *caps.values.tolist()

    def _promising(self, choices: Iterable[Choice]) -> Iterator[Choice]:
        """Choices that may be the best of all, and the first that fits of a few more strategies
        that are not clearly slower than the best."""
        for choice in choices:
            strategies = {parallel for parallel, _ in self.planned}
            is_shown = choice[0] not in strategies and len(strategies) < _SHOWN
            is_near = is_shown and not self.is_clearly_slower(choice)
            if self.least_ms[choice] <= self.best_ms() or is_near:
                yield choice
            else:
                self.advance(1)

    def _useful(self, tasks: Sequence) -> int:
        """Number of processes to use, no more than there are tasks."""
        return max(min(self.processes, len(tasks)), 1)


def _without_experts(choice: Choice) -> tuple[int, int, int]:
    """Tensor, pipeline and data size of a choice."""
    parallel, _ = choice
    return parallel.tensor, parallel.pipeline, parallel.data


def _some_of_each(choices: Sequence[Choice], most: int) -> list[Choice]:
    """`most` of the choices, the fastest first: half of them of different sizes."""
    first = dict[Parallel, Choice]()
    for choice in choices:
        first.setdefault(choice[0], choice)
    some = list(first.values())[: most - most // 2]
    others = [choice for choice in choices if choice not in some]
    return some + others[: most - len(some)]


def _rank(strategy: Strategy) -> tuple:
    parallel, caps = strategy.parallel, strategy.caps
    sizes = parallel.tensor, parallel.pipeline, parallel.expert, *reversed(caps.values.tolist())
    return strategy.ms_per_sample, *sizes


def _result(trials: _StrategyTrials, parallels: Sequence[Parallel]) -> StrategySearch:
    ranked = trials.ranked()
    best = ranked[0]
    planned = {strategy.parallel for strategy in ranked}
    out = [_ruled_out(trials, each, best) for each in parallels if each not in planned]
    request = trials.setting.request
    return StrategySearch(
        gpus=request.gpus,
        samples_per_step=request.samples_per_step,
        ranking=tuple(replace(strategy, why=_why(strategy, best)) for strategy in ranked),
        ruled_out=tuple(sorted(out, key=_order_of_ruled_out)),
        choices=len(trials.least_ms),
        planned=trials.planned_open(),
        gap=trials.gap(),
    )


def _order_of_ruled_out(each: RuledOut) -> tuple[float, float]:
    """Key by which strategies that were not planned are listed: the fastest first, then by need."""
    fastest = each.estimated_samples_per_second or each.most_samples_per_second or 0.0
    return -fastest, each.need_gib or 0.0


def without_best(search: StrategySearch, why: str) -> StrategySearch:
    """Return the search without its best strategy, which cannot be used; there must be another.

    Strategies that were ruled out as clearly slower than that stay ruled out.
    """
    lost, *others = search.ranking
    out = RuledOut(parallel=lost.parallel, need_gib=None, most_samples_per_second=None, why=why)
    return replace(
        search,
        ranking=tuple(replace(each, why=_why(each, others[0])) for each in others),
        ruled_out=(out, *(_against(each, others[0]) for each in search.ruled_out)),
    )


def _against(ruled_out: RuledOut, best: Strategy) -> RuledOut:
    most, estimate = ruled_out.most_samples_per_second, ruled_out.estimated_samples_per_second
    if estimate is not None:
        return replace(ruled_out, why=_why_not(1e3 / estimate, best))
    return ruled_out if most is None else replace(ruled_out, why=_why_slow(1e3 / most, best))


def _why_slow(least_ms: float, best: Strategy) -> str:
    return f"at best {least_ms / best.ms_per_sample - 1:+.0%}"


def _why_not(estimated_ms: float, best: Strategy) -> str:
    return f"estimated {estimated_ms / best.ms_per_sample - 1:+.0%}, not planned"


def _why(strategy: Strategy, best: Strategy) -> str:
    """The causes that make most of the difference."""
    if strategy is best:
        return "best"
    own, others = strategy.lost.named(), best.lost.named()
    # Ideal times differ by the work that tensor parallelism does not divide.
    share = {
        "compute" if name == "ideal" else name: (ms - others.get(name, 0.0)) / best.ms_per_sample
        for name, ms in own.items()
    }
    most = sorted(share, key=lambda name: -share[name])[:_NAMED_CAUSES]
    named = [f"{name} {share[name]:+.0%}" for name in most if share[name] >= _LEAST_CAUSE]
    return ", ".join(named) or "about as fast"


def _ruled_out(trials: _StrategyTrials, parallel: Parallel, best: Strategy) -> RuledOut:
    choices = [choice for choice in trials.least_ms if choice[0] == parallel]
    if not choices:
        return RuledOut(
            parallel=parallel,
            need_gib=None,
            most_samples_per_second=None,
            why=f"a step has {_most_packs(trials)} packs for {parallel.data:,} ranks",
        )
    best_ms, least_ms = trials.best_ms(), trials.least_ms
    may_fit = [
        least_ms[choice]
        for choice in choices
        if least_ms[choice] > best_ms or choice not in trials.need_gib
    ]
    if may_fit:
        slower_ms, bound_ms = trials.estimate_beside(best, choices), min(may_fit)
        return RuledOut(
            parallel=parallel,
            need_gib=None,
            most_samples_per_second=1e3 / bound_ms if bound_ms else None,
            why=_why_slow(bound_ms, best) if slower_ms is None else _why_not(slower_ms, best),
            estimated_samples_per_second=None if slower_ms is None else 1e3 / slower_ms,
        )
    need_gib = min(trials.need_gib[choice] for choice in choices)
    cap_gib = trials.setting.request.job.memory_cap_gib
    why = f"needs at least {gib_text(need_gib)} of {gib_text(cap_gib)} GiB"
    return RuledOut(parallel=parallel, need_gib=need_gib, most_samples_per_second=None, why=why)


def _most_packs(trials: _StrategyTrials) -> str:
    """Most packs in a step of the requested samples, at any caps, rounded down to three digits."""
    alone = Parallel(pipeline=1)
    packs = max(trials.setting.micro_batches((alone, caps)) for caps in trials.setting.packs)
    unit = 10.0 ** min(math.floor(math.log10(packs)) - 2, 0)
    return f"{math.floor(packs / unit + _ROUNDING) * unit:,g}"


def _unusable(trials: _StrategyTrials, parallels: Sequence[Parallel]) -> UserError:
    request = trials.setting.request
    if not trials.least_ms:
        fewest = min(parallel.data for parallel in parallels)
        samples = min(request.samples_per_step, len(request.lengths))
        return UserError(
            f"a step of {samples:,} samples has {_most_packs(trials)} packs, "
            f"and {request.gpus} GPUs have at least {fewest:,} data-parallel ranks, of which each "
            "must have one: give a larger --samples-per-step, smaller caps or fewer GPUs"
        )
    (parallel, caps), need_gib = min(trials.need_gib.items(), key=lambda each: each[1])
    cap_gib = request.job.memory_cap_gib
    looked_at = len({parallel for parallel, _ in trials.least_ms})
    idle = len(parallels) - looked_at
    others = f" ({idle} more have fewer packs in a step than ranks)" if idle else ""
    return DoesNotFit(
        f"none of {looked_at} ways to share {request.gpus} GPUs{others} fits "
        f"{request.job.model.name} into memory: the nearest, {parallel.options} at {caps}, "
        f"needs {gib_text(need_gib)} GiB per device at best, "
        f"and the memory cap is {gib_text(cap_gib)} GiB, which must hold every stage",
        "use more GPUs, devices with more memory or smaller caps",
    )
