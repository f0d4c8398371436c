"""The whole plan: lengths to packs and steps, costs to stages and recomputation, to a directory."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnibal.config import ClusterConfig, ModelConfig, Precision
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel, pack_features
from omnibal.cost.profile import Profile, fitted_cost
from omnibal.data.lengths import Lengths, write_lengths
from omnibal.data.packing import PackingMethod
from omnibal.data.packs import ScheduledPacks, write_packs
from omnibal.data.steps import DataRequest, draw_packs
from omnibal.errors import UserError
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.simulate import predict
from omnibal.pipeline.stage_cost import GIB
from omnibal.pipeline.units import unit_sequence
from omnibal.plan import (
    LENGTHS_FILE,
    PACKS_FILE,
    PLAN_FILE,
    Caps,
    DataPlan,
    Parallel,
    Plan,
    memory_cap_gib,
    write_plan,
)


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
    micro_batches: int
    """Packs of one data-parallel rank in a full step."""
    epochs: int
    seed: int
    profile: Profile | None
    """Measured costs; None to count operations and bytes instead."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanResult:
    """A plan, with the packs and lengths that belong to it."""

    plan: Plan
    data: tuple[ScheduledPacks, Lengths] | None
    """None for a plan of shapes only."""


def make_plan(request: PlanRequest) -> PlanResult:
    """Packs, stages and prediction for a request; equal requests give equal plans.

    Raises:
        UserError: the lengths were scanned for another model, a sample exceeds the caps, the
            profile is of something else, or no partition fits into memory.
    """
    model = _model_of_lengths(request.model, request.lengths)
    lengths = _lengths_at_caps(request) if request.lengths is None else request.lengths
    cost = _cost(request, model)
    packs = _draw(request, lengths, cost, model)
    features = pack_features(packs.packs, lengths)
    stages = search_stages(
        cost,
        model,
        features,
        request.parallel.pipeline,
        request.micro_batches,
        memory_cap_gib(request.cluster) * GIB,
    )
    prediction = predict(cost, model, request.parallel, stages, packs, features)
    if request.lengths is None:
        # One step of made-up samples says nothing about a dataset.
        prediction = prediction.model_copy(
            update={"samples_per_second_per_gpu": 0.0, "gpu_days": 0.0}
        )
    plan = Plan(
        model=model,
        precision=request.precision,
        parallel=request.parallel,
        stages=stages,
        cluster=request.cluster,
        data=_data_plan(request, lengths, packs) if request.lengths is not None else None,
        prediction=prediction,
    )
    return PlanResult(plan=plan, data=None if plan.data is None else (packs, lengths))


def save_plan(result: PlanResult, directory: Path) -> None:
    """Write the plan directory whole or not at all; an earlier plan there is replaced.

    Raises:
        UserError: `directory` holds something other than a plan, which is left as it is.
    """
    _check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        made, replaced = Path(scratch) / "new", Path(scratch) / "old"
        made.mkdir()
        if result.data is not None:
            packs, lengths = result.data
            write_packs(packs, made / PACKS_FILE)
            write_lengths(lengths, made / LENGTHS_FILE)
        write_plan(result.plan, made)
        if directory.exists():
            directory.rename(replaced)
        made.rename(directory)


def _check_replaceable(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(f"{directory}: is a file; a plan is a directory: choose another -o")
    names = {path.name for path in directory.iterdir()}
    foreign = sorted(names - {PLAN_FILE, PACKS_FILE, LENGTHS_FILE})
    if foreign or (names and PLAN_FILE not in names):
        raise UserError(
            f"{directory}: holds {(foreign or sorted(names))[0]}, which is not part of a plan, and "
            "replacing a plan deletes its directory; move that away or choose another -o"
        )


def _lengths_at_caps(request: PlanRequest) -> Lengths:
    """One step of samples that each fill a pack, and cost the most attention the caps allow."""
    count = request.parallel.data * request.micro_batches
    return Lengths(
        tiles=np.full(count, request.caps.max_tiles, np.int32),
        tokens=np.full(count, request.caps.max_tokens, np.int32),
        loss_tokens=np.zeros(count, np.int32),
        source=np.zeros(count, np.int32),
        source_names=("at the caps",),
        origin=None,
    )


def _model_of_lengths(model: ModelConfig, lengths: Lengths | None) -> ModelConfig:
    """The model with the tiling that the lengths were scanned with, as training must tile alike."""
    if lengths is None or lengths.origin is None:
        return model
    origin = lengths.origin
    given = (origin.image_size, origin.tokens_per_tile)
    needed = (model.vision.image_size, model.tokens_per_tile)
    if given != needed:
        raise UserError(
            f"the lengths were scanned for tiles of {given[0]} pixels and {given[1]} tokens, but "
            f"{model.name} has {needed[0]} pixels and {needed[1]} tokens; scan them for this model "
            "with `omnibal lengths`"
        )
    return model.model_copy(update={"tiling": origin.tiling})


def _cost(request: PlanRequest, model: ModelConfig) -> CostModel:
    settings = (model, request.cluster, request.parallel, request.precision)
    if request.profile is None:
        return analytic_cost(*settings)
    return fitted_cost(request.profile, *settings)


def _draw(
    request: PlanRequest, lengths: Lengths, cost: CostModel, model: ModelConfig
) -> ScheduledPacks:
    """All epochs' packs, ranks balanced in predicted time of the whole model."""
    units = [cost.units[unit] for unit in unit_sequence(model)]
    ms_per_feature = np.sum([unit.forward_ms + unit.backward_ms for unit in units], axis=0)
    data = DataRequest(
        caps=request.caps,
        method=request.packing,
        seed=request.seed,
        epochs=request.epochs,
        dp=request.parallel.data,
        micro_batches=request.micro_batches,
    )
    return draw_packs(lengths, data, lambda packs: pack_features(packs, lengths) @ ms_per_feature)


def _data_plan(request: PlanRequest, lengths: Lengths, packs: ScheduledPacks) -> DataPlan:
    return DataPlan(
        caps=request.caps,
        method=request.packing,
        seed=request.seed,
        epochs=request.epochs,
        micro_batches_per_step=request.micro_batches,
        samples=len(lengths),
        packs=len(packs),
        steps=packs.steps,
        lengths_sha256=lengths.sha256,
        packs_sha256=packs.sha256,
        origin=lengths.origin,
    )
