"""Search for levels of packs together with parallel sizes and encoder placement.

The best levels depend on the sizes: ranks that share long packs need fewer stages. So sets of
levels are estimated at all sizes (`omnibal.search.level_estimates`), near-minimal sets and their
changes are simulated, and the best few are planned and ranked with strategies of one level.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from omnibal.base.errors import UserError
from omnibal.job.plan_data import SampleData, least_caps, limited_features
from omnibal.model.levels import Level, are_plain
from omnibal.model.limits import Caps
from omnibal.pipeline.stage_memory import fits_cap
from omnibal.search.engine import Trials, try_all
from omnibal.search.level_choice import least_ms_per_sample
from omnibal.search.level_estimates import LevelEstimates, LevelRule, Packed, some_of_each, top_caps
from omnibal.search.level_sets import LEAST_GAIN, ROUNDS, SIMULATED_SAMPLES
from omnibal.search.level_trial import LevelTrial, LevelTrials
from omnibal.search.memory_need import least_state_gib
from omnibal.search.parallel_sizes import StrategySearch, possible_sizings, search_strategies
from omnibal.search.strategy import Setting, Sizing, Strategy, StrategyRequest, planned_strategy
from omnibal.search.trial import encoders_ms_per_sample

_MOST_OF_SIZING = 4
"""Max sets of levels to simulate per choice of sizes, before moves."""
_MOST_SIMULATED, _MOST_MOVES, _FINALISTS = 24, 24, 4
"""Max sets to simulate, in moves per round, and to plan: at most half a minute in total."""
_NEAR = 1.2
"""Max ratio to the minimal estimate for simulation, as estimates assume even stages."""
_LEAST_ROWS = 1.04
"""Min rows of packs in a step of a trial: plans make a few percent fewer packs than its ISF."""
_SIZINGS_OF_BEST = 4
"""Further sizes to try the best set of levels at."""

LevelChoice = tuple[Sizing, tuple[Level, ...]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelSetting:
    """Picklable samples for trials of levels at all sizes."""

    setting: Setting
    data: SampleData
    """Samples with the caps of the longest packs."""
    rule: LevelRule
    longest: Caps
    """Min caps that fit every sample of the plan."""
    packed: Packed = field(default_factory=dict)

    @classmethod
    def of(cls, setting: Setting, request: StrategyRequest, rule: LevelRule) -> "LevelSetting":
        """Take the setting's samples and the request's longest packs."""
        names = limited_features(request.job.model)
        top = request.caps or top_caps(request.lengths, names)
        data = setting.request.sample_data((Level(caps=top),))
        return cls(
            setting=setting, data=data, rule=rule, longest=least_caps(request.lengths, names)
        )

    def tokens_per_step(self, sizing: Sizing) -> float:
        """Tokens per rank in a step of the requested samples."""
        samples = min(self.setting.request.samples_per_step, len(self.data.lengths))
        return samples * float(self.data.lengths.tokens.mean()) / sizing.parallel.data

    def estimates(self, sizing: Sizing) -> LevelEstimates:
        job = self.setting.job(sizing)
        tokens = self.tokens_per_step(sizing)
        return LevelEstimates.of(job, self.data, tokens, self.packed, needs_rows=True)

    def trials(self, sizing: Sizing) -> LevelTrials:
        data, request = self.data, self.setting.request
        part = len(data.lengths) / (request.all_samples or len(data.lengths))
        trials = LevelTrials(
            job=self.setting.job(sizing),
            data=data,
            tokens_per_step=self.tokens_per_step(sizing),
            longest=self.longest,
            least_rows=_LEAST_ROWS,
            curriculum_steps=part * request.settings.curriculum_steps,
        )
        return trials.drawn(SIMULATED_SAMPLES)


def _estimate_sets(
    levels: LevelSetting, sizing: Sizing
) -> tuple[Sizing, tuple[list[tuple[float, tuple[Level, ...]]], float]]:
    """Sets with minimal estimated ms per sample at these sizes, and a lower bound on all sets."""
    setting = levels.setting
    job, request = setting.job(sizing), setting.request
    if not fits_cap(least_state_gib(job), job.memory_cap_gib):
        return sizing, ([], np.inf)
    lengths = levels.data.lengths
    before_ms, encoders_ms = encoders_ms_per_sample(job, lengths, request.samples_per_step)
    bound_ms = least_ms_per_sample(job, lengths) + before_ms
    sets = some_of_each(levels.estimates(sizing).by_rule(levels.rule))[:_MOST_OF_SIZING]
    return sizing, ([(ms + encoders_ms, of_set) for ms, of_set in sets], bound_ms)


def _simulate_set(
    levels: LevelSetting, choice: LevelChoice
) -> tuple[LevelChoice, LevelTrial | UserError]:
    return choice, levels.trials(choice[0])(choice[1])[1]


def _plan_set(
    levels: LevelSetting, choice: LevelChoice
) -> tuple[LevelChoice, Strategy | UserError]:
    sizing, of_set = choice
    setting = levels.setting
    try:
        trial = setting.trial_of_levels(sizing, of_set)
        if trial.micro_batches(setting.request.samples_per_step) < 1:
            raise UserError(
                f"a step of {setting.request.samples_per_step:,} samples has fewer packs than "
                f"{sizing.parallel.data:,} data-parallel ranks: give a larger --samples-per-step"
            )
        return choice, planned_strategy(setting, sizing, trial)
    except UserError as error:
        return choice, error


def search_with_levels(
    request: StrategyRequest, rule: LevelRule, on_progress: Callable[[int], None], processes: int
) -> StrategySearch:
    """Rank strategies of one level, and of several levels unless the rule's count is 1."""
    if rule.count == 1:
        return search_strategies(request, on_progress, processes)
    plain: StrategySearch | None = None
    failed: UserError | None = None
    if not rule.is_forced:
        try:
            plain = search_strategies(request, on_progress, processes)
        except UserError as error:
            failed = error
    sizings = possible_sizings(request)
    setting = Setting(request=request.drawn(), packs={})
    levels = LevelSetting.of(setting, request, rule)
    found, sets, least_ms = _search_sets(levels, sizings, on_progress, processes)
    if plain is None and not found:
        raise failed or UserError(
            f"no levels of packs can be trained on {request.sizes.gpus} GPUs: give "
            "--packing-levels auto, or more GPUs"
        )
    others = () if plain is None else plain.ranking
    ranking = sorted([*others, *found], key=lambda each: each.ms_per_sample)
    if others and not are_plain(ranking[0].levels):
        # Several levels must be clearly faster than one level.
        limit_ms = (1 - LEAST_GAIN) * others[0].ms_per_sample
        if ranking[0].ms_per_sample > limit_ms:
            ranking.remove(others[0])
            ranking.insert(0, others[0])
    result = StrategySearch(
        gpus=request.sizes.gpus,
        samples_per_step=request.samples_per_step,
        choices=sets + (0 if plain is None else plain.choices),
        planned=len(found) + (0 if plain is None else plain.planned),
        gap=max(1 - least_ms / ranking[0].ms_per_sample, 0.0),
    )
    return result.with_ranking(ranking, () if plain is None else plain.ruled_out)


def levels_total(request: StrategyRequest) -> int:
    """Max progress that `search_with_levels` reports for levels."""
    return len(possible_sizings(request)) + _MOST_SIMULATED + ROUNDS * _MOST_MOVES + 2 * _FINALISTS


def _search_sets(
    levels: LevelSetting, sizings: Sequence[Sizing], advance: Callable[[int], None], processes: int
) -> tuple[list[Strategy], int, float]:
    """Strategies of the fastest levels, number of near-minimal sets, and a bound on all sets."""
    # Packs of every possible level are the same at all sizes.
    levels.estimates(Sizing(levels.setting.request.job.parallel)).pack_all(levels.rule)
    found = try_all(partial(_estimate_sets, levels), sizings, processes, advance)
    of_sizings = [(ms, (sizing, each)) for sizing, (sets, _) in found.items() for ms, each in sets]
    estimated = sorted(of_sizings, key=lambda each: each[0])
    bound_ms = min((least_ms for _, least_ms in found.values()), default=np.inf)
    trials: Trials[LevelChoice, LevelTrial] = Trials(
        work=partial(_simulate_set, levels), processes=processes, on_done=advance
    )
    limit_ms = _NEAR * estimated[0][0] if estimated else 0.0
    near = [choice for ms, choice in estimated if ms <= limit_ms][:_MOST_SIMULATED]
    trials.run(near)
    for _ in range(0 if levels.rule.is_hbp else ROUNDS):
        if trials.found:
            fastest = _ranked(levels, trials)[0]
            trials.run(_moves(levels, fastest, [each for _, each in estimated]))
    finalists = [choice for choice in _ranked(levels, trials) if not are_plain(choice[1])]
    planned: Trials[LevelChoice, Strategy] = Trials(
        work=partial(_plan_set, levels), processes=processes, on_done=advance
    )
    planned.run(finalists[:_FINALISTS])
    if not planned.found:
        # All samples may need more memory and make fewer packs than the subset.
        planned.run(finalists[_FINALISTS : 2 * _FINALISTS])
    return list(planned.found.values()), len(near), bound_ms


def _ranked(levels: LevelSetting, trials: Trials[LevelChoice, LevelTrial]) -> list[LevelChoice]:
    """Simulated sets of levels with packs, fastest first."""
    best: dict[LevelChoice, float] = {}
    for (sizing, _), trial in trials.found.items():
        if levels.rule.allows(trial.levels):
            best.setdefault((sizing, trial.levels), trial.ms_per_sample)
    return sorted(best, key=lambda choice: best[choice])


def _moves(
    levels: LevelSetting, simulated: LevelChoice, estimated: Sequence[LevelChoice]
) -> list[LevelChoice]:
    """The best simulated set with one level changed, and at further fast sizes."""
    sizing, best = simulated
    moved = [(sizing, each) for each in levels.estimates(sizing).moves(best)]
    others = [other for other in dict.fromkeys(other for other, _ in estimated) if other != sizing]
    contexts = max(level.context for level in best)
    at_others = [
        (other, best) for other in others[:_SIZINGS_OF_BEST] if other.parallel.data % contexts == 0
    ]
    return [*moved, *at_others][:_MOST_MOVES]


def need_levels(request: StrategyRequest, rule: LevelRule) -> bool:
    """Whether to search sets of levels: if requested, or if lengths are diverse enough."""
    if rule.count == 1 or request.given is not None or not request.split.is_joint:
        return False
    names = limited_features(request.job.model)
    top = request.caps or top_caps(request.lengths, names)
    data = request.sample_data((Level(caps=top),))
    return rule.is_forced or LevelEstimates.most_levels(data) > 1
