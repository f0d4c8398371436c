"""Planning: from a goal to the best plan found, its alternatives and a proven gap.

    from omnibal import Free, Goal, Samples, plan
    planned = plan(Goal(job=job, data=Samples(lengths=lengths), free=Free.everything(gpus=64)))

Free sizes are searched together with caps, levels and encoder placement.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.base.worker_pool import map_unordered, usable_cores
from omnibal.job.job import JobSpec
from omnibal.job.plan import DataPlan, Plan
from omnibal.job.plan_data import (
    MockData,
    PlanData,
    SampleData,
    StreamData,
    least_caps,
    limited_features,
)
from omnibal.job.plan_portions import EarlierPortions, read_portion
from omnibal.job.planner import (
    PlanRequest,
    PlanResult,
    in_portions,
    make_ordered_plan,
    make_plan,
    ordered_plan,
)
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import FillRule, Level, are_plain
from omnibal.model.limits import (
    DEFAULT_MICRO_BATCHES,
    IMAGE_TOKENS,
    SEARCH_SAMPLES,
    Caps,
    memory_cap_gib,
)
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.model.targets import OWN, PackRules
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.pipeline.prediction import Prediction
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD
from omnibal.pipeline.stage_memory import GIB
from omnibal.search import caps as cap_search
from omnibal.search import level_sets as level_search
from omnibal.search.encoder_placement import (
    PlacementChoice,
    PredictedStep,
    neither,
    relative_ms,
)
from omnibal.search.feasible import find_changes, find_changes_of_goal
from omnibal.search.goal import (
    Earlier,
    Goal,
    GoalData,
    Listener,
    Samples,
    ShapesAlone,
    Silence,
    Stream,
)
from omnibal.search.level_estimates import LevelEstimates, LevelRule, most_shared, top_caps
from omnibal.search.level_sets import levels_total, need_levels, search_with_levels
from omnibal.search.level_trial import levels_in_use
from omnibal.search.limit_costs import samples_per_step as mean_samples_per_step
from omnibal.search.parallel_sizes import (
    StrategySearch,
    possible_sizings,
    progress_total,
)
from omnibal.search.schedule_choice import (
    ScheduleChoice,
    in_best_schedule,
    in_order,
)
from omnibal.search.step_size import (
    COMPARED_SIZES,
    StepRate,
    default_samples_per_step,
    default_source,
    recipe_samples,
    step_rates,
    with_enough_samples,
)
from omnibal.search.strategy import FreeSizes, Strategy, StrategyRequest
from omnibal.search.weight_sharding import ShardingChoice
from omnibal.steps.pack_settings import PackSettings
from omnibal.steps.portions import FIRST_PORTION, PortionedSamples

_SMALL_COPY = 0.05
"""Share of device memory below which a sizes search keeps encoders whole."""
_ABOUT_AS_FAST, _FINALISTS = 1.02, 3
"""Max slowdown and count of strategies to plan on all data: samples err by about 1 %."""
_SCHEDULE_GAINS, _PIPELINES = 1.1, 2
"""Max slowdown and max count of further pipelines that are planned in other schedules."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """Plan for a goal, its alternatives and the proven gap."""

    result: PlanResult
    placement: PlacementChoice
    """Chosen placement of encoders and prediction of the alternative."""
    sharding: ShardingChoice
    """Chosen weight sharding and why alternatives lost."""
    schedule: ScheduleChoice = field(default_factory=ScheduleChoice)
    """Chosen schedule and the schedules it was compared with."""
    strategies: StrategySearch | None = None
    """Compared parallel sizes. None if given."""
    step_source: str = ""
    """Origin of the samples per step. Empty for steps of equally many packs."""

    @property
    def asked_samples(self) -> int | None:
        """Samples per step that were asked for or chosen. None for steps of equally many packs."""
        data = self.result.plan.data
        if self.strategies is not None and data is not None and data.window is None:
            return self.strategies.samples_per_step
        return None if data is None else data.samples_per_step

    @property
    def prediction(self) -> Prediction:
        """Prediction of the plan."""
        return self.result.plan.predicted

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
    portions = _portions(goal)
    if portions is not None:
        return _planned_in_portions(goal, portions, listener)
    return _planned(goal, listener)


def rates_of_steps(goal: Goal, planned: Planned, listener: Listener) -> list[StepRate]:
    """Return the rates at half to four times the plan's samples per step.

    Empty unless sizes were searched for samples. Scaled to the plan's rate on all samples.
    """
    found, sizes = planned.strategies, goal.free.sizes
    if found is None or sizes is None or not isinstance(goal.data, Samples):
        return []
    request = _request_of_sizes(goal)
    with listener.progress("trying other step sizes", COMPARED_SIZES) as advance:
        rates = step_rates(request, found, advance)
    own = planned.prediction.samples_per_second_per_gpu
    compared = {rate.samples_per_step: rate.samples_per_second for rate in rates}
    if own is None or found.samples_per_step not in compared:
        return []
    scale = own * sizes.gpus / compared[found.samples_per_step]
    return [replace(rate, samples_per_second=scale * rate.samples_per_second) for rate in rates]


def _planned(goal: Goal, listener: Listener | None) -> Planned:
    """Plan data that is not split into portions."""
    goal = _with_encoder_shardings(goal)
    search = _Search(goal=goal, listener=listener or Silence())
    search.note_uncounted()
    try:
        planned = search.run()
    except DoesNotFit as error:
        raise search.with_advice(error) from error
    search.note_undivided(planned.result.plan)
    return planned


def _portions(goal: Goal) -> PortionedSamples | None:
    """Samples in portions. None if few enough to be packed together."""
    if not isinstance(goal.data, Samples):
        return None
    return PortionedSamples.of(goal.data.lengths, goal.data.settings)


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
    runs = portions.epochs * len(portions.lengths) / len(lengths)
    return replace(planned, result=in_portions(planned.result, portions, runs))


def _planned_of_earlier(
    goal: Goal, earlier: Earlier, data: DataPlan, listener: Listener | None
) -> Planned:
    """Plan for the steps of an earlier plan, or of its first portion if it has portions."""
    portions = None
    if data.portions and earlier.directory is not None:
        portions = EarlierPortions(data=data, directory=earlier.directory)
        first = read_portion(data, 0, earlier.directory)
        goal = replace(goal, data=Earlier(plan=earlier.plan.of_portion(0), data=first))
    planned = _planned(goal, listener)
    result = planned.result
    assert result.plan.data is not None, "the earlier plan has data"
    # The steps are unchanged, so these values still hold.
    same = {"mixture": data.mixture, "fewest_packs": data.fewest_packs}
    of_data = result.plan.data.model_copy(update=same)
    result = replace(result, plan=result.plan.model_copy(update={"data": of_data}))
    if portions is not None:
        result = in_portions(result, portions, data.runs_of_first)
    return replace(planned, result=result)


def _with_encoder_shardings(goal: Goal) -> Goal:
    """Add encoder shardings to the search space.

    With free sizes, encoders are replicated or fully sharded. Small encoders are only replicated:
    sharding them frees little memory.
    """
    if goal.free.shardings is None:
        return goal
    ways, job = goal.shardings, goal.job
    if goal.free.sizes is not None and WeightSharding.REPLICATED in ways:
        whole = _whole_encoders_bytes(job)
        small = whole <= _SMALL_COPY * memory_cap_gib(job.cluster) * GIB
        few = (WeightSharding.REPLICATED, *([] if small else [WeightSharding.FULL]))
        ways = tuple(way for way in few if way in ways)
    return replace(goal, job=replace(job, encoder_shardings=ways))


def _whole_encoders_bytes(job: JobSpec) -> float:
    """Bytes of replicated data-parallel encoders' weights and gradients. 0 if impossible."""
    whole = (WeightSharding.REPLICATED,)
    try:
        beside = replace(job, placement=EncoderPlacement.DATA_PARALLEL, encoder_shardings=whole)
    except UserError:
        return 0.0
    [cost] = beside.encoders_costs.values()
    return cost.weights_bytes + cost.gradients_bytes


def without_trainer(goal: Goal, result: PlanResult) -> Goal:
    """Return the goal without another trainer's limits, for comparison.

    A trainer that always shards weights allows few sizes, so sizes on the same GPUs become free, at
    the same samples per step.
    """
    job = replace(goal.job, trainer=OWN)
    always_shards = goal.job.trainer.always_shards
    # Limits are compared separately, and replicating weights is not among them.
    ways = tuple(WeightSharding) if always_shards else (WeightSharding.REPLICATED,)
    if not always_shards or goal.free.sizes is not None:
        return replace(goal, job=job, free=replace(goal.free, shardings=ways))
    data: GoalData = goal.data
    if isinstance(data, Samples):
        data = replace(data, micro_batches=None, samples_per_step=mean_samples_per_step(result))
    elif isinstance(data, ShapesAlone):
        data = replace(data, micro_batches=None, packs_per_step=mean_samples_per_step(result))
    sizes = FreeSizes(gpus=result.plan.parallel.world_size)
    tensor = job.cost_source.tensor or 1
    free = replace(goal.free, sizes=sizes, shardings=ways, levels=LevelRule(count=1))
    return Goal(job=job.sized(Parallel(pipeline=1, tensor=tensor)), data=data, free=free)


class _RequestDoesNotFit(DoesNotFit):
    def __init__(self, request: PlanRequest, error: DoesNotFit) -> None:
        super().__init__(error.need, error.advice)
        self.request = request


_Finalist = tuple[Strategy, PlanRequest, PlanResult]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Search:
    """Search for a goal's plan."""

    goal: Goal
    listener: Listener

    @property
    def rules(self) -> PackRules:
        return self.goal.job.trainer.packs

    def note_uncounted(self) -> None:
        """Note model items without a column in lengths, and images without counted squares."""
        data, model = self.goal.data, self.goal.job.model
        if not isinstance(data, Samples | Stream):
            return
        for name in sorted(set(model.item_features) - set(data.lengths.item_names)):
            self.listener.note(f"the lengths do not count {name}: no sample has any")
        for name in data.lengths.without_squares:
            if name in model.item_features:
                self.listener.note(
                    f"the lengths do not say how many {name} an image has: those of a sample count "
                    "as one image, the most that attention may cost; scan them with `omnibal "
                    "lengths`"
                )

    def note_undivided(self, plan: Plan) -> None:
        """Note that one rank encodes a sample's images in shared packs if sizes are unknown."""
        data = self.goal.data
        if not plan.has_shared_packs or not isinstance(data, Samples):
            return
        if data.lengths.is_without_image_sizes:
            self.listener.note(
                "the lengths do not list a sample's images: of packs that ranks share, one rank "
                "encodes all of a sample's; scan them with `omnibal lengths` to divide these"
            )

    def run(self) -> Planned:
        """Search sizes, sharding, encoder placement, caps and levels together, then schedules.

        Given sizes are a search over the shardings and placements of one layout.
        """
        request, source = self._with_step(self.strategy_request())
        self._check_curriculum(request)
        try:
            found = self._found_strategies(request)
        except UserError:
            if not request.layouts:
                raise
            planned = self._first_layout(request)  # raises what does not fit, in most cases
            if not isinstance(self.goal.data, Earlier):
                raise
            return planned
        result, found, schedule, predicted = self._plan_of_strategies(request, found)
        if request.layouts and request.caps is None:
            options = found.best.caps.options[-1 if self.rules.tokens_alone else 0 :]
            self.listener.note(f"found {' '.join(options)}")
        return Planned(
            result=result,
            placement=_placement_of(request, found, predicted),
            sharding=ShardingChoice.of_strategies(found),
            schedule=schedule,
            strategies=None if request.layouts else found,
            step_source=source,
        )

    def _first_layout(self, request: StrategyRequest) -> Planned:
        """Plan the first of given layouts, or raise an error of its memory by stages.

        An earlier plan may fit after all, if ranks share its packs.
        """
        refused = dict[EncoderPlacement, UserError]()
        for sizing in {
            each.placement: each for each in reversed(possible_sizings(request))
        }.values():
            placement = sizing.placement
            job = replace(self.goal.job, parallel=sizing.parallel, placement=placement)
            try:
                result = self._make_plan(self._request(job, self._most_shared(request, job)))
            except UserError as error:
                refused[placement] = error
                continue
            predicted = {placement: result.plan.predicted}
            return Planned(
                result=result,
                placement=PlacementChoice(chosen=placement, predicted=predicted, refused={}),
                sharding=ShardingChoice(parallel=sizing.parallel, others={}),
            )
        raise _neither({each: refused[each] for each in request.placements if each in refused})

    def _most_shared(self, request: StrategyRequest, job: JobSpec) -> PlanData:
        """All data for a job in packs that as many ranks share as may."""
        caps = request.caps or least_caps(request.lengths, limited_features(job.model))
        data = self._data_of(request, job, caps)
        if isinstance(self.goal.data, Samples) and self._may_have_levels(request):
            assert isinstance(data, SampleData)
            data = replace(data, levels=most_shared(job, data.caps))
            self._check_levels(data.levels)
        return data

    def _layouts(self) -> tuple[Parallel, ...]:
        """The given sizes in every allowed sharding. Empty if sizes are free."""
        job = self.goal.job
        if self.goal.free.sizes is not None:
            return ()
        if self.goal.free.shardings is None:
            return (job.parallel,)
        held = (job.parallel.held(way, job.cluster) for way in self.goal.shardings)
        every = tuple(dict.fromkeys(each for each in held if each is not None))
        allowed = tuple(each for each in every if job.allows(each))
        if every:
            return allowed or every[:1]
        node, sharing = job.cluster.gpus_per_node // job.parallel.tensor, job.parallel.routing_ranks
        of_experts = f", and a divisor or a multiple of the {sharing} that share out experts"
        raise UserError(
            f"--sharding hybrid was given with {job.parallel.options}, and a group has the {node} "
            f"data-parallel ranks of a node of {job.cluster.name}, which must be at least 2, and "
            f"fewer than all {job.parallel.data} and a divisor of them"
            f"{of_experts if sharing > 1 else ''}: give --sharding full, or another --dp"
        )

    def _scheduled(
        self, result: PlanResult, request: PlanRequest, *, is_ordered: bool
    ) -> tuple[PlanResult, ScheduleChoice]:
        """Plan in the requested schedule, or in the fastest schedule of the trainer."""
        name, names = self.goal.free.schedule, self._schedules
        if request.data.levels != result.plan.pack_levels:
            # Packs of an earlier plan that had to be shared.
            return result if is_ordered else ordered_plan(request, result), ScheduleChoice()
        if not names:
            return result, ScheduleChoice()
        what = (
            "trying other schedules" if name is None else f"cutting the model for schedule {name}"
        )
        with self.listener.status(what):
            request, result, choice = in_best_schedule(
                request, result, names, is_forced=name is not None, is_ordered=is_ordered
            )
            return (result, choice) if is_ordered else in_order(request, result, choice)

    @property
    def _schedules(self) -> frozenset[str]:
        """Schedules to consider in addition to 1F1B."""
        name = self.goal.free.schedule
        names = self.goal.job.trainer.schedules if name is None else {name}
        return frozenset(names) - {ONE_FORWARD_ONE_BACKWARD.name}

    def _request(self, job: JobSpec, data: PlanData) -> PlanRequest:
        return PlanRequest(job=job, data=data, split=self.goal.free.split)

    def _check_curriculum(self, request: StrategyRequest) -> None:
        """Raise if the curriculum is longer than an epoch."""
        wanted, steps = request.settings.curriculum_steps, len(request.lengths)
        steps = round(steps / request.samples_per_step)
        if wanted > steps:
            raise UserError(
                f"a curriculum of {wanted:,} steps was asked for, and an epoch has about "
                f"{steps:,}; give fewer --curriculum-steps"
            )

    def _check_levels(self, levels: tuple[Level, ...]) -> None:
        """Raise if the curriculum has no shorter packs to start with."""
        data = self.goal.data
        if isinstance(data, Samples) and data.curriculum_steps and len(levels) < 2:
            raise UserError(
                f"--curriculum-steps {data.curriculum_steps} was given, and packs are of one "
                "level, which none is shorter than: leave it out, or give --packing-levels 2"
            )

    def _data_of(self, request: StrategyRequest, job: JobSpec, caps: Caps) -> PlanData:
        """All data for a job, with packs of one level at these caps."""
        data = self.goal.data
        if isinstance(data, Samples):
            return self._packed(data, caps, job.parallel.data * (data.micro_batches or 1))
        if isinstance(data, ShapesAlone):
            return _shapes(job, data.caps, self._micro_batches(data, job.parallel.data))
        assert request.given is not None
        given = self._earlier(job) if isinstance(data, Earlier) else request.given
        return given.for_ranks(request.job, job)

    def _earlier(self, job: JobSpec) -> StreamData | SampleData:
        """Steps of an earlier plan, with packs shared anew for the job's ranks if they were."""
        data = self.goal.data
        assert isinstance(data, Earlier)
        stream = StreamData.of_plan(data.plan, data.data)
        if stream is not None:
            return stream
        earlier = SampleData.of_plan(data.plan, data.data)
        # Unshared packs stay unshared while they fit.
        plain = are_plain(earlier.levels)
        return earlier if plain else level_search.shared_anew(job, earlier)

    @staticmethod
    def _micro_batches(data: ShapesAlone, ranks: int) -> int:
        if data.packs_per_step:
            return max(data.packs_per_step // ranks, 1)
        return data.micro_batches or DEFAULT_MICRO_BATCHES

    def _packed(self, data: Samples, caps: Caps, packs_per_step: int) -> SampleData:
        return SampleData(
            lengths=data.lengths,
            settings=self._settings(data.settings),
            levels=(Level(caps=caps),),
            packs_per_step=packs_per_step,
            rules=self.rules,
        )

    def _settings(self, settings: PackSettings) -> PackSettings:
        """Pack settings; greedy filling for HBP."""
        is_hbp = self.goal.free.levels.is_hbp
        return replace(settings, fill=FillRule.GREEDY) if is_hbp else settings

    def _caps_of_stream(self, job: JobSpec, data: Stream) -> Caps:
        """Caps with minimal predicted time per sample, as `omnibal caps` finds them."""
        if data.caps is not None:
            return data.caps
        request = cap_search.CapSearchRequest(
            job=job,
            lengths=data.lengths,
            samples_per_step=data.window,
            samples=SEARCH_SAMPLES,
            rules=self.rules,
            rule=cap_search.CapRule.TIME,
        )
        total = cap_search.max_candidates(request)
        with self.listener.progress("trying caps", total) as advance:
            found = cap_search.search_caps(request, advance, usable_cores())
        self.listener.note(f"found {' '.join(found.best.options)}")
        for note in cap_search.notes(request, found):
            self.listener.note(note)
        return found.best

    def _samples_of_packs(self, job: JobSpec, data: Samples, micro_batches: int) -> int:
        """Mean samples of a step of `micro_batches` full packs on every rank."""
        ranks = job.parallel.data
        rule, names = self.goal.free.levels, limited_features(job.model)
        whole = self._packed(
            data, data.caps or top_caps(data.lengths, names), ranks * micro_batches
        )
        if rule.is_forced or (rule.count is None and LevelEstimates.most_levels(whole) > 1):
            tokens = LevelEstimates.of(job, whole).tokens_per_step
            return max(round(tokens * ranks / float(data.lengths.tokens.mean())), 1)
        if data.caps is None:
            return cap_search.usual_samples_per_step(ranks, micro_batches)
        some = whole.sampled(SEARCH_SAMPLES).lengths
        packs = pack_samples(some, data.caps, PackingMethod.ISF, data.seed)
        return max(round(ranks * micro_batches * len(some) / len(packs)), 1)

    def _with_step(self, request: StrategyRequest) -> tuple[StrategyRequest, str]:
        """Choose the samples per step unless they or packs are given. Also return their origin."""
        data, gpus, samples = self.goal.data, request.sizes.gpus, len(request.lengths)
        if not isinstance(data, Samples) or data.micro_batches is not None:
            return request, ""
        if data.samples_per_step is None:
            fewest = min(sizing.parallel.data for sizing in possible_sizings(request))
            default = default_samples_per_step(data.lengths, data.caps, gpus, fewest)
            request = replace(request, samples_per_step=default)
        if not request.layouts and samples < request.samples_per_step:
            note = f"the data has {samples:,} sample(s), less than the {request.samples_per_step:,}"
            note += " of a step, so that an epoch is one step"
            if samples < gpus:
                note += f"; {gpus:,} GPUs cannot all be data-parallel: add data or use fewer GPUs"
            self.listener.note(note)
            return request, "all that there are"
        if data.samples_per_step is not None:
            return request, "as given"
        if not request.layouts:
            with self.listener.status("choosing the samples per step"):
                request = with_enough_samples(request, usable_cores())
        return request, default_source(request.samples_per_step, gpus)

    def _found_strategies(self, request: StrategyRequest) -> StrategySearch:
        rule, has_levels = self.goal.free.levels, self._may_have_levels(request)
        total = progress_total(request) + (levels_total(request) if has_levels else 0)
        with self.listener.progress("trying strategies", total) as advance:
            return search_with_levels(
                request, rule if has_levels else LevelRule(count=1), advance, usable_cores()
            )

    def _may_have_levels(self, request: StrategyRequest) -> bool:
        """Whether packs that ranks share may be faster, and the trainer runs them."""
        return self.goal.job.trainer.name is None and need_levels(request, self.goal.free.levels)

    def strategy_request(self) -> StrategyRequest:
        """Return the strategy request of the goal, with one layout if sizes are given."""
        goal, data, job = self.goal, self.goal.data, self.goal.job
        sizes = goal.free.sizes or FreeSizes(gpus=job.parallel.world_size)
        given: StreamData | SampleData | None = None
        settings = self._settings(data.settings if isinstance(data, Samples) else PackSettings())
        caps: Caps | None
        # Only the joint search shares memory between stages and data-parallel encoders.
        is_ours = job.trainer.name is None and goal.free.split.is_joint
        has_choice = bool(job.model.encoders) and is_ours
        if isinstance(data, Stream):
            caps = self._caps_of_stream(job, data)
            given, samples_per_step = _streamed(data, caps), data.window
            lengths = data.lengths
        elif isinstance(data, Earlier):
            given = self._earlier(job)
            caps, lengths = given.caps, given.lengths
            samples_per_step = _samples_of_step(given)
        elif isinstance(data, ShapesAlone):
            packs = data.packs_per_step or max(sizes.gpus, DEFAULT_MICRO_BATCHES)
            if goal.free.sizes is None:
                ranks = job.parallel.data
                packs = ranks * self._micro_batches(data, ranks)
            single = job.sized(Parallel(pipeline=1, tensor=job.parallel.tensor))
            _, lengths = _shapes(single, data.caps, packs).schedule(single)
            caps, samples_per_step = data.caps, packs
        else:
            lengths, caps = data.lengths, data.caps
            samples_per_step = data.samples_per_step or recipe_samples(sizes.gpus)
            if data.micro_batches is not None:
                samples_per_step = self._samples_of_packs(job, data, data.micro_batches)
        return StrategyRequest(
            job=job,
            sizes=sizes,
            layouts=self._layouts(),
            placements=goal.free.placements if has_choice else goal.free.placements[:1],
            shardings=goal.shardings,
            lengths=lengths,
            settings=settings,
            samples_per_step=samples_per_step,
            samples=SEARCH_SAMPLES,
            rules=self.rules,
            split=goal.free.split,
            caps=caps,
            given=given,
            schedule=goal.free.schedule or ONE_FORWARD_ONE_BACKWARD.name,
        )

    def _plan_of_strategies(
        self, request: StrategyRequest, found: StrategySearch
    ) -> tuple[PlanResult, StrategySearch, ScheduleChoice, dict[EncoderPlacement, Prediction]]:
        """Return the fastest plan on all data of near-best strategies in their best schedules.

        Also returns the fastest 1F1B plan's prediction with every placement of encoders.

        Strategies were compared on sampled data. All data may need slightly more memory.
        """
        left, first_error, first = found, None, None
        while True:
            finalists = _finalists(request, left, other_schedules=bool(self._schedules))
            requests = [self._request_of(request, strategy) for strategy in finalists]
            first = first or requests[0]
            # Micro-batches of a single finalist are ordered after its schedule is chosen.
            is_ordered = len(finalists) > 1 or not self._schedules
            results = _planned_each(requests, is_ordered)
            fitting = [
                (strategy, planned, result)
                for strategy, planned, result in zip(finalists, requests, results, strict=True)
                if isinstance(result, PlanResult)
            ]
            if fitting:
                predicted = dict[EncoderPlacement, Prediction]()
                for strategy, _, result in fitting:
                    own = result.plan.predicted
                    fastest = min(predicted.get(strategy.placement, own), own, key=relative_ms)
                    predicted[strategy.placement] = fastest
                if not self._schedules:  # no other schedule to try
                    fitting = [min(fitting, key=lambda each: _final_ms(each[2]))]
                scheduled = self._scheduled_each(fitting, is_ordered)
                best, result, schedule = min(scheduled, key=lambda each: _final_ms(each[1]))
                return result, left.led_by(best), schedule, predicted
            first_error = first_error or results[0]
            for _ in finalists:
                if len(left.ranking) == 1:
                    assert isinstance(first_error, DoesNotFit)
                    raise _RequestDoesNotFit(first, first_error) from first_error
                old, left = left.best, left.without_best("does not fit all data")
                self.listener.note(
                    f"{old.sizing.options} fits the samples it was tried on, and not all: taking "
                    f"{left.best.sizing.options}"
                )

    def _scheduled_each(
        self, fitting: list[_Finalist], is_ordered: bool
    ) -> list[tuple[Strategy, PlanResult, ScheduleChoice]]:
        """Plans in their best schedules, without plans that cannot run in it."""
        scheduled = list[tuple[Strategy, PlanResult, ScheduleChoice]]()
        refused = list[UserError]()
        for strategy, planned, result in fitting:
            try:
                result, planned = self._in_use(result, planned, is_ordered)
                chosen = self._scheduled(result, planned, is_ordered=is_ordered)
                scheduled.append((strategy, *chosen))
            except UserError as error:
                refused.append(error)
        if not scheduled:
            raise refused[0]
        return scheduled

    def _request_of(self, request: StrategyRequest, best: Strategy) -> PlanRequest:
        """Request of a strategy on all data."""
        data = self.goal.data
        job = replace(self.goal.job, parallel=best.parallel, placement=best.placement)
        planned = self._data_of(request, job, best.caps)
        if isinstance(planned, SampleData) and isinstance(data, Samples):
            self._check_levels(best.levels)
            if data.micro_batches is None:
                settings = replace(planned.settings, samples_per_step=request.samples_per_step)
                planned = replace(planned, settings=settings)
            if data.micro_batches is None or not are_plain(best.levels):
                packs_per_step = best.micro_batches * best.parallel.data
                planned = replace(planned, levels=best.levels, packs_per_step=packs_per_step)
        elif isinstance(planned, MockData) and self.goal.free.sizes is not None:
            planned = _shapes(job, planned.caps, best.micro_batches)
        return self._request(job, planned)

    # Plans, and advice if they do not fit.

    def _make_plan(self, request: PlanRequest, is_ordered: bool = True) -> PlanResult:
        """Make the plan, with an earlier plan's packs shared by ranks if they do not fit one."""
        try:
            return make_ordered_plan(request) if is_ordered else make_plan(request)
        except DoesNotFit as error:
            shared = _shared(request)
            if shared is None:
                raise _RequestDoesNotFit(request, error) from error
        context = shared.data.levels[0].context
        self.listener.note(
            f"packs of the earlier plan do not fit one rank: {context} ranks share each"
        )
        return self._make_plan(shared, is_ordered)

    def _in_use(
        self, result: PlanResult, request: PlanRequest, is_ordered: bool
    ) -> tuple[PlanResult, PlanRequest]:
        """Replan without levels that got no packs.

        Levels were chosen on other packs. The steps of an earlier plan keep their levels.
        """
        while True:
            data = request.data
            if result.data is None or not isinstance(data, SampleData) or data.steps is not None:
                return result, request
            used = levels_in_use(data.levels, result.data[0].level, data.least_caps())
            if used == data.levels:
                return result, request
            for level in data.levels:
                if level not in used:
                    self.listener.note(
                        f"no pack is of the level of {level.caps['tokens']:,} tokens: it is left "
                        "out"
                    )
            curriculum_steps = data.settings.curriculum_steps
            if curriculum_steps and len(used) == 1:
                raise UserError(
                    f"--curriculum-steps {curriculum_steps} was given, and all packs are of "
                    "one level: leave it out, or give other --packing-levels"
                )
            request = replace(request, data=replace(data, levels=used))
            result = self._make_plan(request, is_ordered)

    def with_advice(self, error: DoesNotFit) -> UserError:
        """Append changes that would fit to an error."""
        with self.listener.status("looking for what would fit"):
            if isinstance(error, _RequestDoesNotFit):
                advice = find_changes(error.request)
            else:
                advice = find_changes_of_goal(self.goal, _request_of_sizes)
            return UserError(advice.message(error))


def _request_of_sizes(goal: Goal) -> StrategyRequest:
    return _Search(goal=goal, listener=Silence()).strategy_request()


def _neither(refused: Mapping[EncoderPlacement, UserError]) -> UserError:
    """Error of all placements, of the first one's request if that does not fit memory."""
    first, *others = refused.values()
    if not others:
        return first
    causes = {
        placement: UserError(error.need) if isinstance(error, DoesNotFit) else error
        for placement, error in refused.items()
    }
    both = neither(causes)
    if not isinstance(first, _RequestDoesNotFit):
        return both
    return _RequestDoesNotFit(first.request, DoesNotFit(str(both), first.advice))


def _finalists(
    request: StrategyRequest, found: StrategySearch, *, other_schedules: bool
) -> list[Strategy]:
    """Return near-best strategies, and pipelines that another schedule may make the best.

    Of given layouts, also the best with every placement of encoders.
    """
    best_ms = found.best.ms_per_sample
    near = [each for each in found.ranking if each.ms_per_sample <= _ABOUT_AS_FAST * best_ms]
    near = near[:_FINALISTS]
    if request.layouts:
        firsts = {each.placement: each for each in reversed(found.ranking)}
        near += [each for each in firsts.values() if each not in near]
    pipelines = [
        each
        for each in found.ranking
        if other_schedules
        and each not in near
        and each.parallel.pipeline > 1
        and each.ms_per_sample <= _SCHEDULE_GAINS * best_ms
    ]
    return near + pipelines[:_PIPELINES]


def _planned_each(requests: list[PlanRequest], is_ordered: bool) -> list[PlanResult | DoesNotFit]:
    tasks = [(number, request, is_ordered) for number, request in enumerate(requests)]
    found = dict(map_unordered(_planned_or_not, tasks, min(usable_cores(), len(tasks))))
    return [found[number] for number, *_ in tasks]


def _planned_or_not(task: tuple[int, PlanRequest, bool]) -> tuple[int, PlanResult | DoesNotFit]:
    number, request, is_ordered = task
    try:
        return number, make_ordered_plan(request) if is_ordered else make_plan(request)
    except DoesNotFit as error:
        return number, error


def _final_ms(result: PlanResult) -> float:
    """Time per sample, plus the required gain if the plan has several levels."""
    must_gain = 0.0 if are_plain(result.plan.pack_levels) else level_search.LEAST_GAIN
    return relative_ms(result.plan.predicted) * (1 + must_gain)


def _placement_of(
    request: StrategyRequest,
    found: StrategySearch,
    predicted: Mapping[EncoderPlacement, Prediction],
) -> PlacementChoice:
    """Placement of the fastest strategy, and the other: as planned, or both on sampled data."""
    best: dict[EncoderPlacement, Prediction | PredictedStep] = {}
    for strategy in found.ranking:
        step = PredictedStep.of(strategy, request.samples_per_step)
        best.setdefault(strategy.placement, step)
    return PlacementChoice(
        chosen=found.best.placement,
        predicted=predicted if predicted.keys() >= best.keys() else best,
        refused={
            placement: _why_not(request, found, placement)
            for placement in request.placements
            if placement not in best
        },
    )


def _why_not(request: StrategyRequest, found: StrategySearch, placement: EncoderPlacement) -> str:
    """Return why no strategy has a placement of encoders."""
    try:
        possible_sizings(replace(request, placements=(placement,)))
    except UserError as error:
        return str(error)
    if request.layouts:
        for out in found.ruled_out:
            if out.sizing.placement is placement:
                return out.why
    return "no parallel sizes were found with it that are as fast and fit"


def _shapes(job: JobSpec, caps: Caps, micro_batches: int) -> MockData:
    has_sizes = job.model.images is not None
    return MockData(
        caps=caps,
        micro_batches_per_step=micro_batches,
        image_tokens=IMAGE_TOKENS if has_sizes else None,
    )


def _streamed(data: Stream, caps: Caps) -> StreamData:
    return StreamData(
        lengths=data.lengths,
        caps=caps,
        window=data.window,
        is_dispatched=data.is_dispatched,
        epochs=data.epochs,
    )


def _samples_of_step(data: StreamData | SampleData) -> int:
    if isinstance(data, StreamData):
        return data.window
    assert data.steps is not None
    return max(round(len(data.steps.packs.samples) / data.steps.steps), 1)


def _shared(request: PlanRequest) -> PlanRequest | None:
    """Let ranks share an earlier plan's packs of one level. None if that cannot help."""
    data = request.data
    if not isinstance(data, SampleData) or data.steps is None:
        return None
    if not are_plain(data.levels):
        return None
    if request.job.has_data_parallel_encoders or not request.split.is_joint:
        return None
    try:
        shared = level_search.shared_anew(request.job, data)
    except DoesNotFit:
        return None
    return replace(request, data=shared) if shared.levels[0].context > 1 else None
