"""Plan the strategies that may be the fastest on all data, in their best schedules.

The search compared them on sampled data. All data may need slightly more memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.base.worker_pool import map_unordered, usable_cores
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import (
    PlanRequest,
    PlanResult,
    make_ordered_plan,
    make_plan,
    order_plan,
)
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import are_plain
from omnibal.pipeline.prediction import Prediction, relative_ms
from omnibal.search.goal_requests import GoalRequests
from omnibal.search.level_sets import MIN_LEVELS_GAIN, levels_in_use, shared_anew
from omnibal.search.memory_need import least_state_gib
from omnibal.search.parallel_sizes import StrategySearch, placements_error, possible_sizings
from omnibal.search.schedule_choice import (
    ScheduleChoice,
    in_best_schedule,
    in_order,
    remaining_share,
)
from omnibal.search.strategy import Setting, Sizing, Strategy, StrategyRequest

_FINALIST_SLACK, _FINALISTS = 1.02, 3
"""Max slowdown and count of strategies to plan on all data: samples err by about 1 %."""
_MAX_PIPELINES = 4  # max further pipelines to plan in other schedules


class RequestDoesNotFit(DoesNotFit):
    def __init__(self, request: PlanRequest, error: DoesNotFit) -> None:
        super().__init__(error.need, error.advice)
        self.request = request


_Finalist = tuple[Strategy, PlanRequest, PlanResult]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedFinalists:
    """The fastest plan, and the search that its strategy was found by."""

    result: PlanResult
    strategies: StrategySearch  # the search, with the fastest first
    schedule: ScheduleChoice
    predicted: Mapping[EncoderPlacement, Prediction]
    """Predictions of the fastest 1F1B plans, by placement of encoders."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Finalists:
    """Plans a goal's strategies on all data."""

    requests: GoalRequests

    def plan(self, request: StrategyRequest, found: StrategySearch) -> PlannedFinalists:
        """Return the fastest plan. Raise `RequestDoesNotFit` if no strategy fits all data."""
        left, first_error, first = found, None, None  # the first request's error is reported
        while True:
            finalists = _list_finalists(request, left)
            requests = [self.requests.plan_request(request, strategy) for strategy in finalists]
            first = first or requests[0]  # of the fastest strategy
            # Micro-batches of a single finalist are ordered after its schedule is chosen.
            is_ordered = len(finalists) > 1 or not self.requests.schedules
            results = _plan_all(requests, is_ordered)
            fitting = [
                (strategy, planned, result)
                for strategy, planned, result in zip(finalists, requests, results, strict=True)
                if isinstance(result, PlanResult)
            ]
            if fitting:
                predicted = dict[EncoderPlacement, Prediction]()
                for strategy, _, result in fitting:
                    own = result.plan.known_prediction
                    fastest = min(predicted.get(strategy.placement, own), own, key=relative_ms)
                    predicted[strategy.placement] = fastest
                if not self.requests.schedules:  # no other schedule to try
                    fitting = [min(fitting, key=lambda finalist: _final_ms(finalist[2]))]
                scheduled = self._choose_schedules(fitting, is_ordered)
                best, result, schedule = min(scheduled, key=lambda planned: _final_ms(planned[1]))
                return PlannedFinalists(
                    result=result,
                    strategies=left.led_by(best),
                    schedule=schedule,
                    predicted=predicted,
                )
            first_error = first_error or results[0]
            for unfit in finalists:
                if len(left.ranking) == 1:
                    assert isinstance(first_error, DoesNotFit)
                    raise RequestDoesNotFit(first, first_error) from first_error
                # samples need less memory than all data
                left = left.without(unfit, "does not fit all data")
                self.requests.listener.note(
                    f"{unfit.sizing.options} fits the samples it was tried on, and not all: taking "
                    f"{left.best.sizing.options}"
                )

    def _choose_schedules(
        self, fitting: list[_Finalist], is_ordered: bool
    ) -> list[tuple[Strategy, PlanResult, ScheduleChoice]]:
        """Return the plans in their best schedules. Refused ones are dropped; raises if all are."""
        scheduled = list[tuple[Strategy, PlanResult, ScheduleChoice]]()
        refused = list[UserError]()
        for strategy, planned, result in fitting:
            try:
                result, planned = self._drop_unused_levels(result, planned, is_ordered)
                chosen = self._choose_schedule(result, planned, is_ordered=is_ordered)
                scheduled.append((strategy, *chosen))
            except UserError as error:
                refused.append(error)
        if not scheduled:
            raise refused[0]
        return scheduled

    def _choose_schedule(
        self, result: PlanResult, request: PlanRequest, *, is_ordered: bool
    ) -> tuple[PlanResult, ScheduleChoice]:
        """Return the plan in the requested schedule, or in the trainer's fastest schedule."""
        name, names = self.requests.goal.free.schedule, self.requests.schedules
        if request.data.levels != result.plan.pack_levels:
            # An earlier plan's packs had to be shared: the plan keeps its schedule.
            return result if is_ordered else order_plan(request, result), ScheduleChoice()
        if not names:
            return result, ScheduleChoice()
        what = (
            "trying other schedules" if name is None else f"cutting the model for schedule {name}"
        )
        with self.requests.listener.status(what):
            request, result, choice = in_best_schedule(
                request, result, names, is_forced=name is not None, is_ordered=is_ordered
            )
            return (result, choice) if is_ordered else in_order(request, result, choice)

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

    def _make_plan(self, request: PlanRequest, is_ordered: bool = True) -> PlanResult:
        """Make a plan. If an earlier plan's packs do not fit one rank, ranks share them."""
        try:
            return _plan(request, is_ordered)
        except DoesNotFit as error:
            shared = _share_packs(request)
            if shared is None:
                raise RequestDoesNotFit(request, error) from error
        context = shared.data.levels[0].context
        self.requests.listener.note(
            f"packs of the earlier plan do not fit one rank: {context} ranks share each"
        )
        return self._make_plan(shared, is_ordered)

    def _drop_unused_levels(
        self, result: PlanResult, request: PlanRequest, is_ordered: bool
    ) -> tuple[PlanResult, PlanRequest]:
        """Replan without levels that got no packs, and return the plan and its request.

        Levels were chosen on the search's packs. The steps of an earlier plan keep their levels.
        """
        while True:
            data = request.data
            if result.data is None or not isinstance(data, SampleData) or data.steps is not None:
                return result, request
            # result.data has the packs of all data, unlike the search
            used = levels_in_use(data.levels, result.data[0].level, data.smallest_caps())
            if used == data.levels:
                return result, request
            for level in data.levels:
                if level not in used:
                    self.requests.listener.note(
                        f"no pack is of the level of {level.caps['tokens']:,} tokens: it is left "
                        "out"
                    )
            self.requests.check_levels(used)
            request = replace(request, data=replace(data, levels=used))
            result = self._make_plan(request, is_ordered)


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
    """Return near-best strategies, and pipelines that another schedule may make the best.

    If layouts are given, add the best strategy of every placement of encoders.
    """
    best_ms = found.best.ms_per_sample
    limit_ms = _FINALIST_SLACK * best_ms
    near = [strategy for strategy in found.ranking if strategy.ms_per_sample <= limit_ms]
    near = near[:_FINALISTS]
    if request.layouts:
        firsts = {strategy.placement: strategy for strategy in reversed(found.ranking)}
        near += [strategy for strategy in firsts.values() if strategy not in near]
    possible: list[tuple[float, Strategy]] = []
    for strategy in found.ranking if request.other_schedules else ():
        if strategy.parallel.pipeline == 1 or strategy in near:
            continue  # before the costs of its job are counted
        job = request.job.with_sizes(strategy.parallel, strategy.placement)
        share = remaining_share(job, request.other_schedules, strategy.micro_batches)
        if share < 1 and share * strategy.ms_per_sample <= best_ms:
            possible.append((share * strategy.ms_per_sample, strategy))
    possible.sort(key=lambda pair: pair[0])
    return near + [strategy for _, strategy in possible[:_MAX_PIPELINES]]


def _plan_all(requests: list[PlanRequest], is_ordered: bool) -> list[PlanResult | DoesNotFit]:
    tasks = [(number, request, is_ordered) for number, request in enumerate(requests)]
    found = dict(map_unordered(_plan_or_error, tasks, min(usable_cores(), len(tasks))))
    return [found[number] for number, *_ in tasks]


def _plan_or_error(task: tuple[int, PlanRequest, bool]) -> tuple[int, PlanResult | DoesNotFit]:
    number, request, is_ordered = task
    try:
        return number, _plan(request, is_ordered)
    except DoesNotFit as error:
        return number, error


def _plan(request: PlanRequest, is_ordered: bool) -> PlanResult:
    """Make a plan. Reorder each rank's micro-batches if `is_ordered`."""
    return make_ordered_plan(request) if is_ordered else make_plan(request)


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
