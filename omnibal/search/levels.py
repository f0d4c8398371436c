"""Search for levels of packs: how many, of which caps, and how each is shared, by simulated time.

Candidate caps are the top ones and their halves, down to what packs of several short samples need.
Every set of up to four of them with the top among them is looked at:

1. A level alone is estimated on the samples that it would hold, in every form: context size, cut
   and exchange (`omnibal.search.level_choice`). The best forms add up to an estimate of every set.
2. Sets whose estimate is near the least are packed, dealt and simulated, on some of the samples,
   with the split and the recomputed layers that the joint search finds quickly. Then other context
   sizes of each level of the best set are.
3. The best few are simulated on more of the samples.

`least_ms_per_sample` bounds all sets from below, so that what is found comes with a gap. HBP
(arXiv 2503.07680) takes four levels at most by a rule; `profiled_lengths` is what it needs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from omnibal.cost.model import pack_features
from omnibal.data.by_level import levels_of_packs, levels_of_samples
from omnibal.data.fit import check_samples_fit
from omnibal.data.lengths import Lengths
from omnibal.data.packing import PackingMethod, pack_samples
from omnibal.data.packs import Packs
from omnibal.data.scan_pool import map_unordered
from omnibal.errors import DoesNotFit, UserError
from omnibal.job import JobSpec
from omnibal.levels import CutRule, Level
from omnibal.limits import Caps
from omnibal.plan_data import SampleData
from omnibal.search.hbp_levels import ProfiledLength, hbp_levels
from omnibal.search.level_bound import least_ms_per_sample
from omnibal.search.level_choice import (
    WholeModel,
    best_form,
    estimated_ms,
    level_forms,
    possible_contexts,
)
from omnibal.search.level_trial import LevelTrial, LevelTrials, shorter_first

MAX_SEARCHED = 4
"""Most levels of a set, as in HBP."""
_SAMPLES_PER_PACK = 4.5
"""Samples of median length that the shortest packs hold: fewer leave a rank too little to do."""
_MAX_CAPS = 7
_ESTIMATED_SAMPLES = 3_000
"""Most samples by which a level is estimated, of those that it would hold."""
_SIMULATED_SAMPLES, _FINAL_SAMPLES = 12_000, 60_000
_FINALISTS = 3
_NEAR = 1.15
"""Sets are simulated whose estimate is at most so many times the least."""
_MOST_SIMULATED = 16
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
        own = _own_samples(lengths, candidate_caps(lengths, self.data.caps))
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
    samples_per_step: float | None = None
    """Samples over which what happens once a step was spread in all trials."""

    @property
    def gap(self) -> float | None:
        """Share of the chosen set's time by which another may be faster; None where none was
        simulated."""
        if self.least_ms_per_sample is None:
            return None
        return max(1 - self.least_ms_per_sample / self.ranking[0].ms_per_sample, 0.0)


def candidate_caps(lengths: Lengths, top: Caps) -> tuple[Caps, ...]:
    """Caps that levels may have, rising to the top ones.

    Tokens are halved from level to level while packs of several samples of median length fit, and
    other limits go down with them.
    """
    needed = _SAMPLES_PER_PACK * float(np.median(lengths.tokens))
    found = [top]
    while len(found) < _MAX_CAPS and found[-1]["tokens"] / 2 >= needed:
        found.append(_scaled(top, -(-found[-1]["tokens"] // 2)))
    return tuple(reversed(found))


def _own_samples(lengths: Lengths, caps: Sequence[Caps]) -> np.ndarray:
    """Count the samples that each of rising caps is the smallest to hold, [caps]."""
    own = levels_of_samples(lengths, [Level(caps=each) for each in caps])
    return np.bincount(own, minlength=len(caps))


def _scaled(top: Caps, tokens: int) -> Caps:
    """Caps of so many tokens, and as large a part of the others."""
    others = {n: max(math.ceil(top[n] * tokens / top["tokens"]), 1) for n in top.names[:-1]}
    return Caps.of(**others, tokens=tokens)


def top_caps(lengths: Lengths, names: Sequence[str]) -> Caps:
    """Caps of the longest packs where none are given: the power of two that the longest sample
    needs, and as many items as go with so many tokens."""
    tokens = 1 << int(lengths.tokens.max() - 1).bit_length()
    share = tokens / float(lengths.tokens.sum(dtype=np.int64))
    others = {
        name: max(
            int(lengths.column(name).max()),
            math.ceil(share * float(lengths.column(name).sum(dtype=np.int64))),
            1,
        )
        for name in names
        if name != "tokens"
    }
    return Caps.of(**others, tokens=tokens)


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
    caps = candidate_caps(request.data.lengths, request.data.caps)
    estimates = _Estimates.of(request, caps)
    trials = _Trials.of(request, estimates.samples_per_step, processes, advance)
    near = estimates.near(request.exactly)
    trials.run(near)
    if not trials.found:
        raise _nothing_fits(request, trials)
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
        samples_per_step=estimates.samples_per_step,
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
        rows = np.flatnonzero(of_packs == index)[:_ESTIMATED_SAMPLES]
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
    estimates = _Estimates.of(request, candidate_caps(request.data.lengths, request.data.caps))
    return LevelSearch(best=estimates.by_hbp())


def max_trials() -> int:
    """Most sets that a search simulates."""
    return _MOST_SIMULATED + 2 * MAX_SEARCHED + _FINALISTS


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
        samples_per_step: float,
        processes: int,
        advance: Callable[[], None],
    ) -> "_Trials":
        whole = LevelTrials(job=request.job, data=request.data, samples_per_step=samples_per_step)
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Estimates:
    """Levels that were estimated alone, by the caps below and their own."""

    request: LevelRequest
    caps: tuple[Caps, ...]
    packed: dict[tuple[int, int], tuple[Packs, Lengths]]
    """Packs of samples that are longer than one of the caps (-1: none) and fit another."""
    share: dict[tuple[int, int], float]
    """What packs of these stand for: how many times the work of the packed samples."""
    best: dict[tuple[int, int], tuple[float, Level]]
    """Estimated ms and form; without those that do not fit."""

    @classmethod
    def of(cls, request: LevelRequest, caps: tuple[Caps, ...]) -> "_Estimates":
        job, lengths = request.job, request.data.lengths
        of_sample = levels_of_samples(lengths, [Level(caps=each) for each in caps])
        work = _work_ms(job, lengths)
        rng = np.random.default_rng(request.data.seed)
        packed, share, best = {}, {}, {}
        for lower, upper in combinations(range(-1, len(caps)), 2):
            rows = np.flatnonzero((of_sample > lower) & (of_sample <= upper))
            if not len(rows):
                continue
            drawn = np.sort(rng.permutation(rows)[:_ESTIMATED_SAMPLES])
            some = lengths.take(drawn)
            packs = pack_samples(some, caps[upper], PackingMethod.ISF, request.data.seed)
            key = lower, upper
            packed[key], share[key] = (packs, some), work[rows].sum() / work[drawn].sum()
            found = best_form(job, caps[upper], packs, some, request.data.micro_batches(job))
            if found is not None:
                best[key] = found
        return cls(request=request, caps=caps, packed=packed, share=share, best=best)

    @property
    def samples_per_step(self) -> float:
        """Samples of a step of packs of one level, in its best form."""
        data, top = self.request.data, len(self.caps) - 1
        found = self.best.get((-1, top))
        context = self.request.job.parallel.data if found is None else found[1].context
        tokens = data.packs_per_step * data.caps["tokens"] / context
        return max(tokens / float(data.lengths.tokens.mean()), 1.0)

    def sets(self, exactly: int | None) -> list[tuple[int, ...]]:
        """All sets of caps with the top ones, as indices into the caps."""
        counts = range(1, MAX_SEARCHED + 1) if exactly is None else [exactly]
        top = len(self.caps) - 1
        return [(*rest, top) for n in counts for rest in combinations(range(top), n - 1)]

    def near(self, exactly: int | None) -> list[tuple[Level, ...]]:
        """Sets whose estimate is near the least, HBP's, and one level on one rank, the simplest."""
        estimated = []
        for chosen in self.sets(exactly):
            steps = list(zip((-1, *chosen[:-1]), chosen, strict=True))
            if all(step in self.best for step in steps):
                total_ms = sum(self.share[step] * self.best[step][0] for step in steps)
                estimated.append((total_ms, tuple(self.best[step][1] for step in steps)))
        estimated.sort(key=lambda pair: pair[0])
        if not estimated:
            return []
        limit = _NEAR * estimated[0][0]
        near = [levels for ms, levels in estimated if ms <= limit][: _MOST_SIMULATED - 2]
        if exactly in (None, 1):
            near.append((Level(caps=self.caps[-1]),))
        if exactly is None:
            near.append(self.by_hbp())
        return [_as_data_has(levels) for levels in near]

    def by_hbp(self) -> tuple[Level, ...]:
        """Levels by HBP's Algorithm 1, with packs of all samples that a length holds."""
        job, profiled = self.request.job, []
        for (lower, upper), (packs, some) in self.packed.items():
            if lower >= 0:
                continue
            for context in possible_contexts(job):
                level = self._hbp_form(self.caps[upper]["tokens"], context)
                taken_ms = estimated_ms(
                    job, level, packs, some, self.request.data.micro_batches(job)
                )
                if np.isfinite(taken_ms):
                    tokens, mean_ms = level.caps["tokens"], taken_ms / float(some.tokens.sum())
                    profiled.append(ProfiledLength(tokens=tokens, context=context, ms=mean_ms))
        levels = [self._hbp_form(*chosen) for chosen in hbp_levels(profiled)]
        own = _own_samples(self.request.data.lengths, [level.caps for level in levels])
        # A level without samples of its own makes no packs.
        kept = (level for level, count in zip(levels, own, strict=True) if count)
        return _as_data_has(tuple(kept))

    def _hbp_form(self, tokens: int, context: int) -> Level:
        """A level with the exchange of heads where they divide, as HBP has it, else by gather."""
        caps = _scaled(self.caps[-1], tokens)
        forms = list(level_forms(self.request.job, caps, [context]))
        return next((f for f in reversed(forms) if f.cut is not CutRule.WHOLE), forms[0])

    def moves(self, levels: tuple[Level, ...]) -> Iterator[tuple[Level, ...]]:
        """Yield the set with one level of twice or half the context size, in its best form."""
        levels = levels or (Level(caps=self.caps[-1]),)
        if any(level.caps not in self.caps for level in levels):
            return
        chosen = [self.caps.index(level.caps) for level in levels]
        micro_batches = self.request.data.micro_batches(self.request.job)
        for place, step in enumerate(zip((-1, *chosen[:-1]), chosen, strict=True)):
            packs, lengths = self.packed[step]
            for context in (levels[place].context // 2, levels[place].context * 2):
                if context < 1 or self.request.job.parallel.data % context:
                    continue
                found = best_form(
                    self.request.job, levels[place].caps, packs, lengths, micro_batches, [context]
                )
                if found is not None:
                    yield _as_data_has((*levels[:place], found[1], *levels[place + 1 :]))


def _as_data_has(levels: tuple[Level, ...]) -> tuple[Level, ...]:
    """Levels as `SampleData` has them: none where there is one, of context size 1."""
    return () if len(levels) == 1 and levels[0].context == 1 else levels


def _work_ms(job: JobSpec, lengths: Lengths) -> np.ndarray:
    """Time of every sample on the whole model, [samples]."""
    alone = Packs(samples=np.arange(len(lengths)), offsets=np.arange(len(lengths) + 1))
    return pack_features(alone, lengths, job.cost.features) @ WholeModel.of(job, job.cost).pass_ms
