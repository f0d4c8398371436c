"""Strategy request of a goal, and plan requests of the strategies found.

If parallel sizes are given, only shardings and encoder placements of one layout are searched.
"""

from dataclasses import dataclass, replace

from omnibal.base.errors import UserError
from omnibal.base.worker_pool import usable_cores
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import (
    MockData,
    PlanData,
    SampleData,
    StreamData,
    limited_features,
    smallest_caps,
)
from omnibal.job.planner import PlanRequest
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
from omnibal.model.targets import PackRules
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.pipeline.stage_memory import GIB
from omnibal.search.goal import Earlier, Goal, Listener, Samples, ShapesAlone, Stream
from omnibal.search.level_estimates import LevelEstimates, most_shared, top_caps
from omnibal.search.level_sets import need_levels, shared_anew
from omnibal.search.parallel_sizes import possible_sizings
from omnibal.search.step_size import (
    default_samples_per_step,
    default_source,
    recipe_samples,
    with_enough_samples,
)
from omnibal.search.strategy import FreeSizes, Sizing, Strategy, StrategyRequest

_USUAL_SAMPLES_PER_PACK = 4.5  # middle of the range in OmniBal's paper
_SMALL_COPY = 0.05  # max share of device memory at which a sizes search only replicates encoders


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GoalRequests:
    """Strategy request of a goal, its checks, and plan requests."""

    goal: Goal
    listener: Listener

    @property
    def rules(self) -> PackRules:
        return self.goal.job.trainer.packs

    def strategy_request(self) -> StrategyRequest:
        """Return the strategy request; if sizes are given, of one layout in its free shardings."""
        goal, data, job = self.goal, self.goal.data, self.goal.job
        sizes = goal.free.sizes or FreeSizes(gpus=job.parallel.world_size)
        given: StreamData | SampleData | None = None
        settings = self._settings(data.settings if isinstance(data, Samples) else PackSettings())
        caps: Caps | None
        # Only the joint search shares memory between stages and data-parallel encoders.
        is_ours = job.trainer.name is None and goal.free.split.is_joint
        has_choice = bool(job.model.encoders) and is_ours
        if isinstance(data, Stream):
            lengths, caps, samples_per_step = data.lengths, data.caps, data.window
            given = StreamData(
                lengths=lengths,
                caps=smallest_caps(lengths, limited_features(job.model)),
                window=data.window,
                is_dispatched=data.is_dispatched,
                epochs=data.epochs,
            )
        elif isinstance(data, Earlier):
            given = self._earlier(job)
            caps, lengths = given.caps, given.lengths
            if isinstance(given, StreamData):
                samples_per_step = given.window
            else:
                assert given.steps is not None
                samples_per_step = max(round(len(given.steps.packs.samples) / given.steps.steps), 1)
        elif isinstance(data, ShapesAlone):
            packs = data.packs_per_step or max(sizes.gpus, DEFAULT_MICRO_BATCHES)
            if goal.free.sizes is None:
                # per step, on all data-parallel ranks
                packs = job.parallel.data * _micro_batches_of_shapes(data, job.parallel.data)
            alone = {"pipeline": 1, "data": 1, "expert": 1, "sharded": 1}
            single = job.with_sizes(job.parallel.model_copy(update=alone))
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
            schedules=job.trainer.schedules
            if goal.free.schedule is None
            else frozenset({goal.free.schedule}),
        )

    def with_step(self, request: StrategyRequest) -> tuple[StrategyRequest, str]:
        """Return the request with samples per step, chosen unless given, and their origin or ""."""
        data, gpus, samples = self.goal.data, request.sizes.gpus, len(request.lengths)
        if not isinstance(data, Samples) or data.micro_batches is not None:
            return request, ""
        if data.samples_per_step is None:
            # The fewest data-parallel ranks have the most micro-batches.
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

    def _layouts(self) -> tuple[Parallel, ...]:
        """Return the given sizes in every allowed sharding, empty if free; raises UserError."""
        job = self.goal.job
        if self.goal.free.sizes is not None:
            return ()
        if self.goal.free.shardings is None:
            return (job.parallel,)
        held = (job.parallel.with_sharding(way, job.cluster) for way in self.goal.shardings)
        every = tuple(dict.fromkeys(parallel for parallel in held if parallel is not None))
        allowed = tuple(parallel for parallel in every if job.allows(parallel))
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

    def check_curriculum(self, request: StrategyRequest) -> None:
        """Raise UserError if the curriculum is longer than about an epoch."""
        wanted = request.settings.curriculum_steps
        steps = round(len(request.lengths) / request.samples_per_step)
        if wanted > steps:
            raise UserError(
                f"a curriculum of {wanted:,} steps was asked for, and an epoch has about "
                f"{steps:,}; give fewer --curriculum-steps"
            )

    def check_levels(self, levels: tuple[Level, ...]) -> None:
        """Raise UserError if a curriculum has no level of shorter packs to start with."""
        data = self.goal.data
        if isinstance(data, Samples) and data.curriculum_steps and len(levels) < 2:
            raise UserError(
                f"--curriculum-steps {data.curriculum_steps} was given, and packs are of one "
                "level, which none is shorter than: leave it out, or give --packing-levels 2"
            )

    def may_have_levels(self, request: StrategyRequest) -> bool:
        """Return whether to search levels: shared packs may be faster, and OmniBal trains them."""
        job, rule = self.goal.job, self.goal.free.levels
        if job.model.language.is_hybrid and job.trainer.name is None:
            if rule.is_forced:
                raise UserError(
                    "--packing-levels: gated delta layers exchange no states; leave it out, or 1"
                )
            return False
        return job.trainer.name is None and need_levels(request, rule)

    def plan_request(self, request: StrategyRequest, best: Strategy) -> PlanRequest:
        """Return the plan request of a strategy, on all data."""
        data = self.goal.data
        job = self.goal.job.with_sizes(best.parallel, best.placement)
        planned = self._data_of(request, job, best.caps)
        if isinstance(planned, SampleData) and isinstance(data, Samples):
            self.check_levels(best.levels)
            if data.micro_batches is None:
                settings = replace(planned.settings, samples_per_step=request.samples_per_step)
                planned = replace(planned, settings=settings)
            if data.micro_batches is None or not are_plain(best.levels):
                # micro-batches per rank as in the search
                packs_per_step = best.micro_batches * best.parallel.data
                planned = replace(planned, levels=best.levels, packs_per_step=packs_per_step)
        elif isinstance(planned, MockData) and self.goal.free.sizes is not None:
            planned = _shapes(job, planned.caps, best.micro_batches)
        return self._request(job, planned)

    def most_shared_request(self, request: StrategyRequest, sizing: Sizing) -> PlanRequest:
        """Return a sizing's plan request; if levels may help, every pack has the max context."""
        job = self.goal.job.with_sizes(sizing.parallel, sizing.placement)
        caps = request.caps or smallest_caps(request.lengths, request.limited_features)
        data = self._data_of(request, job, caps)
        if isinstance(data, SampleData) and self.may_have_levels(request):
            data = replace(data, levels=most_shared(job, data.caps))
            self.check_levels(data.levels)
        return self._request(job, data)

    def _data_of(self, request: StrategyRequest, job: JobSpec, caps: Caps) -> PlanData:
        """Return all data for a job, in packs of one level at `caps`, or an earlier plan's data."""
        data = self.goal.data
        if isinstance(data, Samples):
            return self._pack_data(job, data, caps)
        if isinstance(data, ShapesAlone):
            return _shapes(job, data.caps, _micro_batches_of_shapes(data, job.parallel.data))
        assert request.given is not None
        if isinstance(data, Stream):
            return request.given.with_caps(caps)
        return self._earlier(job).for_ranks(request.job, job)

    def _earlier(self, job: JobSpec) -> StreamData | SampleData:
        """Return an earlier plan's data; shared packs get context-parallel sizes for `job`."""
        data = self.goal.data
        assert isinstance(data, Earlier)
        stream = StreamData.of_plan(data.plan, data.data)
        if stream is not None:
            return stream
        earlier = SampleData.of_plan(data.plan, data.data)
        # A single unshared level is kept: it does not depend on the job's ranks.
        plain = are_plain(earlier.levels)
        return earlier if plain else shared_anew(job, earlier)

    def _pack_data(self, job: JobSpec, data: Samples, caps: Caps) -> SampleData:
        """Return all samples in packs of one level, in steps of `data.micro_batches` or 1."""
        return SampleData(
            lengths=data.lengths,
            settings=self._settings(data.settings),
            levels=(Level(caps=caps),),
            packs_per_step=job.parallel.data * (data.micro_batches or 1),
            rules=self.rules,
        )

    def _settings(self, settings: PackSettings) -> PackSettings:
        """Return the pack settings, with greedy filling for HBP."""
        is_hbp = self.goal.free.levels.is_hbp
        return replace(settings, fill=FillRule.GREEDY) if is_hbp else settings

    def _samples_of_packs(self, job: JobSpec, data: Samples, micro_batches: int) -> int:
        """Return the mean samples of a step of `micro_batches` full packs on every rank."""
        ranks = job.parallel.data
        rule, names = self.goal.free.levels, limited_features(job.model)
        whole = self._pack_data(job, data, data.caps or top_caps(data.lengths, names))
        if rule.is_forced or (rule.count is None and LevelEstimates.most_levels(whole) > 1):
            tokens = LevelEstimates.for_job(job, whole).tokens_per_step
            return max(round(tokens * ranks / float(data.lengths.tokens.mean())), 1)
        if data.caps is None:
            return round(_USUAL_SAMPLES_PER_PACK * micro_batches * ranks)
        some = whole.subsample(SEARCH_SAMPLES).lengths
        packs = pack_samples(some, data.caps, PackingMethod.ISF, data.seed)
        return max(round(ranks * micro_batches * len(some) / len(packs)), 1)

    def _request(self, job: JobSpec, data: PlanData) -> PlanRequest:
        return PlanRequest(job=job, data=data, split=self.goal.free.split)


def with_encoder_shardings(goal: Goal) -> Goal:
    """Return the goal with encoder shardings as part of its search, if shardings are free.

    If sizes are free too, encoders are only replicated or fully sharded. Small encoders are only
    replicated: sharding them frees little memory.
    """
    if goal.free.shardings is None:
        return goal
    ways, job = goal.shardings, goal.job
    if goal.free.sizes is not None and WeightSharding.REPLICATED in ways:
        whole = _whole_encoders_bytes(job)  # bytes of one replica
        small = whole <= _SMALL_COPY * memory_cap_gib(job.cluster) * GIB
        few = (WeightSharding.REPLICATED, *([] if small else [WeightSharding.FULL]))
        ways = tuple(way for way in few if way in ways)
    return replace(goal, job=replace(job, encoder_shardings=ways))


def _whole_encoders_bytes(job: JobSpec) -> float:
    """Return bytes of replicated encoders' weights and gradients, 0 if not data-parallel."""
    whole = (WeightSharding.REPLICATED,)
    try:
        held = replace(job, placement=EncoderPlacement.DATA_PARALLEL, encoder_shardings=whole)
    except UserError:
        return 0.0
    [cost] = held.encoders_costs.values()
    return cost.weights_bytes + cost.gradients_bytes


def _shapes(job: JobSpec, caps: Caps, micro_batches: int) -> MockData:
    has_sizes = job.model.images is not None
    return MockData(
        caps=caps,
        micro_batches_per_step=micro_batches,
        image_tokens=IMAGE_TOKENS if has_sizes else None,
    )


def _micro_batches_of_shapes(data: ShapesAlone, ranks: int) -> int:
    if data.packs_per_step:
        return max(data.packs_per_step // ranks, 1)
    return data.micro_batches or DEFAULT_MICRO_BATCHES
