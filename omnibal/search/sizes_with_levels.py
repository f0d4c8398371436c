"""Search for levels of packs together with parallel sizes and the placement of encoders.

One level is tried on every choice of sizes by `omnibal.search.parallel_sizes`. Which sets of levels
are best depends on the sizes: ranks that share long packs need fewer stages to hold them. So:

1. Sets of levels are estimated at all sizes (`omnibal.search.level_estimates`); what packs they
   have does not depend on the sizes, and is made once.
2. Those of least estimates are simulated, with the best strategies of one level.
3. So are sets next to the best, and the best set at the other sizes.
4. The best few are planned on the samples that strategies of one level were planned on, and rank
   with these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from omnibal.data.scan_pool import map_unordered
from omnibal.errors import UserError
from omnibal.levels import FillRule, Level
from omnibal.limits import Caps
from omnibal.pipeline.stage_memory import fits_cap
from omnibal.plan_data import SampleData, least_caps, limited_features
from omnibal.search.feasible import least_state_gib
from omnibal.search.level_bound import least_ms_per_sample
from omnibal.search.level_estimates import LevelEstimates, LevelRule, Packed, top_caps
from omnibal.search.level_trial import LevelTrial, LevelTrials
from omnibal.search.strategy import Setting, Sizing, Strategy, StrategyRequest, planned_strategy
from omnibal.search.trial import encoders_ms_per_sample

_MOST_OF_SIZING = 4
"""Sets of levels that are simulated at one choice of sizes, before moves."""
_MOST_SIMULATED, _MOST_MOVES, _FINALISTS = 24, 24, 3
_NEAR = 1.2
"""Estimates of sets are compared between sizes, whose stages divide the model less evenly than an
estimate has it: those within this factor of the least are simulated."""
_SIZINGS_OF_BEST = 4
"""Other sizes that the best set of levels is tried at."""
_SIMULATED_SAMPLES = 12_000
LEAST_GAIN = 0.01
"""Share of time that levels must save to be taken in place of one."""

LevelChoice = tuple[Sizing, tuple[Level, ...]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelSetting:
    """Samples that levels are tried on at all sizes; can be sent to another process."""

    setting: Setting
    data: SampleData
    """Samples whose caps are those of the longest packs."""
    rule: LevelRule
    longest: Caps
    """Least caps that hold every sample of the plan."""
    packed: Packed = field(default_factory=dict)

    @classmethod
    def of(cls, setting: Setting, request: StrategyRequest, rule: LevelRule) -> "LevelSetting":
        """Take the setting's samples; longest packs are of the request's."""
        names = limited_features(request.job.model)
        top = request.caps or top_caps(request.lengths, names)
        data = setting.request.sample_data(top)
        return cls(
            setting=setting, data=data, rule=rule, longest=least_caps(request.lengths, names)
        )

    def tokens_per_step(self, sizing: Sizing) -> float:
        """Tokens of one rank in a step of the requested samples."""
        samples = min(self.setting.request.samples_per_step, len(self.data.lengths))
        return samples * float(self.data.lengths.tokens.mean()) / sizing.parallel.data

    def estimates(self, sizing: Sizing) -> LevelEstimates:
        """Estimates at these sizes."""
        job = self.setting.job(sizing)
        return LevelEstimates.of(job, self.data, self.tokens_per_step(sizing), self.packed)

    def trials(self, sizing: Sizing) -> LevelTrials:
        """Simulated trials at these sizes."""
        data = self.data
        if self.rule.is_hbp:
            data = replace(data, fill=FillRule.GREEDY)
        trials = LevelTrials(
            job=self.setting.job(sizing),
            data=data,
            tokens_per_step=self.tokens_per_step(sizing),
            longest=self.longest,
        )
        of_all = self.setting.request.all_samples or len(data.lengths)
        part = len(data.lengths) / of_all
        trials = replace(trials, curriculum_steps=part * self.setting.request.curriculum_steps)
        return trials.drawn(_SIMULATED_SAMPLES)

    def pack(self) -> None:
        """Pack the samples of every level that a set may have, which all sizes share."""
        any_sizing = Sizing(self.setting.request.job.parallel)
        self.estimates(any_sizing).pack_all(self.rule)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EstimateSets:
    """Estimates of the best sets of levels at some sizes."""

    levels: LevelSetting

    def __call__(
        self, sizing: Sizing
    ) -> tuple[Sizing, list[tuple[float, tuple[Level, ...]]], float]:
        """The sets of least estimated ms per sample, and a lower bound on all of them."""
        setting, rule = self.levels.setting, self.levels.rule
        job, request = setting.job(sizing), setting.request
        if not fits_cap(least_state_gib(job), job.memory_cap_gib):
            return sizing, [], np.inf
        lengths = self.levels.data.lengths
        before_ms, encoders_ms = encoders_ms_per_sample(job, lengths, request.samples_per_step)
        bound_ms = least_ms_per_sample(job, lengths) + before_ms
        sets = self.levels.estimates(sizing).by_rule(rule)[:_MOST_OF_SIZING]
        return sizing, [(ms + encoders_ms, levels) for ms, levels in sets], bound_ms


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimulateSet:
    """Simulation of a set of levels at some sizes."""

    levels: LevelSetting

    def __call__(self, choice: LevelChoice) -> tuple[LevelChoice, LevelTrial | UserError]:
        sizing, levels = choice
        return choice, self.levels.trials(sizing)(levels)[1]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanSet:
    """Planning of a set of levels at some sizes."""

    levels: LevelSetting

    def __call__(self, choice: LevelChoice) -> tuple[LevelChoice, Strategy | UserError]:
        sizing, levels = choice
        setting = self.levels.setting
        caps = levels[-1].caps if levels else self.levels.data.caps
        try:
            trial = setting.trial_of_levels(sizing, levels or (Level(caps=caps),))
            return choice, planned_strategy(setting, sizing, trial, caps)
        except UserError as error:
            return choice, error


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FoundLevels:
    """Strategies with levels, and what is proven of all."""

    strategies: tuple[Strategy, ...]
    least_ms_per_sample: float
    """Lower bound over all sets of levels at all sizes."""
    sets: int
    """Sets that were estimated to be near the best."""


def search_levels_at_sizes(
    levels: LevelSetting,
    sizings: Sequence[Sizing],
    rivals: Sequence[Strategy],
    advance: Callable[[int], None],
    processes: int,
) -> FoundLevels:
    """Strategies with the levels of least predicted time per sample.

    Args:
        levels: what is tried on what.
        sizings: to choose from.
        rivals: the best strategies of one level.
        advance: called with the trials that are done since the last call.
    """
    levels.pack()
    estimated, bound_ms = list[tuple[float, LevelChoice]](), np.inf
    work = EstimateSets(levels=levels)
    for sizing, sets, least_ms in map_unordered(
        work, sizings, max(min(processes, len(sizings)), 1)
    ):
        estimated += [(ms, (sizing, each)) for ms, each in sets]
        bound_ms = min(bound_ms, least_ms)
        advance(1)
    order = {sizing: number for number, sizing in enumerate(sizings)}
    estimated.sort(key=lambda each: (each[0], order[each[1][0]]))
    simulated = dict[LevelChoice, LevelTrial | UserError]()

    def simulate(choices: Sequence[LevelChoice]) -> None:
        new = [choice for choice in dict.fromkeys(choices) if choice not in simulated]
        found = dict(
            map_unordered(SimulateSet(levels=levels), new, max(min(processes, len(new)), 1))
        )
        advance(len(new))
        simulated.update((choice, found[choice]) for choice in new)

    def ranked() -> list[tuple[float, LevelChoice]]:
        found = [
            (trial.ms_per_sample, (sizing, trial.levels))
            for (sizing, _), trial in simulated.items()
            if isinstance(trial, LevelTrial) and levels.rule.allows(trial.levels)
        ]
        distinct = {choice: ms for ms, choice in sorted(found, key=lambda each: -each[0])}
        return sorted(((ms, choice) for choice, ms in distinct.items()), key=lambda each: each[0])

    limit_ms = _NEAR * estimated[0][0] if estimated else 0.0
    near = [choice for ms, choice in estimated if ms <= limit_ms][:_MOST_SIMULATED]
    simulate(near)
    if not levels.rule.is_hbp and ranked():
        for _ in range(2):
            simulate(_moves(levels, ranked(), [choice for _, choice in estimated]))
    finalists = [choice for _, choice in ranked() if choice[1]][:_FINALISTS]
    planned = dict(
        map_unordered(PlanSet(levels=levels), finalists, max(min(processes, len(finalists)), 1))
    )
    advance(len(finalists))
    found = [planned[choice] for choice in finalists]
    return FoundLevels(
        strategies=tuple(each for each in found if isinstance(each, Strategy)),
        least_ms_per_sample=bound_ms,
        sets=len(near),
    )


def _moves(
    levels: LevelSetting,
    ranked: Sequence[tuple[float, LevelChoice]],
    estimated: Sequence[LevelChoice],
) -> list[LevelChoice]:
    """The best set with one level changed, and as it is at other sizes that are estimated to be
    fast."""
    sizing, best = ranked[0][1]
    moved = [(sizing, each) for each in levels.estimates(sizing).moves(best)]
    others = [other for other in dict.fromkeys(other for other, _ in estimated) if other != sizing]
    contexts = max((level.context for level in best), default=1)
    at_others = [
        (other, best)
        for other in others[:_SIZINGS_OF_BEST]
        if other.parallel.data % contexts == 0 and (contexts == 1 or not _is_beside(levels, other))
    ]
    return [*moved, *at_others][:_MOST_MOVES]


def _is_beside(levels: LevelSetting, sizing: Sizing) -> bool:
    return levels.setting.job(sizing).is_beside


def need_levels(request: StrategyRequest, rule: LevelRule) -> bool:
    """Whether sets of levels are to be looked at: samples are of such different lengths that there
    can be several, or some number of them was asked for."""
    if rule.count == 1 or request.given is not None or not request.split.is_joint:
        return False
    names = limited_features(request.job.model)
    data = request.sample_data(request.caps or top_caps(request.lengths, names))
    return rule.is_forced or LevelEstimates.most_levels(data) > 1
