"""Estimates of single levels in their best forms, added up to sets of levels.

Includes HBP's rule for levels (Hierarchical Balance Packing, arXiv 2503.07680, Algorithm 1).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData, smallest_caps
from omnibal.model.levels import CutRule, Level
from omnibal.model.limits import Caps
from omnibal.packing.by_level import levels_of_samples
from omnibal.packing.features import pack_features
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.packing.packs import Packs
from omnibal.search.level_choice import (
    FormEstimate,
    WholeModel,
    estimated_form,
    good_forms,
    level_forms,
    possible_contexts,
)

MAX_SEARCHED = 4  # max levels of a set, as in HBP
_SAMPLES_PER_PACK = 4.5
"""Min samples of median length in the shortest packs: fewer leave a rank too little work."""
_MAX_CAPS = 7  # max caps to consider: the top caps and their halves
_ESTIMATED_SAMPLES = 3_000  # max samples for estimating a level
_FORM_SLACK = 1.5
"""Max ratio to a level's fastest form: a slower form may have shorter rows, and less bubble."""
_FORMS_OF_SET = 3  # max combinations of forms per set of caps
_CAP_MOVES = (2**-0.5, 2**0.5)  # halfway to the next halved caps, either way
_TOKENS_UNIT = 64  # unit of moved token caps

CapRange = tuple[Caps | None, Caps]  # caps of the level below, if any, and of a level
Packed = dict[CapRange, tuple[Packs, Lengths] | None]
"""Packs of sampled samples by cap range. None without samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelRule:
    """Rule for sets of levels to search: up to `MAX_SEARCHED`, exactly `count`, or HBP's."""

    count: int | None = None
    """Number of levels. None for any."""
    is_hbp: bool = False  # whether levels follow HBP's Algorithm 1

    def __post_init__(self) -> None:
        if self.count is not None and not 1 <= self.count <= MAX_SEARCHED:
            raise UserError(
                f"{self.count} levels were asked for, and sets of 1 to {MAX_SEARCHED} are "
                "searched; give a number of these, or auto"
            )

    @property
    def is_forced(self) -> bool:
        """Whether several levels, or HBP's, are requested whatever the lengths."""
        return self.is_hbp or self.count not in (None, 1)

    def allows(self, levels: tuple[Level, ...]) -> bool:
        """Whether a set has the requested number of levels."""
        return self.count in (None, len(levels))


ANY_LEVELS = LevelRule()


def most_shared(job: JobSpec, caps: Caps) -> tuple[Level, ...]:
    """Return one level of these caps, as a set, at its max context size."""
    context = possible_contexts(job, caps)[-1]
    return (next(level_forms(job, caps, [context])),)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelEstimates:
    """Estimates of sets of levels, as sums over levels plus the bubble of the longest rows."""

    job: JobSpec
    data: SampleData
    caps: tuple[Caps, ...]  # possible caps of levels, ascending
    tokens_per_step: float  # tokens per rank and step
    work_ms: np.ndarray  # time of every sample on the whole model, [samples]
    needs_rows: bool  # whether HBP's set is dropped if its steps have less than a row of packs
    packed: Packed  # cache of packs by cap range, shared between jobs of other sizes

    @classmethod
    def for_job(
        cls,
        job: JobSpec,
        data: SampleData,
        tokens_per_step: float | None = None,
        packed: Packed | None = None,
        *,
        needs_rows: bool = False,
    ) -> "LevelEstimates":
        """Return estimates for a job and its data, with the data's caps at the top.

        Args:
            tokens_per_step: of one rank. None for the data's micro-batches as full packs of one
                level in its best form.
        """
        lengths = data.lengths
        alone = Packs(samples=np.arange(len(lengths)), offsets=np.arange(len(lengths) + 1))
        features = pack_features(alone, lengths, job.cost.features)
        estimates = cls(
            job=job,
            data=data,
            caps=candidate_caps(lengths, data.caps),
            tokens_per_step=tokens_per_step or math.inf,
            work_ms=features @ WholeModel.from_job(job).pass_ms,
            needs_rows=needs_rows,
            packed={} if packed is None else packed,
        )
        if tokens_per_step:
            return estimates
        # Best form with a full pipeline.
        best = estimates._best((None, estimates.caps[-1]))
        context = job.parallel.data if best is None else best.level.context
        tokens = data.micro_batches(job) * data.caps["tokens"] / context
        return replace(estimates, tokens_per_step=tokens)

    @staticmethod
    def most_levels(data: SampleData) -> int:
        """Return the max number of levels that all have samples."""
        own = own_samples(data.lengths, candidate_caps(data.lengths, data.caps))
        return int(np.count_nonzero(own))

    def pack_all(self, rule: LevelRule) -> None:
        """Pack the samples of every cap range in the rule's sets, and cache the packs."""
        for caps in self.caps:
            self._pack_step((None, caps))
        if not rule.is_hbp:
            for step in {step for caps in self.sets(rule.count) for step in _cap_ranges(caps)}:
                self._pack_step(step)

    def by_rule(self, rule: LevelRule) -> list[tuple[float, tuple[Level, ...]]]:
        """Return estimated ms per sample and levels of a rule's feasible sets, fastest first."""
        if not rule.is_hbp:
            return self.estimate_sets(rule.count)
        try:
            levels = self.by_hbp()
        except UserError:  # no length fits
            return []
        steps = zip(levels, _cap_ranges([level.caps for level in levels]), strict=True)
        forms = []
        for level, step in steps:
            some = self._pack_step(step)
            if some is not None:
                form = estimated_form(self.job, level, *some, self.tokens_per_step)
                forms.append(self._scale_form(step, form))
        if self.needs_rows and sum(form.rows for form in forms) < self._step_count:
            return []  # some steps have no row of packs
        ms = self._ms_per_sample(forms)
        return [(ms, levels)] if math.isfinite(ms) else []

    def sets(self, exactly: int | None) -> list[tuple[Caps, ...]]:
        """Return sets of `exactly`, or up to `MAX_SEARCHED`, caps that include the top caps."""
        counts = range(1, MAX_SEARCHED + 1) if exactly is None else [exactly]
        *lower, top = self.caps
        return [(*rest, top) for count in counts for rest in combinations(lower, count - 1)]

    def estimate_sets(self, exactly: int | None) -> list[tuple[float, tuple[Level, ...]]]:
        """Return estimated ms per sample and levels of feasible sets, fastest first."""
        steps = {step for caps in self.sets(exactly) for step in _cap_ranges(caps)}
        near = dict[CapRange, list[FormEstimate]]()
        for step in steps:
            # Forms slightly slower alone may be best in a set.
            forms = self.forms(step)
            least_ms = min((form.rows_ms for form in forms), default=math.inf)
            near[step] = [form for form in forms if form.rows_ms <= _FORM_SLACK * least_ms]
        found = []
        for caps in self.sets(exactly):
            choices = [near[step] for step in _cap_ranges(caps)]
            of_set = [
                (self._ms_per_sample(forms), tuple(form.level for form in forms))
                for forms in product(*choices)
            ]
            of_set = [pair for pair in of_set if math.isfinite(pair[0])]
            found += sorted(of_set, key=lambda pair: pair[0])[:_FORMS_OF_SET]
        return sorted(found, key=lambda pair: pair[0])

    def tops(self, *, may_lower: bool) -> list[tuple[Level, ...]]:
        """Return one level at every context size, for data with few packs or little free memory.

        Token caps below the top caps are included if `may_lower`.
        """
        every = self._lower_tops() if may_lower else [self.data.caps]
        found: list[tuple[Level, ...]] = []
        for caps in every:
            for context in possible_contexts(self.job, caps):
                best = self._best((None, caps), [context])
                if best is not None:
                    found.append((best.level,))
        return found

    def _lower_tops(self) -> list[Caps]:
        """Return the top caps, a middle value, and about the lowest that fit every sample."""
        top, least = self.data.caps, smallest_caps(self.data.lengths, self.data.caps.names)
        lowest = -(-least["tokens"] // _TOKENS_UNIT) * _TOKENS_UNIT
        middle = -(-(lowest + top["tokens"]) // 2 // _TOKENS_UNIT) * _TOKENS_UNIT
        found = [top]
        for tokens in (middle, lowest):
            if tokens < found[-1]["tokens"]:
                caps = scale_caps(top, tokens)
                others = {name: max(caps[name], least[name]) for name in top.names[:-1]}
                found.append(Caps.of(**others, tokens=tokens))
        return found

    def moves(self, levels: tuple[Level, ...]) -> Iterator[tuple[Level, ...]]:
        """Yield sets with one level's caps or context size changed, that level in its best form."""
        caps = [level.caps for level in levels]
        for place, (level, step) in enumerate(zip(levels, _cap_ranges(caps), strict=True)):
            before, after = levels[:place], levels[place + 1 :]
            for context in (level.context // 2, level.context * 2):
                if context in possible_contexts(self.job, level.caps):
                    found = self._best(step, [context])
                    if found is not None:
                        yield (*before, found.level, *after)
            for factor in _CAP_MOVES if after else ():
                tokens = round(level.caps["tokens"] * factor / _TOKENS_UNIT) * _TOKENS_UNIT
                moved = scale_caps(self.caps[-1], max(tokens, 1))
                least = before[-1].caps["tokens"] if before else 0
                if least < moved["tokens"] < after[0].caps["tokens"]:
                    found = self._best((step[0], moved))
                    if found is not None and self._pack_step((moved, after[0].caps)):
                        yield (*before, found.level, *after)

    def by_hbp(self) -> tuple[Level, ...]:
        """Return levels by HBP's Algorithm 1, profiled on packs of all samples up to a length."""
        profiled = []
        for caps in self.caps:
            some = self._pack_step((None, caps))
            if some is None:
                continue
            contexts = possible_contexts(self.job, caps)
            tried = (self._hbp_form(caps["tokens"], context) for context in contexts)
            forms = [estimated_form(self.job, form, *some, self.tokens_per_step) for form in tried]
            best = min(forms, key=lambda form: form.rows_ms)
            if math.isfinite(best.rows_ms):
                mean_ms = best.rows_ms / float(some[1].tokens.sum())
                context = best.level.context
                profiled.append(ProfiledLength(tokens=caps["tokens"], context=context, ms=mean_ms))
        levels = [self._hbp_form(*chosen) for chosen in hbp_levels(profiled)]
        own = own_samples(self.data.lengths, [level.caps for level in levels])
        # A level without own samples makes no packs.
        kept = (level for level, count in zip(levels, own, strict=True) if count)
        return tuple(kept)

    def _hbp_form(self, tokens: int, context: int) -> Level:
        """Return a level with head exchange if heads divide evenly, as in HBP, else with gather."""
        forms = list(level_forms(self.job, scale_caps(self.caps[-1], tokens), [context]))
        return next((f for f in reversed(forms) if f.cut is not CutRule.WHOLE), forms[0])

    def _ms_per_sample(self, forms: Sequence[FormEstimate]) -> float:
        """Return the time of all rows of a set plus the bubbles of its steps, per sample.

        With p stages that share a row evenly, a step takes 1 / p of the sum of its rows plus
        (p - 1) / p of the longest row, as in a proportionate flow shop.
        """
        steps = max(self._step_count, 1.0)
        longest_ms, without = 0.0, 1.0
        for form in sorted(forms, key=lambda form: -form.rows_ms / form.rows):
            # Rows are spread evenly: a step has at least one if rows >= steps.
            share = min(form.rows / steps, 1.0)  # chance that a step has such a row
            longest_ms += without * share * form.rows_ms / form.rows
            without *= 1 - share  # no longer row in the step
        bubbles_ms = steps * (self.job.parallel.pipeline - 1) * longest_ms
        whole_ms = sum(form.rows_ms for form in forms) + bubbles_ms  # of all stages
        return whole_ms / self.job.parallel.pipeline / len(self.data.lengths)

    @property
    def _step_count(self) -> float:
        """Steps to train all samples once, fractional."""
        tokens = float(self.data.lengths.tokens.sum(dtype=np.int64))
        return tokens / self.job.parallel.data / self.tokens_per_step

    def _best(self, step: CapRange, contexts: Sequence[int] | None = None) -> FormEstimate | None:
        """Return the fastest form of a level for all its samples. None if no form fits."""
        forms = self.forms(step, contexts)
        return min(forms, key=lambda form: self._ms_per_sample([form]), default=None)

    def forms(self, step: CapRange, contexts: Sequence[int] | None = None) -> list[FormEstimate]:
        """Return a level's forms for all its samples, the fastest for each context size."""
        some = self._pack_step(step)
        if some is None:
            return []
        found = good_forms(self.job, step[1], *some, self.tokens_per_step, contexts)
        return [self._scale_form(step, form) for form in found]

    def _scale_form(self, step: CapRange, form: FormEstimate) -> FormEstimate:
        """Extrapolate a form from the sampled to all samples of a cap range."""
        rows = self._rows(step)
        part = self.work_ms[self._draw_rows(rows)].sum() / self.work_ms[rows].sum()
        more = 1 / float(part)
        return replace(form, rows_ms=more * form.rows_ms, rows=more * form.rows)

    def _pack_step(self, step: CapRange) -> tuple[Packs, Lengths] | None:
        """Return packs of a level's sampled samples above the level below, and their lengths."""
        if step not in self.packed:
            rows = self._rows(step)
            some = self.data.lengths.take(self._draw_rows(rows))
            packs = None
            if len(rows):
                packs = pack_samples(some, step[1], PackingMethod.ISF, self.data.settings.seed)
            self.packed[step] = None if packs is None else (packs, some)
        return self.packed[step]

    def _rows(self, step: CapRange) -> np.ndarray:
        lengths, (lower, upper) = self.data.lengths, step
        # [samples]
        held = np.all([lengths.column(name) <= upper[name] for name in upper.names], axis=0)
        if lower is not None:
            held &= np.any([lengths.column(name) > lower[name] for name in lower.names], axis=0)
        return np.flatnonzero(held)

    def _draw_rows(self, rows: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng(self.data.settings.seed)
        return np.sort(rng.permutation(rows)[:_ESTIMATED_SAMPLES])


def some_of_each(
    estimated: Sequence[tuple[float, tuple[Level, ...]]],
) -> list[tuple[float, tuple[Level, ...]]]:
    """Return the fastest set of each number of levels, then the other sets in their order.

    Estimates of sets with the same number of levels have similar errors.
    """
    first = {len(levels): (ms, levels) for ms, levels in reversed(estimated)}
    leading = sorted(first.values(), key=lambda pair: pair[0])
    return [*leading, *(pair for pair in estimated if pair not in leading)]


def _cap_ranges(caps: Sequence[Caps]) -> list[CapRange]:
    return list(zip((None, *caps[:-1]), caps, strict=True))


def own_samples(lengths: Lengths, caps: Sequence[Caps]) -> np.ndarray:
    """Return the number of samples by the smallest caps that fit, [caps]."""
    own = levels_of_samples(lengths, [Level(caps=cap) for cap in caps])
    return np.bincount(own, minlength=len(caps))


def candidate_caps(lengths: Lengths, top: Caps) -> tuple[Caps, ...]:
    """Return possible caps of levels, ascending.

    Caps are halved while packs of several samples of median length fit.
    """
    needed = _SAMPLES_PER_PACK * float(np.median(lengths.tokens))
    found = [top]
    while len(found) < _MAX_CAPS and found[-1]["tokens"] / 2 >= needed:
        found.append(scale_caps(top, -(-found[-1]["tokens"] // 2)))
    return tuple(reversed(found))


def scale_caps(top: Caps, tokens: int) -> Caps:
    """Return caps with `tokens`, and items in proportion, rounded up."""
    others = {n: max(math.ceil(top[n] * tokens / top["tokens"]), 1) for n in top.names[:-1]}
    return Caps.of(**others, tokens=tokens)


def top_caps(lengths: Lengths, names: Sequence[str]) -> Caps:
    """Return default top caps: max tokens rounded up to a power of two, and items in proportion."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledLength:
    """Time to train packs of one length with one context size."""

    tokens: int  # length of a pack
    context: int  # ranks that share a pack
    ms: float  # time for the same tokens at every length, with the minimal recomputation that fits


def hbp_levels(profiled: Sequence[ProfiledLength]) -> tuple[tuple[int, int], ...]:
    """Return levels by HBP's Algorithm 1, as (length, context size) from short to long.

    1. Keep the fastest context size of every length.
    2. The fastest length and the longest length are levels.
    3. One rank's share of a pack of the fastest length is a level of context size 1: it fits in
       the same memory without communication. So is one rank's share of the longest length, if it
       is at least the fastest length. Raises UserError if nothing is profiled.

    Example:
        >>> figures = [(8, 2, 2.69), (16, 1, 2.65), (32, 8, 2.83), (64, 4, 3.01), (128, 8, 3.05)]
        >>> hbp_levels([ProfiledLength(tokens=n, context=c, ms=t) for n, c, t in figures])
        ((16, 1), (128, 8))
    """
    if not profiled:
        raise UserError(
            "no length of packs can be trained with any context size, so that there is nothing to "
            "choose levels from: use more or larger devices, or shorten the longest samples"
        )
    fastest: dict[int, ProfiledLength] = {}
    for profile in sorted(profiled, key=lambda one: (one.tokens, one.ms, one.context)):
        fastest.setdefault(profile.tokens, profile)
    best = min(fastest.values(), key=lambda one: (one.ms, one.tokens))
    longest = fastest[max(fastest)]
    chosen = {longest.tokens: longest.context, best.tokens: best.context}
    part = longest.tokens // longest.context  # one rank's share, which fits it
    if part >= best.tokens:
        chosen.setdefault(part, 1)
    chosen.setdefault(best.tokens // best.context, 1)
    return tuple(sorted(chosen.items()))
