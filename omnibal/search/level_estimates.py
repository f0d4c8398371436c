"""Estimates of levels, each alone on samples that it would hold, in the best of its forms."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from omnibal.cost.model import pack_features
from omnibal.data.by_level import levels_of_samples
from omnibal.data.lengths import Lengths
from omnibal.data.packing import PackingMethod, pack_samples
from omnibal.data.packs import Packs
from omnibal.job import JobSpec
from omnibal.levels import CutRule, Level
from omnibal.limits import Caps
from omnibal.plan_data import SampleData
from omnibal.search.hbp_levels import ProfiledLength, hbp_levels
from omnibal.search.level_choice import (
    WholeModel,
    best_form,
    best_of_rising,
    estimated_ms,
    level_forms,
    possible_contexts,
)
from omnibal.search.level_trial import as_data_has

MAX_SEARCHED = 4
"""Most levels of a set, as in HBP."""
_SAMPLES_PER_PACK = 4.5
"""Samples of median length that the shortest packs hold: fewer leave a rank too little to do."""
_MAX_CAPS = 7
_ESTIMATED_SAMPLES = 3_000
"""Most samples by which a level is estimated, of those that it would hold."""
_NEAR = 1.15
"""Sets are tried whose estimate is at most so many times the least."""
_CAP_MOVES = (2**-0.5, 2**0.5)
_TOKENS_UNIT = 64
"""Caps that are moved have a multiple of so many tokens."""

Step = tuple[Caps | None, Caps]
"""Caps of a level and those of the level below it, if any, whose samples it does not hold."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelEstimates:
    """Estimates of levels by their own caps and those of the level below."""

    job: JobSpec
    data: SampleData
    caps: tuple[Caps, ...]
    """Caps that levels may have, rising to the top ones."""
    work_ms: np.ndarray
    """Time of every sample on the whole model, [samples]."""
    packed: dict[Step, tuple[Packs, Lengths] | None] = field(default_factory=dict)
    """Packs of some samples of a step, as far as they have been made; None where it has none."""

    @classmethod
    def of(cls, job: JobSpec, data: SampleData) -> "LevelEstimates":
        """Prepare estimates for a job on its data, whose caps are the top ones."""
        lengths = data.lengths
        alone = Packs(samples=np.arange(len(lengths)), offsets=np.arange(len(lengths) + 1))
        features = pack_features(alone, lengths, job.cost.features)
        return cls(
            job=job,
            data=data,
            caps=candidate_caps(lengths, data.caps),
            work_ms=features @ WholeModel.of(job, job.cost).pass_ms,
        )

    @property
    def tokens_per_step(self) -> float:
        """Tokens of one rank in a step of packs of one level, in its best form."""
        found = self._best((None, self.caps[-1]))
        context = self.job.parallel.data if found is None else found[1].context
        return self._micro_batches * self.data.caps["tokens"] / context

    def sets(self, exactly: int | None) -> list[tuple[Caps, ...]]:
        """List all sets of caps with the top ones."""
        counts = range(1, MAX_SEARCHED + 1) if exactly is None else [exactly]
        *lower, top = self.caps
        return [(*rest, top) for count in counts for rest in combinations(lower, count - 1)]

    def near(self, exactly: int | None, most: int) -> list[tuple[Level, ...]]:
        """Sets whose estimate is near the least, and one level on one rank, the simplest.

        There are none where no set is estimated to fit.
        """
        steps = {step for caps in self.sets(exactly) for step in _steps(caps)}
        best = {step: self._best(step) for step in steps}
        estimated = []
        for caps in self.sets(exactly):
            found = [best[step] for step in _steps(caps)]
            if all(found):
                forms = [one for one in found if one is not None]
                estimated.append((sum(ms for ms, _ in forms), tuple(level for _, level in forms)))
        estimated.sort(key=lambda pair: pair[0])
        if not estimated:
            return []
        limit = _NEAR * estimated[0][0]
        near = [levels for ms, levels in estimated if ms <= limit][: most - 1]
        if exactly in (None, 1):
            near.append((Level(caps=self.caps[-1]),))
        return [as_data_has(levels, self.data.caps) for levels in near]

    def tops(self, *, may_lower: bool) -> list[tuple[Level, ...]]:
        """One level at every context size, for samples that make few packs or hardly fit.

        Args:
            may_lower: whether also of less tokens than the top caps have.
        """
        every = self._lower_tops() if may_lower else [self.data.caps]
        found = []
        for caps in every:
            for context in possible_contexts(self.job, caps):
                best = self._best((None, caps), [context])
                if best is not None:
                    found.append(as_data_has((best[1],), self.data.caps))
        return found

    def most_shared(self) -> tuple[Level, ...]:
        """One level whose packs are shared by as many ranks as can."""
        context = possible_contexts(self.job, self.data.caps)[-1]
        level = next(level_forms(self.job, self.data.caps, [context]))
        return as_data_has((level,), self.data.caps)

    def _lower_tops(self) -> list[Caps]:
        """The top caps, lower ones, and about the lowest that hold every sample."""
        top, least = self.data.caps, self.data.least_caps()
        lowest = -(-least["tokens"] // _TOKENS_UNIT) * _TOKENS_UNIT
        middle = -(-(lowest + top["tokens"]) // 2 // _TOKENS_UNIT) * _TOKENS_UNIT
        found = [top]
        for tokens in (middle, lowest):
            if tokens < found[-1]["tokens"]:
                caps = scaled(top, tokens)
                others = {name: max(caps[name], least[name]) for name in top.names[:-1]}
                found.append(Caps.of(**others, tokens=tokens))
        return found

    def moves(self, levels: tuple[Level, ...]) -> Iterator[tuple[Level, ...]]:
        """Yield the set with one level of other caps or another context size, in its best form."""
        levels = levels or (Level(caps=self.caps[-1]),)
        caps = [level.caps for level in levels]
        for place, (level, step) in enumerate(zip(levels, _steps(caps), strict=True)):
            before, after = levels[:place], levels[place + 1 :]
            for context in (level.context // 2, level.context * 2):
                if context in possible_contexts(self.job, level.caps):
                    found = self._best(step, [context])
                    if found is not None:
                        yield as_data_has((*before, found[1], *after), self.data.caps)
            for factor in _CAP_MOVES if after else ():
                moved = self._moved(level.caps, factor)
                least = before[-1].caps["tokens"] if before else 0
                if least < moved["tokens"] < after[0].caps["tokens"]:
                    found = self._best((step[0], moved))
                    if found is not None and self._some((moved, after[0].caps)):
                        yield (*before, found[1], *after)

    def by_hbp(self) -> tuple[Level, ...]:
        """Levels by HBP's Algorithm 1, with packs of all samples that a length holds."""
        profiled = []
        for caps in self.caps:
            some = self._some((None, caps))
            if some is None:
                continue
            fastest_ms, level = best_of_rising(self._hbp_times(caps, *some))
            if level is not None:
                tokens, mean_ms = caps["tokens"], fastest_ms / float(some[1].tokens.sum())
                profiled.append(ProfiledLength(tokens=tokens, context=level.context, ms=mean_ms))
        levels = [self._hbp_form(*chosen) for chosen in hbp_levels(profiled)]
        own = own_samples(self.data.lengths, [level.caps for level in levels])
        # A level without samples of its own makes no packs.
        kept = (level for level, count in zip(levels, own, strict=True) if count)
        return as_data_has(tuple(kept), self.data.caps)

    @property
    def _micro_batches(self) -> int:
        return self.data.micro_batches(self.job)

    def _moved(self, caps: Caps, factor: float) -> Caps:
        tokens = round(caps["tokens"] * factor / _TOKENS_UNIT) * _TOKENS_UNIT
        return scaled(self.caps[-1], max(tokens, 1))

    def _hbp_times(
        self, caps: Caps, packs: Packs, lengths: Lengths
    ) -> Iterator[tuple[float, Level]]:
        """Estimated ms and level of every context size, of which HBP keeps the fastest."""
        for context in possible_contexts(self.job, caps):
            level = self._hbp_form(caps["tokens"], context)
            yield estimated_ms(self.job, level, packs, lengths, self._micro_batches), level

    def _hbp_form(self, tokens: int, context: int) -> Level:
        """A level with the exchange of heads where they divide, as HBP has it, else by gather."""
        forms = list(level_forms(self.job, scaled(self.caps[-1], tokens), [context]))
        return next((f for f in reversed(forms) if f.cut is not CutRule.WHOLE), forms[0])

    def _best(
        self, step: Step, contexts: Sequence[int] | None = None
    ) -> tuple[float, Level] | None:
        """Estimated ms and best form of a level for all its samples; None if it holds or fits
        none."""
        some = self._some(step)
        if some is None:
            return None
        found = best_form(self.job, step[1], *some, self._micro_batches, contexts)
        if found is None:
            return None
        drawn = self._rows(step)
        part = self.work_ms[self._drawn(drawn)].sum() / self.work_ms[drawn].sum()
        return found[0] / float(part), found[1]

    def _some(self, step: Step) -> tuple[Packs, Lengths] | None:
        """Some samples that a level holds and the one below does not, packed."""
        if step not in self.packed:
            rows = self._rows(step)
            some = self.data.lengths.take(self._drawn(rows))
            packs = None
            if len(rows):
                packs = pack_samples(some, step[1], PackingMethod.ISF, self.data.seed)
            self.packed[step] = None if packs is None else (packs, some)
        return self.packed[step]

    def _rows(self, step: Step) -> np.ndarray:
        lengths, (lower, upper) = self.data.lengths, step
        held = np.all([lengths.column(name) <= upper[name] for name in upper.names], axis=0)
        if lower is not None:
            held &= np.any([lengths.column(name) > lower[name] for name in lower.names], axis=0)
        return np.flatnonzero(held)

    def _drawn(self, rows: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng(self.data.seed)
        return np.sort(rng.permutation(rows)[:_ESTIMATED_SAMPLES])


def _steps(caps: Sequence[Caps]) -> list[Step]:
    return list(zip((None, *caps[:-1]), caps, strict=True))


def own_samples(lengths: Lengths, caps: Sequence[Caps]) -> np.ndarray:
    """Count the samples that each of rising caps is the smallest to hold, [caps]."""
    own = levels_of_samples(lengths, [Level(caps=each) for each in caps])
    return np.bincount(own, minlength=len(caps))


def candidate_caps(lengths: Lengths, top: Caps) -> tuple[Caps, ...]:
    """Caps that levels may have, rising to the top ones.

    Tokens are halved from level to level while packs of several samples of median length fit, and
    other limits go down with them.
    """
    needed = _SAMPLES_PER_PACK * float(np.median(lengths.tokens))
    found = [top]
    while len(found) < _MAX_CAPS and found[-1]["tokens"] / 2 >= needed:
        found.append(scaled(top, -(-found[-1]["tokens"] // 2)))
    return tuple(reversed(found))


def scaled(top: Caps, tokens: int) -> Caps:
    """Caps of so many tokens, and of the others as large a part of the top ones."""
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
