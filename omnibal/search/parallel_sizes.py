"""Search for the tensor, pipeline, data and expert parallel sizes of least time on some devices.

Every product of the first three that the model and the cluster allow, with every expert size that
these allow, is compared at the same number of samples per step, on the same samples, in the same
packs, by the time per sample of `omnibal.search.trial`, so as `omnibal caps` compares caps.
Sequence parallelism goes with every tensor size above 1. Weights may be whole on every rank,
divided over all data-parallel ranks, or over those of a node: in a pipeline within a node alone,
and beside experts that ranks share out where that divides the experts' state as well.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.cost.links import shard_group
from omnibal.job.plan_data import limited_features
from omnibal.model.config import ClusterConfig
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.parallel import Parallel, expert_sizes
from omnibal.search.bounded import BoundedTrials
from omnibal.search.caps import cap_space, usual_samples_per_step
from omnibal.search.encoder_placement import neither
from omnibal.search.feasible import gib_text
from omnibal.search.schedule_choice import check_may_run, may_run
from omnibal.search.strategy import (
    Setting,
    Sizing,
    Strategy,
    StrategyRequest,
)

_MOST_PLANNED, _MOST_MOVES_PLANNED = 12, 4
"""Choices of sizes and caps that are planned; of more, estimates tell which."""
_LEVELS = tuple(2 ** (step / 2) for step in range(4))
"""Token caps to try where none are given, relative to the least."""
_MOVE = 2**0.25  # half of the way between two levels of caps
_MOVES = 6  # of two kinds of caps: each and both, smaller and larger
_FINALISTS = 3  # sizes that moves are tried at
_USUAL_MICRO_BATCHES = 8  # as of plans of given sizes
_NAMED_CAUSES = 2  # more than two causes are not read
_LEAST_CAUSE = 0.01
"""Share of the best time per sample below which a cause is not named."""
_ROUNDING = 1e-6
"""Tolerance before rounding down, as a share of the last digit shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuledOut:
    """Parallel sizes that were not planned."""

    sizing: Sizing
    need_gib: float | None
    """Memory of one device at the best caps tried and in the best split, at least; set where none
    fit."""
    most_samples_per_second: float | None
    """Upper bound; set where some caps may fit and all of these have a bound."""
    why: str
    estimated_samples_per_second: float | None = None
    """Estimate; set where bounds did not tell that the best strategy is faster."""

    @property
    def parallel(self) -> Parallel:
        """Parallel sizes."""
        return self.sizing.parallel

    @property
    def fastest(self) -> float:
        """Samples per second by which it is listed: as estimated, or at most; 0 where none fit."""
        return self.estimated_samples_per_second or self.most_samples_per_second or 0.0


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

    def led_by(self, strategy: Strategy) -> Self:
        """Return the ranking with one of its strategies first, as it is the best on all data."""
        if strategy == self.best:
            return self
        others = [each for each in self.ranking if each != strategy]
        ranking = [strategy, *others]
        return replace(
            self, ranking=tuple(replace(each, why=_why(each, strategy)) for each in ranking)
        )

    @classmethod
    def of(
        cls,
        request: StrategyRequest,
        ranking: Sequence[Strategy],
        ruled_out: Sequence[RuledOut],
        *,
        choices: int,
        planned: int,
        gap: float,
    ) -> Self:
        """Say of every strategy why it is not the first."""
        best = ranking[0]
        return cls(
            gpus=request.sizes.gpus,
            samples_per_step=request.samples_per_step,
            ranking=tuple(replace(each, why=_why(each, best)) for each in ranking),
            ruled_out=tuple(_against(each, best) for each in ruled_out),
            choices=choices,
            planned=planned,
            gap=gap,
        )


def strategy_samples_per_step(gpus: int, cluster: ClusterConfig) -> int:
    """Samples per step where none are given: 8 packs of 4.5 samples for every node."""
    return usual_samples_per_step(max(gpus // cluster.gpus_per_node, 1), _USUAL_MICRO_BATCHES)


def progress_total(request: StrategyRequest) -> int:
    """Total of the progress that `search_strategies` reports."""
    sizings = len(possible_sizings(request))
    if request.caps is not None:
        return sizings + _MOST_PLANNED
    moves = _FINALISTS * _MOVES + _MOST_MOVES_PLANNED
    return sizings * len(_LEVELS) + _MOST_PLANNED + moves


def search_strategies(
    request: StrategyRequest, on_progress: Callable[[int], None], processes: int = 1
) -> StrategySearch:
    """Rank all strategies by predicted time per sample."""
    sizings = possible_sizings(request)
    setting = Setting(request=request.drawn(), packs={})
    space = cap_space(request, limited_features(request.job.model))
    left = progress_total(request)

    def advance(done: int) -> None:
        nonlocal left
        left -= done
        on_progress(done)

    trials = BoundedTrials(setting=setting, processes=processes, advance=advance)
    if request.caps is None:
        levels = [space.level(factor)[-1] for factor in _LEVELS]
    else:
        levels = [request.caps]
    every = [(sizing, caps) for sizing in sizings for caps in dict.fromkeys(levels)]
    trials.run(every, _MOST_PLANNED)
    if request.caps is None and trials.planned:
        finalists = trials.ranked()[:_FINALISTS]
        moves = space.moves(finalists[0].caps, _MOVE)
        moved = [(each.sizing, caps) for each in finalists for caps in dict.fromkeys(moves)]
        trials.run(moved, _MOST_MOVES_PLANNED)
    on_progress(left)
    if not trials.planned:
        raise _unusable(trials, sizings)
    return _result(trials, sizings)


def possible_sizings(request: StrategyRequest) -> list[Sizing]:
    """List all parallel sizes whose product is the devices, by tensor, pipeline and expert size,
    with every placement of encoders that goes with them."""
    found, refused = list[Sizing](), dict[EncoderPlacement, UserError]()
    for placement in request.placements:
        try:
            placed = replace(request.job, placement=placement)
            parallels = _possible_parallels(replace(request, job=placed))
        except UserError as error:
            refused[placement] = error
        else:
            found += [Sizing(parallel, placement) for parallel in parallels]
    if found:
        return found
    raise neither(refused)


def _possible_parallels(request: StrategyRequest) -> list[Parallel]:
    _check_given(request)
    divides = request.sizes.sequence_parallel is not False
    ways, cluster = request.shardings, request.job.cluster
    whole = [
        Parallel(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            sequence_parallel=tensor > 1 and divides,
            expert=expert,
        )
        for tensor in _divisors(request.sizes.gpus)
        for pipeline in _divisors(request.sizes.gpus // tensor)
        for data in [request.sizes.gpus // (tensor * pipeline)]
        for expert in expert_sizes(request.job.model, tensor, data)
    ]
    held = ((way, each.held(way, cluster)) for each in whole for way in ways)
    always = request.job.trainer.always_shards
    # One rank has nothing to divide, which is another way unless the trainer knows no other.
    found = list(dict.fromkeys(p for way, p in held if p and (always or p.sharding is way)))
    if len(ways) > 1:
        found = [each for each in found if _is_worth_a_try(each, cluster)]
    possible = [p for p in found if request.sizes.are(p) and request.job.allows(p)]
    if possible:
        jobs = [request.job.sized(parallel) for parallel in possible]
        check_may_run(jobs, request.schedule)
        return [job.parallel for job in jobs if may_run(job, request.schedule)]
    if not found:
        raise UserError(
            f"{request.sizes.gpus} GPUs were given with --sharding {' or '.join(ways)}, and no "
            "data-parallel ranks of theirs can divide weights so: hybrid needs several nodes, full "
            "two ranks; use more GPUs, or give --sharding auto"
        )
    raise UserError(_impossible(request, list(filter(request.job.allows, found))))


def _is_worth_a_try(parallel: Parallel, cluster: ClusterConfig) -> bool:
    """Whether sizes are searched where ways to hold weights are free.

    Not a pipeline whose stages gather weights over the network for every micro-batch, of which it
    needs many, or that divides weights within a node in two ways. Nor groups that have all experts
    once and are copies of each other: every rank would have all state of its experts, which ranks
    with whole weights divide.
    """
    if parallel.sharded == 1:
        return True
    if parallel.expert_shards == 1 < parallel.expert_data:
        return False
    is_within = parallel.tensor == 1 and shard_group(parallel).is_within(cluster)
    return parallel.pipeline == 1 or is_within


def _check_given(request: StrategyRequest) -> None:
    """Refuse sizes that were given and can never be, whatever the others."""
    measured, sizes = request.job.cost_source.tensor, request.sizes
    if measured is not None and sizes.tensor not in (None, measured):
        raise UserError(
            f"--tp {sizes.tensor} was given with a profile of tensor size "
            f"{measured}, and costs of another size cannot be taken from it: leave "
            f"--tp out, give a profile of tensor size {sizes.tensor}, or count without --profile"
        )
    fixed = sizes.given
    product = math.prod(fixed.values())
    if sizes.gpus % product:
        product_text = " x ".join(f"{name} {size}" for name, size in fixed.items())
        below, above = (
            sizes.gpus // product * product,
            -(-sizes.gpus // product) * product,
        )
        near = f"{below} or {above}" if below else str(above)
        raise UserError(
            f"{sizes.gpus} GPUs are no multiple of {product_text} = {product}, and the parallel "
            f"sizes must multiply to the GPUs: use {near} GPUs or change the sizes"
        )
    tensor, expert = sizes.tensor or 1, sizes.expert or 1
    stages = sizes.pipeline or 1
    for alone in (
        Parallel(tensor=tensor, pipeline=stages, sequence_parallel=tensor > 1),
        Parallel(pipeline=1, data=expert, expert=expert),
    ):
        request.job.check_sizes(alone)


def _impossible(request: StrategyRequest, others: Sequence[Parallel]) -> str:
    """Message for given sizes that are impossible; `others` are possible if none is given."""
    sizes = request.sizes
    given = sizes.given | ({} if sizes.expert is None else {"--ep": sizes.expert})
    fixed = " ".join(f"{name} {size}" for name, size in given.items())
    model = request.job.pipeline_model
    allowed = sorted({each.tensor for each in others})
    measured = request.job.cost_source.tensor
    tensors = (
        "tensor sizes that divide its heads and fit a node"
        if measured is None
        else f"the profile is of tensor size {measured} alone"
    )
    expert = "" if sizes.expert is None else ", or give an --ep that divides tensor x data size"
    if others:
        remedy = (
            f"with {sizes.gpus} GPUs, tensor sizes may be {', '.join(map(str, allowed))}, and "
            f"for each the rest is shared by pipeline and data size: leave a size out{expert}"
        )
    else:
        other = "" if measured is None else ", or a profile of another tensor size"
        remedy = f"use another number of GPUs{other}"
    return (
        f"no parallel sizes multiply to {sizes.gpus} GPUs{f' with {fixed}' if fixed else ''}: "
        f"{model.name} on {request.job.cluster.name} allows at most {model.layers} pipeline "
        f"stages, one per layer, and {tensors}; {remedy}"
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _result(trials: BoundedTrials, sizings: Sequence[Sizing]) -> StrategySearch:
    ranked = trials.ranked()
    best = ranked[0]
    planned = {strategy.sizing for strategy in ranked}
    out = [_ruled_out(trials, each, best) for each in sizings if each not in planned]
    return StrategySearch.of(
        trials.setting.request,
        ranked,
        sorted(out, key=lambda each: (-each.fastest, each.need_gib or 0.0)),
        choices=len(trials.least_ms),
        planned=trials.planned_open(),
        gap=trials.gap(),
    )


def without_best(search: StrategySearch, why: str) -> StrategySearch:
    """Return the search without its best strategy, which cannot be used; there must be another.

    Strategies that were ruled out as clearly slower than that stay ruled out.
    """
    lost, *others = search.ranking
    out = RuledOut(sizing=lost.sizing, need_gib=None, most_samples_per_second=None, why=why)
    return replace(
        search,
        ranking=tuple(replace(each, why=_why(each, others[0])) for each in others),
        ruled_out=(out, *(_against(each, others[0]) for each in search.ruled_out)),
    )


def _against(ruled_out: RuledOut, best: Strategy) -> RuledOut:
    """Say of sizes with an estimate or a bound how much slower than the best they are."""
    if not ruled_out.fastest:
        return ruled_out
    slower = f"{1e3 / ruled_out.fastest / best.ms_per_sample - 1:+.0%}"
    is_estimate = ruled_out.estimated_samples_per_second is not None
    why = f"estimated {slower}, not planned" if is_estimate else f"at best {slower}"
    return replace(ruled_out, why=why)


def _why(strategy: Strategy, best: Strategy) -> str:
    """The causes that make most of the difference."""
    if strategy == best:
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


def _ruled_out(trials: BoundedTrials, sizing: Sizing, best: Strategy) -> RuledOut:
    choices = [choice for choice in trials.least_ms if choice[0] == sizing]
    if not choices:
        return RuledOut(
            sizing=sizing,
            need_gib=None,
            most_samples_per_second=None,
            why=f"a step has {_most_packs(trials)} packs for {sizing.parallel.data:,} ranks",
        )
    best_ms, least_ms = trials.best_ms(), trials.least_ms
    may_fit = [
        least_ms[choice]
        for choice in choices
        if least_ms[choice] > best_ms or choice not in trials.need_gib
    ]
    if may_fit:
        slower_ms = trials.estimate_beside((best.sizing, best.caps), choices)
        bound_ms = min(may_fit)
        return RuledOut(
            sizing=sizing,
            need_gib=None,
            most_samples_per_second=1e3 / bound_ms if bound_ms else None,
            why=f"at best {bound_ms / best.ms_per_sample - 1:+.0%}",
            estimated_samples_per_second=None if slower_ms is None else 1e3 / slower_ms,
        )
    need_gib = min(trials.need_gib[choice] for choice in choices)
    cap_gib = trials.setting.request.job.memory_cap_gib
    why = f"needs at least {gib_text(need_gib)} of {gib_text(cap_gib)} GiB"
    return RuledOut(sizing=sizing, need_gib=need_gib, most_samples_per_second=None, why=why)


def _most_packs(trials: BoundedTrials) -> str:
    """Most packs in a step of the requested samples, at any caps, rounded down to three digits."""
    if trials.setting.request.given is not None:
        return "too few"
    alone, setting = Sizing(Parallel(pipeline=1)), trials.setting
    packs = max(setting.micro_batches((alone, caps)) for caps in setting.packs)
    unit = 10.0 ** min(math.floor(math.log10(packs)) - 2, 0)
    return f"{math.floor(packs / unit + _ROUNDING) * unit:,g}"


def _unusable(trials: BoundedTrials, sizings: Sequence[Sizing]) -> UserError:
    request = trials.setting.request
    if not trials.least_ms:
        fewest = min(sizing.parallel.data for sizing in sizings)
        samples = min(request.samples_per_step, len(request.lengths))
        is_given = request.given is not None
        remedy = "" if is_given else "a larger --samples-per-step, smaller caps or "
        return UserError(
            f"a step of {samples:,} samples has {_most_packs(trials)} packs, "
            f"and {request.sizes.gpus} GPUs have at least {fewest:,} data-parallel ranks, of which "
            f"each must have one: give {remedy}fewer GPUs"
        )
    (sizing, caps), need_gib = min(trials.need_gib.items(), key=lambda each: each[1])
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
