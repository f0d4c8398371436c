"""The planner: from a job and its data to stages, recomputed layers and a prediction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import DataPlan, Plan, PlannedLevel, SettingsHashes
from omnibal.job.plan_data import PlanData, model_of_lengths
from omnibal.job.plan_portions import AllPortions, PacksAndLengths
from omnibal.model.levels import Level, are_plain
from omnibal.model.limits import Caps, check_limits
from omnibal.model.parallel import Parallel
from omnibal.model.units import feature_names_at
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.pipeline.baselines import JOINT, SplitRule, baseline_stages
from omnibal.pipeline.chunk_search import search_parts
from omnibal.pipeline.encoder_search import (
    PlacementProblem,
    min_peak_with_encoders,
    search_encoders,
)
from omnibal.pipeline.loader_time import StageReading
from omnibal.pipeline.partition import SearchResult, search_stages
from omnibal.pipeline.predict import predict
from omnibal.pipeline.prediction import Prediction, StageMemory
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.slot_order import apply_slots, order_slots
from omnibal.pipeline.stage_memory import fits_cap, stage_memories
from omnibal.pipeline.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanRequest:
    """A job, its data, and the method that splits it into stages. Validated on construction."""

    job: JobSpec
    data: PlanData
    split: SplitRule = JOINT
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD  # another needs the joint split

    def __post_init__(self) -> None:
        model = self.job.model
        check_limits(self.data.caps.names, model.item_features, model.name)
        self.data.check(self.job)
        trainer, has_levels = self.job.trainer, not are_plain(self.data.levels)
        is_limited = not trainer.stages.is_free
        if has_levels and is_limited:
            raise UserError(
                f"{trainer.title} cannot recompute different layers per level: give "
                "--packing-levels 1, or leave --for out"
            )
        needs_joint = self.job.has_data_parallel_encoders or has_levels or is_limited
        if needs_joint and not self.split.is_joint:
            raise UserError(
                f"--method {self.split.method} with --recompute {self.split.recompute} was given, "
                "and only the joint search plans data-parallel encoders, packs of levels and other "
                "trainers' stages: leave both options out"
            )

    def with_sizes(self, parallel: Parallel) -> Self:
        """Return the request at other sizes. Micro-batches per rank, or given steps, are kept."""
        job = self.job.with_sizes(parallel)
        return replace(self, job=job, data=self.data.for_ranks(self.job, job))

    def with_caps(self, caps: Caps) -> Self:
        return replace(self, data=self.data.with_caps(caps))

    def pack(self) -> list[Packs]:
        """Return every epoch's packs for `with_steps`, or [] with given steps, windows or mocks."""
        return self.data.pack(self.job)

    def with_steps(self, packs: Sequence[Packs]) -> Self:
        return replace(self, data=self.data.with_steps(self.job, packs))

    def workload(self) -> Workload:
        """Return the scheduled micro-batches, for the stage search."""
        return self.job.workload(*self.data.schedule(self.job), self.data.levels)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanResult:
    """A plan with its packs and search result."""

    plan: Plan
    data: PacksAndLengths | None  # None for a plan of shapes only
    dealt: PacksAndLengths | None = None  # before `order_plan`, or None if unknown
    search: SearchResult | None  # stages and proven bound, or None for a baseline
    cost_source: CostSource = ANALYTIC
    portions: AllPortions | None = None  # if `plan` and `data` cover only the first
    available: tuple[int, ...] = ()  # samples per source, if the lengths are a mixture

    @property
    def job(self) -> JobSpec:
        """Job of the plan, with its costs."""
        return JobSpec.of_plan(self.plan, self.cost_source)

    @property
    def micro_batches(self) -> int:
        """Max micro-batches of a rank in a step."""
        if self.data is not None:
            return int(self.data[0].slot.max()) + 1
        assert self.plan.shapes is not None, "a plan has data or shapes"
        return self.plan.shapes.micro_batches_per_step


def make_plan(
    request: PlanRequest, effort: float = 1.0, dealt: PacksAndLengths | None = None
) -> PlanResult:
    """Return a job's plan on its data: packs, stages and prediction. Deterministic.

    Args:
        effort: share of the usual search work, as in `search_stages`.
        dealt: packs already dealt for the job's sizes, to use instead of scheduling the data.
    """
    job = request.job
    packs, lengths = dealt or request.data.schedule(job)
    levels = request.data.levels
    workload = job.workload(packs, lengths, levels)
    search: SearchResult | None = None
    is_1f1b = request.schedule == ONE_FORWARD_ONE_BACKWARD
    # The encoder search simulates 1F1B. Another schedule keeps settings chosen before.
    if job.has_data_parallel_encoders and (is_1f1b or job.data_parallel_encoders is None):
        encoders, search = search_encoders(placement_problem(job, workload, levels), effort)
        job = replace(job, data_parallel_encoders=encoders)
        stages_at, workload = search.stages_at, job.workload(packs, lengths, levels)
    elif is_1f1b:
        task = job.split_task(workload, levels)
        if request.split.is_joint:
            search = search_stages(task, effort=effort)
            stages_at = search.stages_at
        else:
            stages_at = (baseline_stages(request.split, task),)
    if not is_1f1b:
        job, workload, search = search_in_schedule(job, workload, levels, request.schedule, effort)
        stages_at = search.stages_at
    described = request.data.describe(packs, job)
    data = described if isinstance(described, DataPlan) else None
    model = model_of_lengths(job.model, request.data.lengths)
    stages, planned_levels = tuple(stages_at[0]), tuple[PlannedLevel, ...]()
    if not are_plain(levels):  # each level lists its recomputed layers
        planned_levels = tuple(
            PlannedLevel(**dict(level), recompute=tuple(stage.recompute for stage in of_level))
            for level, of_level in zip(levels, stages_at, strict=True)
        )
        stages = tuple(stage.model_copy(update={"recompute": ()}) for stage in stages)
    plan = job.plan(
        model=model,
        schedule=request.schedule,
        stages=stages,
        levels=planned_levels,
        data=data,
        shapes=described if data is None else None,
        settings_sha256=SettingsHashes.compute(model, data),
    )
    prediction = predict_plan(plan, job, packs, workload)
    return PlanResult(
        plan=plan.model_copy(update={"prediction": prediction}),
        data=None if data is None else (packs, lengths),
        dealt=(packs, lengths),
        search=search,
        cost_source=job.cost_source,
    )


def search_in_schedule(
    job: JobSpec,
    workload: Workload,
    levels: Sequence[Level],
    schedule: PipelineSchedule,
    effort: float,
) -> tuple[JobSpec, Workload, SearchResult]:
    """Return parts for a schedule other than 1F1B, with the job and its workload.

    If data-parallel encoders leave too little memory with the settings chosen in 1F1B, they get the
    settings with min memory.
    """
    try:
        return job, workload, search_parts(job.split_task(workload, levels, schedule), effort)
    except DoesNotFit:
        if not job.has_data_parallel_encoders:
            raise
    problem = placement_problem(job, workload, levels)
    _, encoders = min_peak_with_encoders(problem)
    job, workload = replace(job, data_parallel_encoders=encoders), problem.with_encoders(encoders)
    return job, workload, search_parts(job.split_task(workload, levels, schedule), effort)


def make_ordered_plan(request: PlanRequest) -> PlanResult:
    """Return the plan of `make_plan` after `order_plan`."""
    return order_plan(request, make_plan(request))


def order_plan(request: PlanRequest, result: PlanResult) -> PlanResult:
    """Reorder ranks' micro-batches and predict again, if joint, for this trainer, and not mock."""
    may_reorder = request.split.is_joint and request.job.trainer.name is None
    if result.data is None or not may_reorder:
        return result
    packs, lengths = result.data
    plan, job, encoders = result.plan, request.job, result.plan.data_parallel_encoders
    job = job if encoders is None else replace(job, data_parallel_encoders=encoders)
    packs = order_micro_batches(plan, job, packs, lengths)
    prediction = predict_plan(plan, job, packs, job.workload(packs, lengths, plan.pack_levels))
    described = {"data": request.data.describe(packs, job), "prediction": prediction}
    return replace(result, plan=plan.model_copy(update=described), data=(packs, lengths))


def order_micro_batches(
    plan: Plan, job: JobSpec, packs: ScheduledPacks, lengths: Lengths, *, effort: float = 1.0
) -> ScheduledPacks:
    """Return packs reordered within ranks, or as given if ranks share packs or run in lockstep."""
    workload = job.workload(packs, lengths, plan.pack_levels)
    if workload.runs_together:
        return packs
    task = job.split_task(workload, plan.pack_levels, plan.schedule)
    return apply_slots(packs, order_slots(task, plan.stages_at_levels, effort=effort))


def predict_plan(plan: Plan, job: JobSpec, packs: ScheduledPacks, workload: Workload) -> Prediction:
    """Return the prediction of a plan on `packs`, whose micro-batches are `workload`."""
    profile, reading = job.cost_source.profile, None
    if profile is not None and profile.reading is not None:
        reading = StageReading.build(
            profile.reading,
            plan.model,
            plan.merge_chunks(plan.stages),
            feature_names_at(job.cost.features, plan.pack_levels),
            has_data_parallel_encoders=plan.data_parallel_encoders is not None,
            ranks=min(plan.parallel.world_size, plan.cluster.gpus_per_node),
        )
    real_packs, cost = None if plan.data is None else packs, job.cost_of_all(plan.pack_levels)
    stages_at = plan.stages_at_levels
    return predict(cost, plan.parallel, stages_at, real_packs, workload, reading, plan.schedule)


def predict_memories(plan: Plan, job: JobSpec, workload: Workload) -> list[StageMemory]:
    """Return the peak memory of a device of each stage, [stages]."""
    cost = job.cost_of_all(plan.pack_levels)
    return stage_memories(cost, plan.stages_at_levels, workload, plan.schedule)


def check_memory(memories: Sequence[StageMemory], job: JobSpec) -> str:
    """Return a sentence of the fullest stage; raise UserError if it exceeds the memory cap."""
    peaks, cap_gib = [memory.peak_gib for memory in memories], job.memory_cap_gib
    peak = max(peaks)
    if not fits_cap(peak, cap_gib):
        raise UserError(
            f"stage {peaks.index(peak)} is predicted to need {peak:.2f} GiB, but may fill "
            f"{cap_gib:.2f} GiB of a {job.cluster.memory_gib:g} GiB {job.cluster.device}; "
            "recompute more layers, raise --pp or --tp, or lower the caps or --memory-gib"
        )
    return f"the fullest stage is predicted to need {peak:.2f} of {cap_gib:.2f} GiB"


def extend_to_portions(result: PlanResult, portions: AllPortions, runs: float) -> PlanResult:
    """Return the first portion's result with the GPU days of all, `runs` times as long."""
    prediction = scale_prediction(result.plan.known_prediction, runs)
    plan = result.plan.model_copy(update={"prediction": prediction})
    return replace(result, plan=plan, portions=portions)


def scale_prediction(prediction: Prediction, runs: float) -> Prediction:
    """Return a prediction with GPU days, if known, for `runs` times the samples."""
    if prediction.gpu_days is None:
        return prediction
    return prediction.model_copy(update={"gpu_days": prediction.gpu_days * runs})


def placement_problem(
    job: JobSpec, workload: Workload, levels: Sequence[Level]
) -> PlacementProblem:
    """Return the input of `search_encoders`."""
    return PlacementProblem(
        task=job.split_task(workload, levels),
        features=feature_names_at(job.cost.features, levels),
        encoders=job.encoders_costs,
    )
