"""The planner: a job and its data in; stages, recomputed layers and a prediction out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from omnibal.base.errors import UserError
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import DataPlan, Plan, PlannedLevel, SettingsHashes
from omnibal.job.plan_data import PlanData, model_of_lengths
from omnibal.job.plan_portions import AllPortions
from omnibal.model.levels import Level, are_plain
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.units import feature_names_at
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.pipeline.baselines import JOINT, SplitRule, baseline_stages
from omnibal.pipeline.chunk_search import Effort, search_parts
from omnibal.pipeline.encoder_search import PlacementProblem, search_encoders
from omnibal.pipeline.loader_time import StageReading
from omnibal.pipeline.partition import SearchResult, search_stages
from omnibal.pipeline.predict import predict
from omnibal.pipeline.prediction import Prediction, StageMemory
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.slot_order import apply_slots, order_slots
from omnibal.pipeline.stage_memory import GIB, fits_cap, stage_memories
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.workload import Workload

DealtPacks = tuple[ScheduledPacks, Lengths]  # packs dealt to ranks, and all lengths


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanRequest:
    """A job, its data, and how it is split into stages."""

    job: JobSpec
    data: PlanData
    split: SplitRule = JOINT
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
    """Schedule; other than 1F1B only with the joint search."""

    def __post_init__(self) -> None:
        self.data.check(self.job)
        joint_alone = self._joint_alone()
        if joint_alone and not self.split.is_joint:
            what, otherwise = joint_alone
            raise UserError(
                f"--method {self.split.method} with --recompute {self.split.recompute} was given "
                f"for {what}, which only the joint search plans: leave both options out{otherwise}"
            )
        if not (are_plain(self.data.levels) or self.job.trainer.stages.is_free):
            raise UserError(
                "packs of several levels, each of which recomputes layers of its own, cannot be "
                "told to a trainer that takes limited stages: give --packing-levels 1, or leave "
                "--for out"
            )

    def _joint_alone(self) -> tuple[str, str] | None:
        """Return a feature that only the joint search plans and the option to change, or None."""
        if self.job.has_data_parallel_encoders:
            return "data-parallel encoders", ", or give --encoder pipeline"
        if not self.job.trainer.stages.is_free:
            return f"the stages of {self.job.trainer.title}", ", or leave --for out"
        if not are_plain(self.data.levels):
            # The packs of an earlier plan have its levels.
            otherwise = ", or give --packing-levels 1" if self.data.steps is None else ""
            return "packs of levels", otherwise
        return None

    def with_sizes(self, parallel: Parallel) -> Self:
        """Change the parallel sizes, but not micro-batches per rank unless steps are given."""
        job = self.job.with_sizes(parallel)
        return replace(self, job=job, data=self.data.for_ranks(self.job, job))

    def with_caps(self, caps: Caps) -> Self:
        return replace(self, data=self.data.with_caps(caps))

    def pack(self) -> list[Packs]:
        """Pack every epoch, for `with_steps`, or return no packs if steps are given or mock."""
        return self.data.pack(self.job)

    def with_steps(self, packed: Sequence[Packs]) -> Self:
        return replace(self, data=self.data.with_steps(self.job, packed))

    def workload(self) -> Workload:
        """Schedule the micro-batches for the stage search."""
        return self.job.workload(*self.data.schedule(self.job), self.data.levels)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanResult:
    """A plan with its packs and search result."""

    plan: Plan
    data: tuple[ScheduledPacks, Lengths] | None
    dealt: DealtPacks | None = None
    """Packs as dealt, before ordering within ranks, or None if unknown."""
    search: SearchResult | None
    """Result of the joint search with its proven bound, or None for another method."""
    cost_source: CostSource = ANALYTIC
    portions: AllPortions | None = None  # all portions, if plan and packs cover only the first
    available: tuple[int, ...] = ()  # samples per source, if the lengths are a mixture

    @property
    def micro_batches(self) -> int:
        """Max micro-batches of a rank in a step."""
        if self.data is not None:
            return int(self.data[0].slot.max()) + 1
        assert self.plan.shapes is not None  # as a plan is of either
        return self.plan.shapes.micro_batches_per_step


def make_plan(
    request: PlanRequest, effort: float = 1.0, dealt: DealtPacks | None = None
) -> PlanResult:
    """Plan a job on its data: packs, stages and prediction. Deterministic.

    `effort` is of the joint search, as in `search_stages`, `dealt` packs for the job's sizes.
    """
    job = request.job
    packs, lengths = dealt or request.data.schedule(job)
    levels = request.data.levels
    workload = job.workload(packs, lengths, levels)
    search: SearchResult | None
    is_1f1b = request.schedule == ONE_FORWARD_ONE_BACKWARD
    # Data-parallel encoders that are chosen stay so where the pipeline has another schedule.
    if job.has_data_parallel_encoders and (is_1f1b or job.beside is None):
        encoding = search_encoders(placement_problem(job, workload, levels), effort)
        job = replace(job, beside=encoding.beside)
        stages_at, search = encoding.search.stages_at, encoding.search
        workload = job.workload(packs, lengths, levels)
    elif is_1f1b:
        stages_at, search = _stages(request, workload, effort)
    if not is_1f1b:
        search = search_chunks(replace(request, job=job), workload, effort)
        stages_at = search.stages_at
    described = request.data.describe(packs, job)
    data = described if isinstance(described, DataPlan) else None
    model = model_of_lengths(job.model, request.data.lengths)
    plan = job.plan(
        model=model,
        schedule=request.schedule,
        **_stage_keys(levels, stages_at),
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


def search_chunks(request: PlanRequest, workload: Workload, effort: float) -> SearchResult:
    """Search a request's parts, with data-parallel encoders chosen; `DoesNotFit` if none fits."""
    job = request.job
    return search_parts(
        job.cost_of_all(request.data.levels),
        job.pipeline_model,
        workload,
        job.parallel.pipeline,
        job.memory_cap_gib * GIB,
        request.schedule,
        rules=job.trainer.stages,
        effort=Effort(share=effort),
    )


def make_ordered_plan(request: PlanRequest) -> PlanResult:
    """Run `make_plan`, then `order_plan`."""
    return order_plan(request, make_plan(request))


def order_plan(request: PlanRequest, result: PlanResult) -> PlanResult:
    """Reorder ranks' micro-batches if joint and for this trainer (see `pipeline.slot_order`)."""
    is_searched = request.split.is_joint and request.job.trainer.name is None
    if result.data is None or not is_searched:
        return result
    packs, lengths = result.data
    plan = result.plan
    job = request.job if plan.beside is None else replace(request.job, beside=plan.beside)
    packs = order_micro_batches(plan, job, packs, lengths)
    prediction = predict_plan(plan, job, packs, job.workload(packs, lengths, plan.pack_levels))
    described = {"data": request.data.describe(packs, job), "prediction": prediction}
    return replace(result, plan=plan.model_copy(update=described), data=(packs, lengths))


def order_micro_batches(
    plan: Plan, job: JobSpec, packs: ScheduledPacks, lengths: Lengths, *, effort: float = 1.0
) -> ScheduledPacks:
    """Reorder every rank's micro-batches for the planned stages, unless ranks run in lockstep."""
    workload = job.workload(packs, lengths, plan.pack_levels)
    if workload.runs_together:
        return packs
    slot = order_slots(
        job.cost_of_all(plan.pack_levels),
        plan.stages_at_levels,
        workload,
        job.memory_cap_gib * GIB,
        plan.schedule,
        effort=effort,
    )
    return apply_slots(packs, slot)


def _stage_keys(levels: Sequence[Level], stages_at: Sequence[Sequence[Stage]]) -> dict[str, object]:
    """Return the plan's keys for stages and recomputation."""
    if are_plain(levels):
        return {"stages": tuple(stages_at[0]), "levels": ()}
    planned = (
        PlannedLevel(**dict(level), recompute=tuple(stage.recompute for stage in stages))
        for level, stages in zip(levels, stages_at, strict=True)
    )
    stages = (stage.model_copy(update={"recompute": ()}) for stage in stages_at[0])
    return {"stages": tuple(stages), "levels": tuple(planned)}


def predict_plan(plan: Plan, job: JobSpec, packs: ScheduledPacks, workload: Workload) -> Prediction:
    """Predict a job's plan on its packs, given as `workload` too."""
    cost, stages_at = job.cost_of_all(plan.pack_levels), plan.stages_at_levels
    prediction = predict(
        cost,
        plan.pipeline_model,
        plan.parallel,
        stages_at,
        packs,
        workload,
        _reading(plan, job),
        plan.schedule,
    )
    if plan.data is not None:
        return prediction
    # One step of made-up samples says nothing about a dataset.
    return prediction.model_copy(update={"samples_per_second_per_gpu": None, "gpu_days": None})


def predict_memories(plan: Plan, job: JobSpec, workload: Workload) -> list[StageMemory]:
    """Return the peak of every stage's devices."""
    cost = job.cost_of_all(plan.pack_levels)
    return stage_memories(cost, plan.stages_at_levels, workload, plan.schedule)


def check_memory(
    plan: Plan, job: JobSpec, packs: ScheduledPacks, lengths: Lengths, what: str
) -> None:
    """Raise if packs exceed the stages' memory."""
    memories = predict_memories(plan, job, job.workload(packs, lengths, plan.pack_levels))
    peak, cap_gib = max(memory.peak_gib for memory in memories), job.memory_cap_gib
    if not fits_cap(peak, cap_gib):
        raise UserError(
            f"{what} needs {peak:.2f} GiB on the stages that the first was planned on, and a "
            f"device may fill {cap_gib:.2f} GiB: give --memory-gib a little less, so that there "
            "is room"
        )


def extend_to_portions(result: PlanResult, portions: AllPortions, runs: float) -> PlanResult:
    """Extend the first portion's result to all portions, `runs` times its length."""
    prediction = scale_prediction(result.plan.known_prediction, runs)
    plan = result.plan.model_copy(update={"prediction": prediction})
    return replace(result, plan=plan, portions=portions)


def scale_prediction(prediction: Prediction, runs: float) -> Prediction:
    """Scale the first portion's prediction by `runs`."""
    if prediction.gpu_days is None:
        return prediction
    return prediction.model_copy(update={"gpu_days": prediction.gpu_days * runs})


def _reading(plan: Plan, job: JobSpec) -> StageReading | None:
    """Return the ranks' reading, if the costs have its time."""
    profile = job.cost_source.profile
    if profile is None or profile.reading is None:
        return None
    return StageReading.build(
        profile.reading,
        plan.model,
        plan.merge_chunks(plan.stages),
        feature_names_at(job.cost.features, plan.pack_levels),
        has_data_parallel_encoders=plan.beside is not None,
        ranks=min(plan.parallel.world_size, plan.cluster.gpus_per_node),
    )


def placement_problem(
    job: JobSpec, workload: Workload, levels: Sequence[Level]
) -> PlacementProblem:
    """Return the placement search for data-parallel encoders."""
    return PlacementProblem(
        cost=job.cost_of_all(levels),
        features=feature_names_at(job.cost.features, levels),
        model=job.pipeline_model,
        encoders=job.encoders_costs,
        workload=workload,
        memory_cap_bytes=job.memory_cap_gib * GIB,
    )


def _stages(
    request: PlanRequest, workload: Workload, effort: float
) -> tuple[tuple[tuple[Stage, ...], ...], SearchResult | None]:
    job = request.job
    cap_bytes = job.memory_cap_gib * GIB
    problem = job.cost_of_all(request.data.levels), job.model, workload, job.parallel.pipeline
    if request.split.is_joint:
        result = search_stages(*problem, cap_bytes, rules=job.trainer.stages, effort=effort)
        return result.stages_at, result
    method, recompute = request.split.method, request.split.recompute
    return (baseline_stages(method, recompute, *problem, cap_bytes),), None
