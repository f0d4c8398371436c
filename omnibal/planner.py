"""The whole plan: lengths to packs and steps, costs to stages and recomputation, to a directory."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omnibal.config import ClusterConfig, ModelConfig, Part, Precision
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel, pack_features
from omnibal.cost.profile import Profile, fitted_cost, read_profile, write_profile
from omnibal.data.lengths import (
    Lengths,
    LengthsOrigin,
    check_positions,
    read_lengths,
    write_lengths,
)
from omnibal.data.packing import PackingMethod
from omnibal.data.packs import Packs, ScheduledPacks, read_packs, write_packs
from omnibal.data.steps import DataRequest, Steps, deal_steps, draw_steps, size_load, steps_of
from omnibal.errors import UserError
from omnibal.limits import Caps, check_packs_per_step, memory_cap_gib
from omnibal.parallel import Parallel, check_parallel
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule, baseline_stages
from omnibal.pipeline.partition import SearchResult, search_stages
from omnibal.pipeline.predict import predict
from omnibal.pipeline.prediction import Prediction
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_cost import GIB, model_ms
from omnibal.pipeline.workload import Workload
from omnibal.plan import (
    LENGTHS_FILE,
    PACKS_FILE,
    PLAN_FILE,
    PROFILE_FILE,
    DataPlan,
    PackedBy,
    Plan,
    Shapes,
    write_plan,
)

MAX_TRAINED_SAMPLES = 200_000_000
"""Of all epochs, where there are several: a plan lists them one by one, and holds them at once."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanRequest:
    """Everything that a plan is made from."""

    model: ModelConfig
    cluster: ClusterConfig
    parallel: Parallel
    precision: Precision
    caps: Caps
    lengths: Lengths | None
    """None for a plan of shapes only, whose micro-batches are all at the caps."""
    packing: PackingMethod
    packs_per_step: int
    """Of all data-parallel ranks together."""
    epochs: int
    seed: int
    profile: Profile | None
    """Measured costs; None to count operations and bytes instead."""
    frozen: tuple[Part, ...] = ()
    """Parts of the model that are not trained."""
    method: PartitionMethod = PartitionMethod.OMNIBAL
    recompute: RecomputeRule = RecomputeRule.CHEAPEST
    steps: Steps | None = None
    """Of an earlier plan of the same caps, packing, epochs and seed; None to draw them."""

    @property
    def micro_batches(self) -> int:
        """Packs of a data-parallel rank in a full step, at most."""
        return -(-self.packs_per_step // self.parallel.data)

    @property
    def data_request(self) -> DataRequest:
        """What packs and steps are drawn from."""
        return DataRequest(
            caps=self.caps,
            method=self.packing,
            seed=self.seed,
            epochs=self.epochs,
            packs_per_step=self.packs_per_step,
            alike=self.parallel.data,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanResult:
    """A plan, with the files that belong to it."""

    plan: Plan
    data: tuple[ScheduledPacks, Lengths] | None
    """None for a plan of shapes only."""
    profile: Profile | None
    """None where costs were counted."""
    search: SearchResult | None
    """What is proven of the stages; None where another method chose them."""


def make_plan(request: PlanRequest) -> PlanResult:
    """Packs, stages and prediction for a request; equal requests give equal plans.

    Raises:
        UserError: the parallel sizes do not fit the model, the lengths were scanned for another
            model, a sample exceeds the caps, the profile is of something else, or no partition
            fits into memory.
    """
    check_parallel(request.model, request.parallel, request.cluster)
    check_packs_per_step(request.parallel.data, request.micro_batches)
    if request.lengths is not None:
        _check_epochs(request.epochs, len(request.lengths))
    model = model_of_lengths(request.model, request.lengths)
    cost = _cost(request, model)
    shapes = Shapes(caps=request.caps, micro_batches_per_step=request.micro_batches)
    if request.lengths is None:
        packs, lengths = data_at_caps(shapes, request.parallel.data)
    else:
        lengths = request.lengths
        packs = _packs(request, lengths, cost, model)
    features = pack_features(packs.packs, lengths)
    workload = Workload.of(packs, features, request.parallel.data)
    stages, search = _stages(request, cost, model, workload)
    plan = Plan(
        model=model,
        precision=request.precision,
        parallel=request.parallel,
        frozen=request.frozen,
        stages=stages,
        cluster=request.cluster,
        data=None if request.lengths is None else _data_plan(request, lengths, packs),
        shapes=shapes if request.lengths is None else None,
    )
    prediction = prediction_of(plan, cost, packs, features)
    plan = plan.model_copy(update={"prediction": prediction})
    data = None if request.lengths is None else (packs, lengths)
    return PlanResult(plan=plan, data=data, profile=request.profile, search=search)


def _check_epochs(epochs: int, samples: int) -> None:
    if epochs > 1 and epochs * samples > MAX_TRAINED_SAMPLES:
        raise UserError(
            f"{epochs:,} epochs of {samples:,} samples are {epochs * samples:,} samples, and a "
            f"plan of several epochs may list at most {MAX_TRAINED_SAMPLES:,}: give fewer --epochs"
        )


def prediction_of(
    plan: Plan, cost: CostModel, packs: ScheduledPacks, features: np.ndarray
) -> Prediction:
    """What a plan's own prediction is, by its costs and packs, of `features` [packs, 5]."""
    prediction = predict(cost, plan.model, plan.parallel, plan.stages, packs, features)
    if plan.data is not None:
        return prediction
    # One step of made-up samples says nothing about a dataset.
    return prediction.model_copy(update={"samples_per_second_per_gpu": None, "gpu_days": None})


def _stages(
    request: PlanRequest, cost: CostModel, model: ModelConfig, workload: Workload
) -> tuple[tuple[Stage, ...], SearchResult | None]:
    pipeline, cap_bytes = request.parallel.pipeline, memory_cap_gib(request.cluster) * GIB
    if request.method is PartitionMethod.OMNIBAL and request.recompute is RecomputeRule.CHEAPEST:
        found = search_stages(cost, model, workload, pipeline, cap_bytes)
        return found.stages, found
    chosen = baseline_stages(
        request.method, request.recompute, cost, model, workload, pipeline, cap_bytes
    )
    return chosen, None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanFiles:
    """What a plan directory holds."""

    plan: Plan
    cost: CostModel
    """That the plan was made with."""
    data: tuple[ScheduledPacks, Lengths] | None
    """Made up at the caps for a plan of shapes only; None for a plan without either."""

    @property
    def steps(self) -> tuple[ScheduledPacks, Lengths]:
        """`data`, where there must be steps to go through.

        Raises:
            UserError: the plan has neither data nor shapes.
        """
        if self.data is None:
            raise UserError(
                "the plan has neither data nor shapes, so it has no steps; give a plan of "
                "`omnibal plan`"
            )
        return self.data


def read_plan_files(plan: Plan, directory: Path) -> PlanFiles:
    """The rest of a plan directory, whose `plan.json` was read; nothing of it is checked.

    Raises:
        UserError: a file is missing or broken, or is not the one that the plan was made with.
    """
    return PlanFiles(
        plan=plan, cost=cost_of_plan(plan, directory), data=data_of_plan(plan, directory)
    )


def cost_of_plan(plan: Plan, directory: Path) -> CostModel:
    """The costs that the plan was made with: of its directory's profile, else counted.

    Raises:
        UserError: the profile is broken, or is not of the plan's model, precision or tensor size.
    """
    path = directory / PROFILE_FILE
    profile = read_profile(path) if path.exists() else None
    job = plan.model, plan.cluster, plan.parallel, plan.precision
    return job_cost(profile, *job, plan.frozen)


def data_of_plan(plan: Plan, directory: Path) -> tuple[ScheduledPacks, Lengths] | None:
    """The plan's packs and lengths, made up at the caps for a plan of shapes; None without either.

    Raises:
        UserError: a file is missing or broken, or is not the one that the plan was made with.
    """
    if plan.data is None:
        return None if plan.shapes is None else data_at_caps(plan.shapes, plan.parallel.data)
    return _read_data(plan.data, directory)


def _read_data(data: DataPlan, directory: Path) -> tuple[ScheduledPacks, Lengths]:
    packs, lengths = read_packs(directory / PACKS_FILE), read_lengths([directory / LENGTHS_FILE])
    for name, given, planned in (
        (LENGTHS_FILE, lengths.sha256, data.lengths_sha256),
        (PACKS_FILE, packs.sha256, data.packs_sha256),
    ):
        if given != planned:
            raise UserError(
                f"{name} has the content hash {given[:12]}, but plan.json says {planned[:12]}; "
                "the files of a plan belong together: restore the file, or make the plan anew "
                "with `omnibal plan`"
            )
    return packs, lengths


def data_settings(plan: Plan, data: tuple[ScheduledPacks, Lengths] | None) -> dict[str, Any]:
    """The fields of a `PlanRequest` that give an earlier plan's data again, step by step.

    Raises:
        UserError: the plan has no data, or other packs than `omnibal plan` makes.
    """
    if plan.data is None or data is None:
        raise UserError(
            "what --steps-of names is a plan of shapes only, so it has no steps to take over; give "
            "a plan that was made with --lengths"
        )
    if plan.data.method == "other":
        raise UserError(
            "what --steps-of names is a plan whose packs `omnibal plan` did not make; give one "
            f"with data.method {' or '.join(PackingMethod)}"
        )
    packs, lengths = data
    return {
        "caps": plan.data.caps,
        "lengths": lengths,
        "packing": PackingMethod(plan.data.method),
        "packs_per_step": plan.data.packs_per_step,
        "epochs": plan.data.epochs,
        "seed": plan.data.seed,
        "steps": steps_of(packs),
    }


def save_plan(result: PlanResult, directory: Path) -> None:
    """Write the plan directory whole or not at all; an earlier plan there is replaced.

    Raises:
        UserError: `directory` holds something other than a plan, which is left as it is.
    """
    check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        made, replaced = Path(scratch) / "new", Path(scratch) / "old"
        made.mkdir()
        if result.data is not None:
            packs, lengths = result.data
            write_packs(packs, made / PACKS_FILE)
            write_lengths(lengths, made / LENGTHS_FILE)
        if result.profile is not None:
            write_profile(result.profile, made / PROFILE_FILE)
        write_plan(result.plan, made)
        if directory.exists():
            directory.rename(replaced)
        try:
            made.rename(directory)
        except OSError:
            if replaced.exists():
                replaced.rename(directory)
            raise


def check_replaceable(directory: Path) -> None:
    """Refuse a place for a plan that holds something else.

    Raises:
        UserError: `directory` is a file, the current directory or one above it, or holds what is
            no part of a plan.
    """
    if Path.cwd().is_relative_to(directory.resolve()):
        raise UserError(
            f"{directory}: is the current directory or above it, and a plan replaces its "
            f"directory: give one of its own, such as -o {directory / 'plan'}"
        )
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(f"{directory}: is a file; a plan is a directory: choose another -o")
    names = {path.name for path in directory.iterdir()}
    foreign = sorted(names - {PLAN_FILE, PACKS_FILE, LENGTHS_FILE, PROFILE_FILE})
    if foreign or (names and PLAN_FILE not in names):
        raise UserError(
            f"{directory}: holds {(foreign or sorted(names))[0]}, which is not part of a plan, and "
            "replacing a plan deletes its directory; move that away or choose another -o"
        )


def data_at_caps(shapes: Shapes, data_parallel: int) -> tuple[ScheduledPacks, Lengths]:
    """One step of samples that each fill a pack, and cost the most attention the caps allow.

    Raises:
        UserError: there would be more packs than anyone trains in a step.
    """
    count = data_parallel * shapes.micro_batches_per_step
    check_packs_per_step(data_parallel, shapes.micro_batches_per_step)
    lengths = Lengths(
        tiles=np.full(count, shapes.caps.max_tiles, np.int32),
        tokens=np.full(count, shapes.caps.max_tokens, np.int32),
        loss_tokens=np.zeros(count, np.int32),
        source=np.zeros(count, np.int32),
        source_names=("at the caps",),
        origin=None,
    )
    steps = Steps(
        packs=Packs.from_lists([[sample] for sample in range(count)]),
        step=np.zeros(count, np.int64),
        epoch=np.zeros(count, np.int32),
    )
    return deal_steps(
        steps, lengths, lambda packs: size_load(packs, lengths), data_parallel
    ), lengths


def model_of_lengths(model: ModelConfig, lengths: Lengths | None) -> ModelConfig:
    """The model with the tiling that the lengths were scanned with, as training must tile alike.

    Raises:
        UserError: the lengths were scanned for tiles of other sizes, another chat template or
            another system message than the model's, or a sample is longer than it may be.
    """
    if lengths is None:
        return model
    longest = int(lengths.tokens.argmax())
    source = lengths.source_names[lengths.source[longest]]
    check_positions(int(lengths.tokens[longest]), model, f"sample {longest} of {source}")
    return model if lengths.origin is None else _of_origin(model, lengths.origin)


def _of_origin(model: ModelConfig, origin: LengthsOrigin) -> ModelConfig:
    given = (origin.image_size, origin.tokens_per_tile)
    needed = (model.vision.image_size, model.tokens_per_tile)
    if given != needed:
        raise UserError(
            f"the lengths were scanned for tiles of {given[0]} pixels and {given[1]} tokens, but "
            f"{model.name} has {needed[0]} pixels and {needed[1]} tokens; scan them for this model "
            "with `omnibal lengths`"
        )
    if (origin.chat_template, origin.system_message) != (model.chat_template, model.system_message):
        raise UserError(
            f"the lengths were scanned with chat_template {origin.chat_template!r} and "
            f"system_message {origin.system_message!r}, but {model.name} has "
            f"{model.chat_template!r} and {model.system_message!r}; scan them for this model with "
            "`omnibal lengths`"
        )
    return model.model_copy(update={"tiling": origin.tiling})


def _cost(request: PlanRequest, model: ModelConfig) -> CostModel:
    job = model, request.cluster, request.parallel, request.precision
    return job_cost(request.profile, *job, request.frozen)


def job_cost(
    profile: Profile | None,
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    frozen: tuple[Part, ...],
) -> CostModel:
    """Costs by the profile, or counted without one.

    Raises:
        UserError: the profile is of another model, precision or tensor-parallel size.
    """
    if profile is None:
        return analytic_cost(model, cluster, parallel, precision, frozen)
    return fitted_cost(profile, model, cluster, parallel, precision, frozen)


def _packs(
    request: PlanRequest, lengths: Lengths, cost: CostModel, model: ModelConfig
) -> ScheduledPacks:
    """All epochs' packs, matched and dealt to ranks by the predicted time of the whole model."""

    def load(packs: Packs) -> np.ndarray:
        return model_ms(cost, model, pack_features(packs, lengths))

    steps = request.steps
    if steps is None:
        steps = draw_steps(lengths, request.data_request, load)
    return deal_steps(steps, lengths, load, request.parallel.data)


def _data_plan(request: PlanRequest, lengths: Lengths, packs: ScheduledPacks) -> DataPlan:
    return describe_data(
        packs,
        lengths,
        caps=request.caps,
        method=request.packing.value,
        seed=request.seed,
        epochs=request.epochs,
        packs_per_step=request.packs_per_step,
        micro_batches_per_step=request.micro_batches,
    )


def describe_data(
    packs: ScheduledPacks,
    lengths: Lengths,
    *,
    caps: Caps,
    method: PackedBy,
    seed: int,
    epochs: int,
    packs_per_step: int,
    micro_batches_per_step: int,
) -> DataPlan:
    """What a plan says of its packs, by which a run knows them again; they were made as told."""
    return DataPlan(
        caps=caps,
        method=method,
        seed=seed,
        epochs=epochs,
        packs_per_step=packs_per_step,
        micro_batches_per_step=micro_batches_per_step,
        samples=len(lengths),
        packs=len(packs),
        steps=packs.steps,
        lengths_sha256=lengths.sha256,
        packs_sha256=packs.sha256,
        steps_sha256=steps_of(packs).sha256,
        origin=lengths.origin,
    )
