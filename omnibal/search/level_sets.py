"""Search for levels of packs: their number, caps and context sizes, by simulated time.

Sets of up to four levels are built from the top caps and their halves. Estimates of single levels
(`omnibal.search.level_choice`) add up to estimates of sets. Near-minimal sets, and then changes to
the best set, are simulated on a subset with a quick joint split, and the best few on more samples.
`least_ms_per_sample` bounds all sets from below. HBP's rule is in `omnibal.search.level_estimates`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.model.levels import Level, are_plain
from omnibal.model.limits import check_packs_per_step
from omnibal.packing.by_level import levels_of_packs
from omnibal.packing.fit import check_samples_fit
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.pipeline.stage_memory import GIB
from omnibal.search.engine import Trials, whole_progress
from omnibal.search.level_choice import WholeModel, good_forms, has_good_shares, least_ms_per_sample
from omnibal.search.level_estimates import MAX_SEARCHED, LevelEstimates, most_shared
from omnibal.search.level_trial import LevelTrial, LevelTrials, shorter_first

SIMULATED_SAMPLES, _FINAL_SAMPLES = 12_000, 60_000
"""Samples of a trial, and of the finalists': more samples change packs by about 1 %."""
_FINALISTS = 3  # simulated again on more samples
_MOST_SIMULATED = 16  # a set takes 0.1 to 0.3 s
ROUNDS = 2
"""Rounds of moves around the best set."""
_MOST_MOVES = 4 * MAX_SEARCHED - 2
"""Two context sizes and two caps per level, without caps for the top."""
_SHARED_PACKS = 2_000
"""Max packs of a level of given steps for choosing its form."""
LEAST_GAIN = 0.01
"""Share of time that a set must save over a set of fewer levels."""

_Levels = tuple[Level, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelRequest:
    """Job and samples to find levels for."""

    job: JobSpec
    data: SampleData
    """Samples, at one level of the longest packs."""
    may_lower: bool = False
    """Whether the longest packs may be smaller than the data's caps."""
    exactly: int | None = None
    """Number of levels. None for any up to `MAX_SEARCHED`."""
    tokens_per_step: float | None = None
    """Tokens per rank and step. None for the data's micro-batches as full packs."""

    def __post_init__(self) -> None:
        check_packs_per_step(self.job.parallel.data, self.data.micro_batches(self.job))
        check_samples_fit(self.data.lengths, self.data.caps)
        most = min(self.most_levels, MAX_SEARCHED)
        if self.exactly is not None and self.exactly > most:
            raise UserError(
                f"{self.exactly} levels were asked for, and packs of these samples may have {most}:"
                f" tokens are halved from {self.data.caps['tokens']:,} while several samples of "
                "median length fit, and each level needs samples of its own; give fewer "
                "--packing-levels, or auto"
            )

    @property
    def most_levels(self) -> int:
        """Max number of levels that all have samples."""
        return LevelEstimates.most_levels(self.data)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelSearch:
    """Result of a search for levels."""

    ranking: tuple[LevelTrial, ...]
    """Simulated sets, the chosen one first."""
    least_ms_per_sample: float
    """Lower bound over all sets, context sizes, cuts and recomputed layers."""
    sets: int

    @property
    def best(self) -> tuple[Level, ...]:
        return self.ranking[0].levels

    @property
    def gap(self) -> float:
        """Max share of the chosen set's time that another set may save."""
        return max(1 - self.least_ms_per_sample / self.ranking[0].ms_per_sample, 0.0)


def search_levels(
    request: LevelRequest, on_progress: Callable[[int], None], processes: int = 1
) -> LevelSearch:
    """Find the levels with minimal simulated time per sample.

    Among sets within 1 % the set with fewest levels wins, unless HBP's is faster.
    """
    estimates = LevelEstimates.of(request.job, request.data, request.tokens_per_step)
    near = estimates.near(request.exactly, _MOST_SIMULATED - 1)
    rival = estimates.by_hbp() if near and request.exactly is None else None
    also = [] if rival is None else [rival]
    whole = _trials_of(request, estimates.tokens_per_step)
    some = whole.drawn(SIMULATED_SAMPLES)
    with whole_progress(max_trials(), on_progress) as advance:

        def trials_on(drawn: LevelTrials) -> Trials[_Levels, LevelTrial]:
            work = partial(_tried, drawn, request.exactly)
            return Trials(work=work, processes=processes, on_done=advance)

        trials = final = trials_on(some)
        trials.run([*near, *also])
        # One level in all forms, if nothing else fits or packs are too few for all ranks.
        may_be_one = request.exactly in (None, 1)
        if may_be_one and not (trials.found and _has_packs_for_all(request.job, request.data)):
            trials.run(estimates.tops(may_lower=request.may_lower))
        if not trials.found and (may_be_one or not trials.failed):
            trials.run([most_shared(request.job, request.data.caps)])
        if not trials.found:
            raise _nothing_fits(request, trials.failed)
        for _ in range(ROUNDS):
            trials.run(estimates.moves(_rank_trials(trials, rival)[0].levels))
        if len(some.data.lengths) < len(whole.data.lengths):
            some = whole.drawn(_FINAL_SAMPLES)
            final = trials_on(some)
        final.run([*(each.levels for each in _rank_trials(trials, rival)[:_FINALISTS]), *also])
    return LevelSearch(
        ranking=tuple(_rank_trials(final if final.found else trials, rival)),
        least_ms_per_sample=least_ms_per_sample(request.job, some.data.lengths),
        sets=len(estimates.sets(request.exactly)),
    )


def is_one_level(request: LevelRequest) -> bool:
    """Whether one unshared level is best without a search.

    True if samples have similar lengths and make packs for all ranks, and a full pack fits one rank
    without recomputation or its halves would be small.
    """
    job, data = request.job, request.data
    if request.exactly is not None or request.most_levels > 1:
        return False
    # Share of layers to recompute for a full pack to fit one rank.
    names = job.cost.features
    full = np.array([[1, *(data.caps.get(name) or 0 for name in names[1:])]], np.float64)
    whole = WholeModel.of(job, job.cost)
    recomputed = whole.recomputed_share(full, job, data.micro_batches(job))
    is_best_alone = recomputed == 0 or not has_good_shares(Level(caps=data.caps, context=2))
    return bool(np.isfinite(recomputed)) and is_best_alone and _has_packs_for_all(job, data)


def shared_anew(job: JobSpec, data: SampleData) -> SampleData:
    """Choose how ranks share the packs of given steps, for a job that may have other ranks.

    Steps, packs and caps do not change.
    """
    if data.steps is None:
        return data
    packs, lengths = data.steps.packs, data.lengths
    of_packs = levels_of_packs(packs, lengths, data.levels)
    levels, steps = [], data.steps.steps
    for index, level in enumerate(data.levels):
        rows = np.flatnonzero(of_packs == index)[:_SHARED_PACKS]
        found = None
        if len(rows):
            tokens_per_step = float(lengths.tokens[packs.samples].sum()) / steps / job.parallel.data
            forms = good_forms(job, level.caps, packs.take(rows), lengths, tokens_per_step)
            found = min(forms, key=lambda form: form.rows_ms, default=None)
            if found is None:
                raise DoesNotFit(
                    f"packs of {level.caps} of the earlier plan fit no number of ranks of "
                    f"{job.parallel}",
                    "raise --tp, --pp or --dp",
                )
        levels.append(Level(caps=level.caps) if found is None else found.level)
    context = np.array([level.context for level in levels])[of_packs]
    most = int(np.bincount(data.steps.step, weights=context).max())
    slots = -(-most // job.parallel.data)
    return replace(data, levels=tuple(levels), packs_per_step=slots * job.parallel.data)


def hbp_trial(request: LevelRequest) -> LevelTrial:
    """Choose levels by HBP's rule, with estimates in place of measured times."""
    estimates = LevelEstimates.of(request.job, request.data, request.tokens_per_step)
    some = _trials_of(request, estimates.tokens_per_step).drawn(SIMULATED_SAMPLES)
    levels, found = _tried(some, request.exactly, estimates.by_hbp())
    if isinstance(found, UserError):
        raise _nothing_fits(request, {levels: found})
    return found


def notes(found: LevelSearch) -> list[str]:
    """Describe a search's result, one sentence each."""
    best = found.ranking[0]
    words = " and ".join(
        f"{level.caps['tokens']:,} tokens on {level.context} rank(s)" for level in found.best
    )
    said = [
        f"packs of {words}, {best.micro_batches} a rank and step"
        if not are_plain(found.best)
        else "packs of one level are best"
    ]
    others = [trial for trial in found.ranking[1:] if len(trial.levels) != len(best.levels)]
    if others:
        slower = others[0].ms_per_sample / best.ms_per_sample - 1
        words = "faster, too little to be taken" if slower < 0 else "slower"
        said.append(f"the best of another number of levels is {abs(slower):.1%} {words}")
    said.append(
        f"of {found.sets} sets of sizes none can be more than {found.gap:.1%} faster, by a bound "
        "which leaves out all that packs, steps and the pipeline take besides their samples"
    )
    return said


def max_trials() -> int:
    """Max number of simulated sets in a search."""
    return _MOST_SIMULATED + ROUNDS * _MOST_MOVES + _FINALISTS + 1


def _has_packs_for_all(job: JobSpec, data: SampleData) -> bool:
    """Whether packs at the caps are enough for every rank."""
    ranks, tokens = job.parallel.data, data.lengths.tokens.sum(dtype=np.int64)
    if tokens >= ranks * data.caps["tokens"]:
        return True
    packs = pack_samples(data.lengths, data.caps, PackingMethod.ISF, data.settings.seed)
    return len(packs) >= ranks


def _nothing_fits(request: LevelRequest, failed: dict[_Levels, UserError]) -> UserError:
    """Error if no set of levels can be trained."""
    parallel = request.job.parallel
    other = [error for error in failed.values() if not isinstance(error, DoesNotFit)]
    if other:
        return UserError(f"no levels of packs can be trained on {parallel}: {other[-1]}")
    # The last set tried has the most ranks.
    levels, error = list(failed.items())[-1]
    assert isinstance(error, DoesNotFit)
    level = levels[-1]
    job, cap_gib = request.job, request.job.memory_cap_gib
    state_gib = WholeModel.of(job, job.cost).state_bytes / parallel.pipeline / GIB
    advice = "raise --tp or --pp, which divide weights"
    if state_gib < cap_gib:
        advice = (
            "raise --tp, --pp, or --dp for more ranks to share it, or shorten the longest samples"
        )
    return DoesNotFit(
        f"no levels of packs can be trained on {parallel}: with packs of up to "
        f"{level.caps['tokens']:,} tokens, each shared by {level.context} rank(s), {error.need}; "
        f"weights, gradients and optimizer state alone are {state_gib:.2f} GiB on average",
        advice,
    )


def _tried(
    trials: LevelTrials, count: int | None, levels: _Levels
) -> tuple[_Levels, LevelTrial | UserError]:
    """Try a set of levels. An error if other than `count` levels have packs."""
    found = trials(levels)
    if isinstance(found[1], LevelTrial) and count not in (None, len(found[1].levels)):
        return levels, UserError(
            f"packs of these samples are of fewer than {count} levels; give fewer "
            "--packing-levels, or auto"
        )
    return found


def _trials_of(request: LevelRequest, tokens_per_step: float) -> LevelTrials:
    """Trials with all samples. Raises if the curriculum is longer than an epoch."""
    data, wanted = request.data, request.data.settings.curriculum_steps
    tokens = float(data.lengths.tokens.sum(dtype=np.int64))
    steps = tokens / (tokens_per_step * request.job.parallel.data)
    if wanted > steps:
        raise UserError(
            f"a curriculum of {wanted:,} steps was asked for, and an epoch has about {steps:,.0f}; "
            "give fewer --curriculum-steps"
        )
    return LevelTrials(
        job=request.job,
        data=data,
        tokens_per_step=tokens_per_step,
        longest=data.least_caps(),
        curriculum_steps=wanted,
    )


def _rank_trials(found: Trials[_Levels, LevelTrial], rival: _Levels | None) -> list[LevelTrial]:
    """Distinct trials in the order of choice, none slower than HBP's levels as the first."""
    # Sets may become equal when levels without packs are dropped.
    distinct = {trial.levels: trial for trial in found.found.values()}
    by_hbp = None if rival is None else found.found.get(rival)
    return shorter_first(list(distinct.values()), LEAST_GAIN, by_hbp)
