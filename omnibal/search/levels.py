"""Search for levels of packs: how many, of which caps, and how each is shared, by simulated time.

Candidate caps are the top ones and their halves, down to what packs of several short samples need.
Every set of up to four of them with the top among them is looked at:

1. A level alone is estimated on the samples that it would hold, in every form: context size, cut
   and exchange (`omnibal.search.level_choice`). The best forms add up to an estimate of every set.
2. Sets whose estimate is near the least are packed, dealt and simulated, on some of the samples,
   with the split and the recomputed layers that the joint search finds quickly.
3. So are sets next to the best one, with other caps or another context size of one level.
4. The best few are simulated on more of the samples.

`least_ms_per_sample` bounds all sets from below, so that what is found comes with a gap. HBP
(arXiv 2503.07680) takes four levels at most by a rule (`omnibal.search.hbp_levels`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from omnibal.data.by_level import levels_of_packs
from omnibal.data.fit import check_samples_fit
from omnibal.data.scan_pool import map_unordered
from omnibal.errors import DoesNotFit, UserError
from omnibal.job import JobSpec
from omnibal.levels import Level
from omnibal.plan_data import SampleData
from omnibal.search.level_bound import least_ms_per_sample
from omnibal.search.level_choice import WholeModel, best_form
from omnibal.search.level_estimates import (
    MAX_SEARCHED,
    LevelEstimates,
    candidate_caps,
    own_samples,
)
from omnibal.search.level_trial import LevelTrial, LevelTrials, shorter_first

_SIMULATED_SAMPLES, _FINAL_SAMPLES = 12_000, 60_000
_FINALISTS = 3
_MOST_SIMULATED = 12
_ROUNDS = 2
"""Rounds of moves around the best set."""
_MOST_MOVES = 4 * MAX_SEARCHED - 2
_SHARED_PACKS = 2_000
"""Most packs of a level of given steps by which its form is chosen."""
LEAST_GAIN = 0.01
"""Share of time that a set must save to be taken in place of one of fewer levels."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelRequest:
    """A job and the samples that it trains, whose caps are those of the longest packs.

    Raises:
        UserError: a sample exceeds the caps, or fewer levels are possible than are asked for.
    """

    job: JobSpec
    data: SampleData
    """Samples without levels."""
    exactly: int | None = None
    """Number of levels; None for any up to `MAX_SEARCHED`."""

    def __post_init__(self) -> None:
        check_samples_fit(self.data.lengths, self.data.caps)
        most = min(self.most_levels, MAX_SEARCHED)
        if self.exactly is not None and self.exactly > most:
            raise UserError(
                f"{self.exactly} levels were asked for, and packs of these samples may have {most}:"
                f" tokens are halved from {self.data.caps['tokens']:,} while several samples of "
                "median length fit, and each level needs samples of its own; give fewer --levels, "
                "or auto"
            )

    @property
    def most_levels(self) -> int:
        """Levels that there can be at most, each with samples of its own."""
        lengths = self.data.lengths
        own = own_samples(lengths, candidate_caps(lengths, self.data.caps))
        return int(np.count_nonzero(own))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelSearch:
    """Result of a search for levels."""

    best: tuple[Level, ...]
    """Levels of the plan; empty for one level of context size 1."""
    ranking: tuple[LevelTrial, ...] = ()
    """Simulated sets, the chosen one first; empty where nothing but one level was possible."""
    least_ms_per_sample: float | None = None
    """Lower bound over all sets, context sizes, cuts and recomputed layers."""
    sets: int = 1
    """Sets of caps that were looked at."""
    tokens_per_step: float | None = None
    """Tokens of one rank in a step of any trial."""

    @property
    def gap(self) -> float | None:
        """Share of the chosen set's time by which another may be faster; None where none was
        simulated."""
        if self.least_ms_per_sample is None:
            return None
        return max(1 - self.least_ms_per_sample / self.ranking[0].ms_per_sample, 0.0)


def search_levels(
    request: LevelRequest, on_progress: Callable[[int], None], processes: int = 1
) -> LevelSearch:
    """Find the levels of least simulated time per sample.

    Of sets whose times differ by less than 1 % the one of fewest levels is chosen.

    Args:
        request: equal requests give equal results.
        on_progress: called with the trials done since the last call, `max_trials()` in all.
        processes: number of processes that try sets.

    Raises:
        UserError: no set of levels fits into memory.
    """
    left = max_trials()

    def advance() -> None:
        nonlocal left
        left -= 1
        on_progress(1)

    if is_one_level(request):
        on_progress(left)
        return LevelSearch(best=())
    estimates = LevelEstimates.of(request.job, request.data)
    trials = _Trials.of(request, estimates.tokens_per_step, processes, advance)
    trials.run(estimates.near(request.exactly, _MOST_SIMULATED))
    if not trials.found:
        raise _nothing_fits(request, trials)
    for _ in range(_ROUNDS):
        trials.run(estimates.moves(trials.ranked()[0].levels))
    final = trials.on_more_samples()
    final.run(each.levels for each in trials.ranked()[:_FINALISTS])
    on_progress(left)
    ranking = final.ranked() if final.found else trials.ranked()
    return LevelSearch(
        best=ranking[0].levels,
        ranking=tuple(ranking),
        least_ms_per_sample=least_ms_per_sample(request.job, final.trials.data.lengths),
        sets=len(estimates.sets(request.exactly)),
        tokens_per_step=estimates.tokens_per_step,
    )


def is_one_level(request: LevelRequest) -> bool:
    """Whether no search is needed: samples are of like length, and one rank holds a full pack."""
    is_alike = request.exactly is None and request.most_levels == 1
    return is_alike and _fits_alone(request.job, request.data)


def shared_anew(job: JobSpec, data: SampleData) -> SampleData:
    """Share packs of given steps in the way that is best for a job, which may have other ranks.

    Steps, packs and the caps of levels stay as they are.

    Raises:
        DoesNotFit: packs of a level fit no context size.
    """
    if data.steps is None or not data.levels:
        return data
    packs, lengths = data.steps.packs, data.lengths
    of_packs = levels_of_packs(packs, lengths, data.levels)
    levels = []
    for index, level in enumerate(data.levels):
        rows = np.flatnonzero(of_packs == index)[:_SHARED_PACKS]
        found = None
        if len(rows):
            some, micro_batches = packs.take(rows), data.micro_batches(job)
            found = best_form(job, level.caps, some, lengths, micro_batches)
            if found is None:
                raise DoesNotFit(
                    f"packs of {level.caps} of the earlier plan fit no number of ranks of "
                    f"{job.parallel}; raise --tp, --pp or --dp"
                )
        levels.append(Level(caps=level.caps) if found is None else found[1])
    context = np.array([level.context for level in levels])[of_packs]
    most = int(np.bincount(data.steps.step, weights=context).max())
    slots = -(-most // job.parallel.data)
    return replace(data, levels=tuple(levels), packs_per_step=slots * job.parallel.data)


def hbp_search(request: LevelRequest) -> LevelSearch:
    """Choose levels by HBP's rule, from estimates of its exchange in place of measured times.

    Raises:
        UserError: no length fits into memory.
    """
    estimates = LevelEstimates.of(request.job, request.data)
    trials = _Trials.of(request, estimates.tokens_per_step, 1, lambda: None)
    levels = estimates.by_hbp()
    trials.run([levels])
    if not trials.found:
        raise _nothing_fits(request, trials)
    return LevelSearch(best=levels, ranking=tuple(trials.found.values()))


def max_trials() -> int:
    """Most sets that a search simulates."""
    return _MOST_SIMULATED + _ROUNDS * _MOST_MOVES + _FINALISTS


def _fits_alone(job: JobSpec, data: SampleData) -> bool:
    """Whether one rank can train a pack that is at the caps, by the estimate of its memory."""
    whole = WholeModel.of(job, job.cost)
    counts = {name: data.caps.get(name) or 0 for name in job.cost.features}
    full = np.array([[counts[name] for name in job.cost.features]], np.float64)
    full[0, 0] = 1
    return bool(np.isfinite(whole.recomputed_share(full, job, data.micro_batches(job))))


def _nothing_fits(request: LevelRequest, trials: "_Trials") -> UserError:
    reason = next(iter(trials.failed.values()), "no context size holds its packs")
    return DoesNotFit(
        f"no levels of packs can be trained on {request.job.parallel}: {reason}; raise --dp, --tp "
        "or --pp, or shorten the longest samples"
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Trials:
    """Sets of levels that were tried on the same samples."""

    trials: LevelTrials
    whole: LevelTrials
    """The same with all samples."""
    processes: int
    advance: Callable[[], None]
    found: dict[tuple[Level, ...], LevelTrial] = field(default_factory=dict)
    failed: dict[tuple[Level, ...], str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        request: LevelRequest,
        tokens_per_step: float,
        processes: int,
        advance: Callable[[], None],
    ) -> "_Trials":
        whole = LevelTrials(job=request.job, data=request.data, tokens_per_step=tokens_per_step)
        return cls(
            trials=whole.drawn(_SIMULATED_SAMPLES),
            whole=whole,
            processes=processes,
            advance=advance,
        )

    def on_more_samples(self) -> "_Trials":
        """Trials on more of the samples; the same where there are no more."""
        if len(self.trials.data.lengths) == len(self.whole.data.lengths):
            return self
        return replace(self, trials=self.whole.drawn(_FINAL_SAMPLES), found={}, failed={})

    def run(self, sets: Iterable[tuple[Level, ...]]) -> None:
        """Try sets that have not been tried."""
        untried = [s for s in dict.fromkeys(sets) if s not in self.found and s not in self.failed]
        processes = max(min(self.processes, len(untried)), 1)
        results = {}
        for levels, result in map_unordered(self.trials, untried, processes):
            results[levels] = result
            self.advance()
        # In the order of `untried`, for results that do not depend on timing.
        for levels in untried:
            result = results[levels]
            if isinstance(result, str):
                self.failed[levels] = result
            else:
                self.found[levels] = result

    def ranked(self) -> list[LevelTrial]:
        """What was found, as it is chosen from."""
        return shorter_first(list(self.found.values()), LEAST_GAIN)
