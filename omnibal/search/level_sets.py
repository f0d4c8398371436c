"""Search for sets of levels of packs: their number, caps and context sizes, at all parallel sizes.

The best levels depend on the sizes: ranks that share long packs need fewer stages. Sets of up to
four levels are built from the top caps and their halves. Estimates of single levels
(`omnibal.search.level_choice`) add up to estimates of sets. Near-minimal sets, HBP's set and then
changes to the best set are simulated on a subset with a quick joint split, and the best few are
planned and ranked with strategies of one level. `least_ms_per_sample` bounds all sets from below.
HBP's rule is in `omnibal.search.level_estimates`.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData, smallest_caps
from omnibal.model.levels import Level, are_plain
from omnibal.model.limits import Caps
from omnibal.packing.by_level import levels_of_packs
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.pipeline.stage_memory import fits_cap
from omnibal.search.engine import Trials, try_all
from omnibal.search.level_choice import WholeModel, good_forms, has_good_shares, least_ms_per_sample
from omnibal.search.level_estimates import (
    MAX_SEARCHED,
    LevelEstimates,
    LevelRule,
    Packed,
    some_of_each,
    top_caps,
)
from omnibal.search.memory_need import least_state_gib
from omnibal.search.parallel_sizes import possible_sizings
from omnibal.search.strategy import (
    MOST_SCHEDULED,
    Setting,
    Sizing,
    Strategy,
    StrategyRequest,
    estimated_ms_per_sample,
    may_gain,
    planned_strategy,
)
from omnibal.search.strategy_search import StrategySearch, search_strategies
from omnibal.search.trial import Trial, encoders_ms_per_sample

_SIMULATED_SAMPLES = 12_000  # samples of a simulation: more change packs by about 1 %
_MOVE_ROUNDS = 2  # rounds of moves around the best set
MIN_LEVELS_GAIN = 0.01  # share of time that a set of levels must save over one level
_SHARED_PACKS = 2_000  # max packs of a level to estimate its context sizes on, for given steps
_MOST_OF_SIZING = 4
"""Max sets of levels to simulate per choice of sizes, before moves. `_MOST_SIMULATED` if layouts
are given."""
_MOST_SIMULATED, _MOST_MOVES = 48, 24
"""Max sets to simulate before moves, and in a round of moves."""
_MOST_TRIED, _FINALISTS = 8, 6
"""Max sets of a round to search stages for, and to plan on all drawn samples."""
_ESTIMATED_SLACK, _SIMULATED_SLACK = 1.2, 1.1
"""Max ratios to the minimal estimate for simulation, as estimates assume even stages, and to the
minimal simulated time for a search of stages."""
_LEAST_ROWS = 1.04
"""Min rows of packs in a step of a trial: plans make a few percent fewer packs than its ISF."""
_SIZINGS_OF_BEST = 4  # further sizes to try the best set of levels at

LevelChoice = tuple[Sizing, tuple[Level, ...]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelSetting:
    """Samples for trials of levels at all sizes, picklable for worker processes."""

    setting: Setting
    some: Setting  # fewer samples, packed by ISF, for simulations
    data: SampleData  # the setting's samples, with the caps of the longest packs
    rule: LevelRule
    longest: Caps  # min caps that fit every sample of the plan
    packed: Packed = field(default_factory=dict)  # cache for all sizes

    @classmethod
    def for_request(
        cls, setting: Setting, request: StrategyRequest, rule: LevelRule
    ) -> "LevelSetting":
        """Return the trials' samples, with the caps of the longest packs of all samples."""
        drawn = setting.request
        fewer = replace(drawn, samples=_SIMULATED_SAMPLES).draw_samples()
        # ISF makes a few percent more packs, but is much faster.
        fast = replace(drawn.settings, packing=PackingMethod.ISF)
        return cls(
            setting=setting,
            some=Setting(request=replace(fewer, settings=fast), packs={}),
            data=drawn.sample_data((Level(caps=_top(request)),)),
            rule=rule,
            longest=smallest_caps(request.lengths, request.limited_features),
        )

    def tokens_per_step(self, sizing: Sizing) -> float:
        """Return the mean tokens per data-parallel rank in a step of `samples_per_step`."""
        samples = min(self.setting.request.samples_per_step, len(self.data.lengths))
        return samples * float(self.data.lengths.tokens.mean()) / sizing.parallel.data

    def estimates(self, sizing: Sizing) -> LevelEstimates:
        """Return estimates of sets of levels at these sizes."""
        return LevelEstimates.for_job(
            self.setting.job(sizing),
            self.data,
            self.tokens_per_step(sizing),
            self.packed,
            needs_rows=not self.setting.request.layouts,
        )


def _top(request: StrategyRequest) -> Caps:
    """Return the requested caps, or those chosen for the longest packs."""
    return request.caps or top_caps(request.lengths, request.limited_features)


def _estimate_sets(
    levels: LevelSetting, most: int, sizing: Sizing
) -> tuple[Sizing, tuple[list[tuple[float, tuple[Level, ...]]], float]]:
    """Return `sizing`, up to `most` sets with estimated ms per sample, and a bound on all sets."""
    setting = levels.setting
    job, request = setting.job(sizing), setting.request
    if not fits_cap(least_state_gib(job), job.memory_cap_gib):
        return sizing, ([], np.inf)
    lengths = levels.data.lengths
    before_ms, encoders_ms = encoders_ms_per_sample(job, lengths, request.samples_per_step)
    bound_ms = least_ms_per_sample(job, lengths) + before_ms
    sets = some_of_each(levels.estimates(sizing).by_rule(levels.rule))[:most]
    return sizing, ([(ms + encoders_ms, of_set) for ms, of_set in sets], bound_ms)


def _trial_of_set(setting: Setting, longest: Caps, choice: LevelChoice) -> Trial:
    """Return a trial of a set without levels that get no packs; raise UserError if impossible.

    Args:
        longest: min caps that fit every sample, of the setting or not.
    """
    sizing, levels = choice
    request = setting.request
    while True:
        trial = setting.trial_of_levels(sizing, levels)
        of_packs = levels_of_packs(trial.packed[0], request.lengths, levels)
        used = levels_in_use(levels, of_packs, longest)
        if used == levels:
            break
        levels = used
    micro_batches = trial.micro_batches(request.samples_per_step)
    if micro_batches < _LEAST_ROWS and not request.layouts:
        raise UserError(
            f"a step of {request.samples_per_step:,} samples has fewer packs than "
            f"{sizing.parallel.data:,} data-parallel ranks: give a larger --samples-per-step"
        )
    if request.settings.curriculum_steps:
        short = int((of_packs == 0).sum()) * levels[0].context  # packs times their ranks
        _check_curriculum(request, len(levels), short / sizing.parallel.data / micro_batches)
    return trial


def _simulate_set(
    setting: Setting, longest: Caps, choice: LevelChoice
) -> tuple[LevelChoice, tuple[float, LevelChoice] | UserError]:
    """Return `choice`, with its time per sample in ms with stages found quickly and the choice
    without levels that get no packs, or the error."""
    try:
        trial, sizing = _trial_of_set(setting, longest, choice), choice[0]
        request = trial.request(setting.request.samples_per_step)
        ms = estimated_ms_per_sample(setting, request)
        return choice, (ms, (sizing, trial.data.levels))
    except UserError as error:
        return choice, error


def plan_levels(
    setting: Setting, longest: Caps, choice: LevelChoice
) -> tuple[LevelChoice, Strategy | UserError]:
    """Return `choice`, and its plan without levels that get no packs, or the error."""
    try:
        trial = _trial_of_set(setting, longest, choice)
        return choice, planned_strategy(setting, choice[0], trial)
    except UserError as error:
        return choice, error


def _check_curriculum(request: StrategyRequest, levels: int, short_steps: float) -> None:
    """Raise unless `short_steps` steps of drawn short packs suffice, scaled to all samples."""
    if levels < 2:
        raise UserError(
            "a curriculum begins with packs of the shortest level, and there is one level; leave "
            "--curriculum-steps out"
        )
    part = len(request.lengths) / (request.all_samples or len(request.lengths))  # drawn share
    share = short_steps / (part * request.settings.curriculum_steps)
    if share < 1:
        raise UserError(
            f"packs of the shortest level are enough for about {share:.0%} of the curriculum; give "
            "fewer --curriculum-steps"
        )


def search_with_levels(
    request: StrategyRequest, rule: LevelRule, on_progress: Callable[[int], None], processes: int
) -> StrategySearch:
    """Return ranked strategies of one and of several levels, as far as `rule` allows them."""
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
    setting = Setting(request=request.draw_samples(), packs={})
    levels = LevelSetting.for_request(setting, request, rule)
    found, sets, least_ms, refused = _search_sets(levels, sizings, on_progress, processes)
    if plain is None and not found:
        raise (
            failed
            or refused
            or UserError(
                f"no levels of packs can be trained on {request.sizes.gpus} GPUs: give "
                "--packing-levels auto, or more GPUs"
            )
        )
    others = () if plain is None else plain.ranking
    ranking = sorted([*others, *found], key=lambda strategy: strategy.ms_per_sample)
    if others and not are_plain(ranking[0].levels):
        # Several levels must be clearly faster than one level.
        limit_ms = (1 - MIN_LEVELS_GAIN) * others[0].ms_per_sample
        if ranking[0].ms_per_sample > limit_ms:
            ranking.remove(others[0])
            ranking.insert(0, others[0])  # simpler, and within the error
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
    return (
        len(possible_sizings(request))
        + _MOST_SIMULATED
        + _MOVE_ROUNDS * _MOST_MOVES
        + (1 + _MOVE_ROUNDS) * _MOST_TRIED
        + 2 * _FINALISTS
        + MOST_SCHEDULED
    )


def _search_sets(
    levels: LevelSetting, sizings: Sequence[Sizing], advance: Callable[[int], None], processes: int
) -> tuple[list[Strategy], int, float, UserError | None]:
    """Return strategies of the fastest levels, the number of near-minimal sets, a lower bound in ms
    per sample on all sets, and an error of a set, if any."""
    # Packs of every possible level are the same at all sizes.
    levels.estimates(Sizing(levels.setting.request.job.parallel)).pack_all(levels.rule)
    most = _MOST_SIMULATED if levels.setting.request.layouts else _MOST_OF_SIZING
    found = try_all(partial(_estimate_sets, levels, most), sizings, processes, advance)
    of_sizings = [
        (ms, (sizing, chosen)) for sizing, (sets, _) in found.items() for ms, chosen in sets
    ]
    estimated = sorted(of_sizings, key=lambda pair: pair[0])
    bound_ms = min((least_ms for _, least_ms in found.values()), default=np.inf)

    simulate = partial(_simulate_set, levels.some, levels.longest)
    sets = _SetTrials(
        rule=levels.rule,
        simulated=Trials(work=simulate, processes=processes, on_done=advance),
        planned=_plans_of_sets(levels.some.in_1f1b, levels, processes, advance),
    )
    limit_ms = _ESTIMATED_SLACK * estimated[0][0] if estimated else 0.0  # ms per sample
    near = [choice for ms, choice in estimated if ms <= limit_ms][:_MOST_SIMULATED]
    sets.run(near)
    if not levels.rule.is_forced:
        if sets.planned.found:
            (sizing, _), *_ = sets.rank()
            sets.run(_by_hbp(levels, sizing))
        else:
            sets.run(_tops(levels, sizings)[:_MOST_SIMULATED])
    for _ in range(0 if levels.rule.is_hbp else _MOVE_ROUNDS):
        for fastest in list(sets.rank())[:1]:
            sets.run(_moves(levels, fastest, [choice for _, choice in estimated]))
    several = {choice: trial for choice, trial in sets.rank().items() if not are_plain(choice[1])}
    finalists, gaining = list(several), may_gain(levels.some, several)
    final = _plans_of_sets(levels.setting, levels, processes, advance)
    final.run([*finalists[:_FINALISTS], *gaining])
    if not final.found:
        # All samples may need more memory and make fewer packs than the subset.
        final.run(finalists[_FINALISTS : 2 * _FINALISTS])
    failed = [
        *final.failed.values(),
        *sets.planned.failed.values(),
        *sets.simulated.failed.values(),
    ]
    return list(final.found.values()), len(near), bound_ms, next(iter(failed), None)


def _plans_of_sets(
    setting: Setting, levels: LevelSetting, processes: int, advance: Callable[[int], None]
) -> Trials[LevelChoice, Strategy]:
    work = partial(plan_levels, setting, levels.longest)
    return Trials(work=work, processes=processes, on_done=advance)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _SetTrials:
    """Sets simulated on the subset of samples, and those near the fastest planned on it in 1F1B."""

    rule: LevelRule
    simulated: Trials[LevelChoice, tuple[float, LevelChoice]]
    planned: Trials[LevelChoice, Strategy]

    def run(self, choices: Sequence[LevelChoice]) -> None:
        """Simulate sets, and plan the fastest of them that are near the fastest of all."""
        self.simulated.run(choices)
        every = self.simulated.found
        limit_ms = _SIMULATED_SLACK * min((ms for ms, _ in every.values()), default=0.0)
        found = sorted(
            (every[choice] for choice in choices if choice in every), key=lambda pair: pair[0]
        )
        near = dict.fromkeys(used for ms, used in found if ms <= limit_ms)  # distinct, in order
        self.planned.run(list(near)[:_MOST_TRIED])

    def rank(self) -> dict[LevelChoice, Strategy]:
        """Return planned sets that the rule allows, fastest first."""
        allowed = [trial for trial in self.planned.found.values() if self.rule.allows(trial.levels)]
        allowed.sort(key=lambda trial: trial.ms_per_sample)
        return {trial.choice: trial for trial in allowed}


def _by_hbp(levels: LevelSetting, sizing: Sizing) -> list[LevelChoice]:
    """Return HBP's set of levels at these sizes, empty if no length fits."""
    with suppress(UserError):
        return [(sizing, levels.estimates(sizing).by_hbp())]
    return []


def _tops(levels: LevelSetting, sizings: Sequence[Sizing]) -> list[LevelChoice]:
    """Return sets of one level for all sizes and context sizes, also at lower caps if not given."""
    may_lower = levels.setting.request.caps is None
    return [
        (sizing, top)
        for sizing in sizings
        for top in levels.estimates(sizing).tops(may_lower=may_lower)
    ]


def _moves(
    levels: LevelSetting, simulated: LevelChoice, estimated: Sequence[LevelChoice]
) -> list[LevelChoice]:
    """Return sets for more trials: `simulated` with one level changed, or at other fast sizes."""
    sizing, best = simulated
    moved = [(sizing, moved_set) for moved_set in levels.estimates(sizing).moves(best)]
    others = [other for other in dict.fromkeys(other for other, _ in estimated) if other != sizing]
    contexts = max(level.context for level in best)
    at_others = [
        (other, best) for other in others[:_SIZINGS_OF_BEST] if other.parallel.data % contexts == 0
    ]
    return [*moved, *at_others][:_MOST_MOVES]


def need_levels(request: StrategyRequest, rule: LevelRule) -> bool:
    """Return whether to search sets: for new joint plans, if requested or possibly faster.

    Raises:
        UserError: more levels are requested than can have samples.
    """
    if rule.count == 1 or request.given is not None or not request.split.is_joint:
        return False
    data = request.sample_data((Level(caps=_top(request)),))
    most = min(LevelEstimates.most_levels(data), MAX_SEARCHED)
    if rule.count is not None and rule.count > most:
        raise UserError(
            f"{rule.count} levels were asked for, and packs of these samples may have {most}: "
            f"tokens are halved from {data.caps['tokens']:,} while several samples of median "
            "length fit, and each level needs samples of its own; give fewer --packing-levels, or "
            "auto"
        )
    if rule.is_forced or most > 1:
        return True
    setting = Setting(request=request, packs={})
    jobs = (setting.job(sizing) for sizing in possible_sizings(request))
    return not any(_is_one_best(job, data, request.samples_per_step) for job in jobs)


def _is_one_best(job: JobSpec, data: SampleData, samples_per_step: int) -> bool:
    """Return whether unshared packs (context size 1) are best for samples of similar lengths.

    True if they make packs for all ranks, and a full pack fits one rank without recomputation or
    its halves would be small.
    """
    # Share of layers to recompute for a full pack to fit one rank.
    names = job.cost.features
    full = np.array([[1, *(data.caps.get(name) or 0 for name in names[1:])]], np.float64)
    tokens = samples_per_step * float(data.lengths.tokens.mean()) / job.parallel.data
    micro_batches = max(tokens / data.caps["tokens"], 1.0)
    recomputed = WholeModel.from_job(job).recomputed_share(full, job, micro_batches)
    is_best_alone = recomputed == 0 or not has_good_shares(Level(caps=data.caps, context=2))
    return bool(np.isfinite(recomputed)) and is_best_alone and _has_packs_for_all(job, data)


def _has_packs_for_all(job: JobSpec, data: SampleData) -> bool:
    """Return whether samples make a pack at the caps for every data-parallel rank."""
    ranks, tokens = job.parallel.data, data.lengths.tokens.sum(dtype=np.int64)
    if tokens >= ranks * data.caps["tokens"]:
        return True
    packs = pack_samples(data.lengths, data.caps, PackingMethod.ISF, data.settings.seed)
    return len(packs) >= ranks


def shared_anew(job: JobSpec, data: SampleData) -> SampleData:
    """Return data of given steps with the levels' fastest context sizes for this job's ranks.

    Steps, packs and caps do not change. DoesNotFit if a level fits at no context size.
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


def levels_in_use(
    levels: tuple[Level, ...], of_packs: np.ndarray, longest: Caps
) -> tuple[Level, ...]:
    """Return levels with packs; if none fits every sample, also the shortest that does."""
    counts = np.bincount(of_packs, minlength=len(levels)).tolist()
    used = [level for level, packs in zip(levels, counts, strict=True) if packs]
    if len(levels) == 1 or (used and _holds(used[-1].caps, longest)):
        return tuple(used)
    last = next(level for level in levels if _holds(level.caps, longest))
    return (*(level for level in used if level is not last), last)


def _holds(caps: Caps, other: Caps) -> bool:
    """Return whether `caps` are at least `other` for every feature in `other`."""
    return all(caps[name] >= other[name] for name in other.names)
