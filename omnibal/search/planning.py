"""Planning: from a goal to the best plan found, its alternatives and a proven gap.

    from omnibal import Free, Goal, Samples, plan
    planned = plan(Goal(job=job, data=Samples(lengths=lengths), free=Free.everything(gpus=64)))

Free sizes are searched together with caps, levels and encoder placement.
"""

from dataclasses import dataclass, field, replace

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.base.worker_pool import usable_cores
from omnibal.job.plan import DataPlan, Plan
from omnibal.job.plan_portions import EarlierPortions, read_portion
from omnibal.job.planner import PlanResult, extend_to_portions
from omnibal.model.levels import FillRule
from omnibal.packing.portions import FIRST_PORTION, PortionedSamples
from omnibal.pipeline.prediction import Prediction
from omnibal.search.encoder_placement import PlacementChoice
from omnibal.search.feasible import find_changes, find_changes_of_goal
from omnibal.search.finalists import Finalists, RequestDoesNotFit
from omnibal.search.goal import Earlier, Goal, Listener, Samples, Silence, Stream
from omnibal.search.goal_requests import GoalRequests, with_encoder_shardings
from omnibal.search.level_estimates import LevelRule
from omnibal.search.level_sets import levels_total, search_with_levels
from omnibal.search.schedule_choice import CannotRunSchedule, ScheduleChoice
from omnibal.search.step_size import COMPARED_SIZES, StepRate, step_rates
from omnibal.search.strategy import StrategyRequest
from omnibal.search.strategy_search import StrategySearch, progress_total
from omnibal.search.weight_sharding import ShardingChoice


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """Plan for a goal, its alternatives and the proven gap."""

    result: PlanResult
    placement: PlacementChoice  # chosen placement of encoders and prediction of the alternative
    sharding: ShardingChoice  # chosen weight sharding and why alternatives lost
    schedule: ScheduleChoice = field(default_factory=ScheduleChoice)
    """Chosen schedule and the schedules it was compared with."""
    strategies: StrategySearch | None = None
    """Compared parallel sizes. None if given."""
    step_source: str = ""
    """Origin of the samples per step. Empty for steps of equally many packs."""

    @property
    def asked_samples(self) -> int | None:
        """Samples per step, given or chosen. None for steps of equally many packs."""
        data = self.result.plan.data
        if self.strategies is not None and data is not None and data.window is None:
            return self.strategies.samples_per_step
        return None if data is None else data.samples_per_step

    @property
    def prediction(self) -> Prediction:
        """Prediction of the plan."""
        return self.result.plan.known_prediction

    @property
    def gap(self) -> float:
        """Max share of step time that an unfound plan may save, by proven bounds."""
        searched = 0.0 if self.result.search is None else self.result.search.gap
        return max(searched, 0.0 if self.strategies is None else self.strategies.gap)


def plan(goal: Goal, listener: Listener | None = None) -> Planned:
    """Return the best plan for a goal, deterministically.

    Raises:
        UserError: nothing can be planned. States changes that would fit if memory is short.
    """
    if isinstance(goal.data, Samples) and goal.data.available:
        planned = plan(replace(goal, data=replace(goal.data, available=())), listener)
        result = replace(planned.result, available=goal.data.available)
        return replace(planned, result=result)
    if isinstance(goal.data, Earlier) and goal.data.plan.data is not None:
        return _planned_of_earlier(goal, goal.data, goal.data.plan.data, listener)
    portions = _split_portions(goal)
    if portions is not None:
        return _planned_in_portions(goal, portions, listener)
    return _plan_goal(goal, listener)


def rates_of_steps(goal: Goal, planned: Planned, listener: Listener) -> list[StepRate]:
    """Return samples per second of all devices at half to four times the plan's step.

    Empty unless sizes were searched for samples. Scaled to the plan's rate on all samples.
    """
    found, sizes = planned.strategies, goal.free.sizes
    if found is None or sizes is None or not isinstance(goal.data, Samples):
        return []
    request = _strategy_request(goal)
    with listener.progress("trying other step sizes", COMPARED_SIZES) as advance:
        rates = step_rates(request, found, advance)
    own = planned.prediction.samples_per_second_per_gpu
    compared = {rate.samples_per_step: rate.samples_per_second for rate in rates}
    if own is None or found.samples_per_step not in compared:
        return []
    scale = own * sizes.gpus / compared[found.samples_per_step]
    return [replace(rate, samples_per_second=scale * rate.samples_per_second) for rate in rates]


def _plan_goal(goal: Goal, listener: Listener | None) -> Planned:
    """Plan data that is not split into portions."""
    goal, listener = with_encoder_shardings(goal), listener or Silence()
    _note_uncounted(goal, listener)
    try:
        planned = _search_goal(GoalRequests(goal=goal, listener=listener))
    except DoesNotFit as error:
        raise _with_advice(goal, error, listener) from error
    _note_undivided(goal, planned.result.plan, listener)
    return planned


def _split_portions(goal: Goal) -> PortionedSamples | None:
    """Return samples in portions. None if few enough to be packed together, or no samples."""
    if not isinstance(goal.data, Samples):
        return None
    return PortionedSamples.deal(goal.data.lengths, goal.data.settings)


def _planned_in_portions(
    goal: Goal, portions: PortionedSamples, listener: Listener | None
) -> Planned:
    """Plan for the first portion. Further portions are packed when the plan is saved."""
    assert isinstance(goal.data, Samples)
    settings = portions.settings_of(FIRST_PORTION)
    lengths = portions.samples(0)
    data = replace(
        goal.data,
        lengths=lengths,
        epochs=settings.epochs,
        portion_samples=len(lengths),
    )
    (listener or Silence()).note(
        f"{len(portions.lengths):,} samples are packed in {portions.count} portions; stages are "
        "planned on the first"
    )
    planned = plan(replace(goal, data=data), listener)
    fill = FillRule.GREEDY if goal.free.levels.is_hbp else portions.settings.fill
    portions = replace(portions, settings=replace(portions.settings, fill=fill))
    # All portions and epochs, in lengths of the first portion.
    runs = portions.epochs * len(portions.lengths) / len(lengths)
    return replace(planned, result=extend_to_portions(planned.result, portions, runs))


def _planned_of_earlier(
    goal: Goal, earlier: Earlier, data: DataPlan, listener: Listener | None
) -> Planned:
    """Plan for the steps of an earlier plan, or of its first portion if it has portions."""
    portions = None
    if data.portions and earlier.directory is not None:
        portions = EarlierPortions(data=data, directory=earlier.directory)
        first = read_portion(data, 0, earlier.directory)
        goal = replace(goal, data=Earlier(plan=earlier.plan.of_portion(0), data=first))
    planned = _plan_goal(goal, listener)
    result = planned.result
    assert result.plan.data is not None, "the earlier plan has data"
    # The steps are unchanged, so these values still hold.
    same = {"mixture": data.mixture, "fewest_packs": data.fewest_packs}
    of_data = result.plan.data.model_copy(update=same)
    result = replace(result, plan=result.plan.model_copy(update={"data": of_data}))
    if portions is not None:
        result = extend_to_portions(result, portions, data.runs_of_first)
    return replace(planned, result=result)


def _note_uncounted(goal: Goal, listener: Listener) -> None:
    """Note model items without a column in lengths, and images without counted squares."""
    data, model = goal.data, goal.job.model
    if not isinstance(data, Samples | Stream):
        return
    for name in sorted(set(model.item_features) - set(data.lengths.item_names)):
        listener.note(f"the lengths do not count {name}: no sample has any")
    for name in data.lengths.without_squares:
        if name in model.item_features:
            listener.note(
                f"the lengths do not say how many {name} an image has: those of a sample count as "
                "one image, the most that attention may cost; scan them with `omnibal lengths`"
            )


def _note_undivided(goal: Goal, plan: Plan, listener: Listener) -> None:
    """Note that one rank encodes a sample's images in shared packs if sizes are unknown."""
    data = goal.data
    if not plan.has_shared_packs or not isinstance(data, Samples):
        return
    if data.lengths.is_without_image_sizes:
        listener.note(
            "the lengths do not list a sample's images: of packs that ranks share, one rank "
            "encodes all of a sample's; scan them with `omnibal lengths` to divide these"
        )


def _search_goal(requests: GoalRequests) -> Planned:
    """Search sizes, sharding, encoder placement, caps and levels together, then schedules."""
    request, source = requests.with_step(requests.strategy_request())
    requests.check_curriculum(request)
    has_levels = requests.may_have_levels(request)
    rule = requests.goal.free.levels if has_levels else LevelRule(count=1)
    total = progress_total(request) + (levels_total(request) if has_levels else 0)
    finalists = Finalists(requests=requests)  # plans on all data
    try:
        with requests.listener.progress("trying strategies", total) as advance:
            strategies = search_with_levels(request, rule, advance, usable_cores())
        best = finalists.plan(request, strategies)
    except UserError as error:
        if not request.layouts or isinstance(error, CannotRunSchedule):
            raise
        result, sizing = finalists.plan_first(request)  # usually raises DoesNotFit again
        if not isinstance(requests.goal.data, Earlier):
            raise
        predicted = {sizing.placement: result.plan.known_prediction}
        return Planned(
            result=result,
            placement=PlacementChoice(chosen=sizing.placement, predicted=predicted, refused={}),
            sharding=ShardingChoice(parallel=sizing.parallel, others={}),
        )
    found = best.strategies
    if request.layouts and request.caps is None:
        options = found.best.caps.options[-1 if requests.rules.tokens_alone else 0 :]
        requests.listener.note(f"found {' '.join(options)}")
    return Planned(
        result=best.result,
        placement=PlacementChoice.of_strategies(request, found, best.predicted),
        sharding=ShardingChoice.of_strategies(found),
        schedule=best.schedule,
        strategies=None if request.layouts else found,
        step_source=source,
    )


def _with_advice(goal: Goal, error: DoesNotFit, listener: Listener) -> UserError:
    """Return an error with changes that would fit."""
    with listener.status("looking for what would fit"):
        if isinstance(error, RequestDoesNotFit):
            advice = find_changes(error.request)
        else:
            advice = find_changes_of_goal(goal, _strategy_request)
        return UserError(advice.message(error))


def _strategy_request(goal: Goal) -> StrategyRequest:
    return GoalRequests(goal=goal, listener=Silence()).strategy_request()
