"""Plan the strategies that may be the fastest on all data, in their best schedules.

The search compared them on sampled data. All data may need slightly more memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.base.worker_pool import map_unordered, usable_cores
from omnibal.job.plan_data import SampleData, smallest_caps
from omnibal.job.planner import PlanRequest, PlanResult, make_ordered_plan, order_plan
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import are_plain
from omnibal.pipeline.prediction import Prediction, relative_ms
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.search.goal_requests import GoalRequests
from omnibal.search.level_sets import MIN_LEVELS_GAIN, levels_in_use, shared_anew
from omnibal.search.memory_need import least_state_gib
from omnibal.search.parallel_sizes import placements_error, possible_sizings
from omnibal.search.schedule_choice import CannotRunSchedule, ScheduleChoice, plan_in_best_schedule
from omnibal.search.strategy import Setting, Sizing, Strategy, StrategyRequest
from omnibal.search.strategy_search import StrategySearch

_FINALIST_SLACK, _FINALISTS = 1.02, 3
"""Max slowdown and count of strategies to plan on all data: samples err by about 1 %."""


class RequestDoesNotFit(DoesNotFit):
    def __init__(self, request: PlanRequest, error: DoesNotFit) -> None:
        super().__init__(error.need, error.advice)
        self.request = request


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Finalist:
    """Strategy to plan on all data."""

    strategy: Strategy
    request: PlanRequest
    schedules: tuple[PipelineSchedule, ...]  # the trial's best, and 1F1B if that is allowed

    def plan(self) -> tuple[PlanResult, ScheduleChoice]:
        """Return the plan, with each rank's micro-batches reordered, in the best schedule."""
        result, schedule = plan_in_best_schedule(self.request, self.schedules)
        result = order_plan(self.request, result)
        trial = self.strategy.schedule
        return result, schedule.with_trial(trial, result.plan.known_prediction)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedFinalists:
    """The fastest plan, and the search that its strategy was found by."""

    result: PlanResult
    strategies: StrategySearch  # the search, with the fastest first
    schedule: ScheduleChoice
    predicted: Mapping[EncoderPlacement, Prediction]
    """Predictions of the fastest plans, by placement of encoders."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Finalists:
    """Plans a goal's strategies on all data."""

    requests: GoalRequests

    def plan(self, request: StrategyRequest, found: StrategySearch) -> PlannedFinalists:
        """Return the fastest plan. Raise `RequestDoesNotFit` if no strategy fits all data."""
        left, first_error, first = found, None, None  # the first request's error is reported
        usual = ONE_FORWARD_ONE_BACKWARD
        while True:
            finalists = [
                _Finalist(
                    strategy=strategy,
                    request=self.requests.plan_request(request, strategy),
                    schedules=tuple(
                        schedule
                        for schedule in dict.fromkeys((usual, strategy.schedule.chosen))
                        if schedule.name in request.schedules
                    ),
                )
                for strategy in _list_finalists(request, left)
            ]
            first = first or finalists[0].request  # of the fastest strategy
            results = _plan_all(finalists)
            fitting = [
                (finalist, *result)
                for finalist, result in zip(finalists, results, strict=True)
                if not isinstance(result, UserError)
            ]
            if fitting:
                predicted = dict[EncoderPlacement, Prediction]()
                for finalist, result, _ in fitting:
                    own, placement = result.plan.known_prediction, finalist.strategy.placement
                    predicted[placement] = min(predicted.get(placement, own), own, key=relative_ms)
                best, result, schedule = min(fitting, key=lambda planned: _final_ms(planned[1]))
                result, schedule = self._drop_unused_levels(best, result, schedule)
                return PlannedFinalists(
                    result=result,
                    strategies=left.led_by(best.strategy),
                    schedule=schedule,
                    predicted=predicted,
                )
            first_error = first_error or next(e for e in results if isinstance(e, UserError))
            for unfit in finalists:
                if len(left.ranking) == 1:
                    if isinstance(first_error, DoesNotFit):
                        raise RequestDoesNotFit(first, first_error) from first_error
                    raise first_error
                # samples need less memory than all data
                left = left.without(unfit.strategy, "does not fit all data")
                self.requests.listener.note(
                    f"{unfit.strategy.sizing.options} fits the samples it was tried on, and not "
                    f"all: taking {left.best.sizing.options}"
                )

    def plan_first(self, request: StrategyRequest) -> tuple[PlanResult, Sizing]:
        """Return a plan and its sizes although the search found none, or raise what does not fit.

        The first placement that fits is planned. Ranks may share an earlier plan's packs.
        """
        refused = dict[EncoderPlacement, UserError]()
        setting, sizings = Setting(request=request, packs={}), possible_sizings(request)
        for placement in dict.fromkeys(sizing.placement for sizing in sizings):
            of_placement = [sizing for sizing in sizings if sizing.placement is placement]
            # If the sharding with the least state does not fit, no other one does.
            sizing = min(of_placement, key=lambda sizing: least_state_gib(setting.job(sizing)))
            try:
                asked = self.requests.most_shared_request(request, sizing)
                return self._make_plan(asked), sizing
            except UserError as error:
                refused[placement] = error
        raise _neither_placement_error(refused)

    def _make_plan(self, request: PlanRequest) -> PlanResult:
        """Make a plan. If an earlier plan's packs do not fit one rank, ranks share them."""
        try:
            return make_ordered_plan(request)
        except DoesNotFit as error:
            shared = _share_packs(request)
            if shared is None:
                raise RequestDoesNotFit(request, error) from error
        context = shared.data.levels[0].context
        self.requests.listener.note(
            f"packs of the earlier plan do not fit one rank: {context} ranks share each"
        )
        return self._make_plan(shared)

    def _drop_unused_levels(
        self, finalist: _Finalist, result: PlanResult, schedule: ScheduleChoice
    ) -> tuple[PlanResult, ScheduleChoice]:
        """Replan without levels that got no packs, and return the plan and its schedule.

        Levels were chosen on the search's packs. The steps of an earlier plan keep their levels.
        """
        while True:
            data = finalist.request.data
            if result.data is None or not isinstance(data, SampleData) or data.steps is not None:
                return result, schedule
            # result.data has the packs of all data, unlike the search
            least = smallest_caps(data.lengths, data.caps.names)
            used = levels_in_use(data.levels, result.data[0].level, least)
            if used == data.levels:
                return result, schedule
            for level in data.levels:
                if level not in used:
                    self.requests.listener.note(
                        f"no pack is of the level of {level.caps['tokens']:,} tokens: it is left "
                        "out"
                    )
            self.requests.check_levels(used)
            request = replace(finalist.request, data=replace(data, levels=used))
            finalist = replace(finalist, request=request)
            try:
                result, schedule = finalist.plan()
            except DoesNotFit as error:
                raise RequestDoesNotFit(request, error) from error


def _neither_placement_error(refused: Mapping[EncoderPlacement, UserError]) -> UserError:
    """Return an error of all placements, with the first one's request if that does not fit."""
    first, *others = refused.values()
    if not others:
        return first
    causes = {
        placement: UserError(error.need) if isinstance(error, DoesNotFit) else error
        for placement, error in refused.items()
    }
    both = placements_error(causes)
    if not isinstance(first, RequestDoesNotFit):
        return both
    return RequestDoesNotFit(first.request, DoesNotFit(str(both), first.advice))


def _list_finalists(request: StrategyRequest, found: StrategySearch) -> list[Strategy]:
    """Return near-best strategies, and with given layouts the best of every encoder placement."""
    limit_ms = _FINALIST_SLACK * found.best.ms_per_sample
    near = [strategy for strategy in found.ranking if strategy.ms_per_sample <= limit_ms]
    near = near[:_FINALISTS]
    if request.layouts:
        firsts = {strategy.placement: strategy for strategy in reversed(found.ranking)}
        near += [strategy for strategy in firsts.values() if strategy not in near]
    return near


_Planned = tuple[PlanResult, ScheduleChoice]


def _plan_all(finalists: list[_Finalist]) -> list[_Planned | UserError]:
    tasks = list(enumerate(finalists))
    found = dict(map_unordered(_plan_or_error, tasks, min(usable_cores(), len(tasks))))
    return [found[number] for number, _ in tasks]


def _plan_or_error(task: tuple[int, _Finalist]) -> tuple[int, _Planned | UserError]:
    number, finalist = task
    try:
        return number, finalist.plan()
    except (DoesNotFit, CannotRunSchedule) as error:
        return number, error


def _final_ms(result: PlanResult) -> float:
    """Return ms per sample to compare by: plans with several levels must be faster by a margin."""
    required_gain = 0.0 if are_plain(result.plan.pack_levels) else MIN_LEVELS_GAIN
    return relative_ms(result.plan.known_prediction) * (1 + required_gain)


def _share_packs(request: PlanRequest) -> PlanRequest | None:
    """Return the request with an earlier plan's packs shared by ranks. None if that cannot help."""
    data = request.data
    if not isinstance(data, SampleData) or data.steps is None:
        return None
    if not are_plain(data.levels):
        return None
    if request.job.has_data_parallel_encoders or not request.split.is_joint:
        return None
    try:
        shared = shared_anew(request.job, data)
    except DoesNotFit:
        return None
    return replace(request, data=shared) if shared.levels[0].context > 1 else None
