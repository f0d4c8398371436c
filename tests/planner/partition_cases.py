"""Random packs, the planner's predictions for them, and frozen units."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import numpy as np
from cost_cases import random_features

from omnibal.cost.model import CostModel, UnitCost
from omnibal.model.config import ModelConfig
from omnibal.model.targets import RecomputeFreedom
from omnibal.model.units import LANGUAGE, unit_names
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.pipeline.stage_units import Span, Stage
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.pipeline.workload import Workload


def planners_figures(
    cost: CostModel,
    stages: tuple[Stage, ...],
    packs: Workload,
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
) -> tuple[float, float]:
    """Return predicted step ms and peak bytes."""
    simulated = simulate_levels(cost, [stages], packs, schedule)
    memories = stage_memories(cost, [stages], packs, schedule)
    return float(simulated.step_ms.mean()), max(memory.peak_gib for memory in memories) * GIB


def random_packs(rng: np.random.Generator, micro_batches: int, features_of: int = 5) -> Workload:
    """Return a few steps. Ranks may have fewer micro-batches than other ranks, or none."""
    ranks, steps = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    counts = rng.integers(0, micro_batches + 1, (steps, ranks))
    counts[:, rng.integers(ranks)] = micro_batches
    if rng.random() < 0.5:
        counts[:] = micro_batches
    step, dp_rank = (np.repeat(axis.ravel(), counts.ravel()) for axis in np.indices((steps, ranks)))
    slot = np.concatenate([np.arange(count) for count in counts.ravel()])
    features = random_features(rng, len(slot), features_of)
    if rng.random() < 0.2:
        features[:] = features[0]
    if rng.random() < 0.2:
        features[rng.integers(len(slot)), 1:] = 0
    return Workload(
        features=features, step=step, dp_rank=dp_rank, slot=slot, data_parallel_size=ranks
    )


def frozen(unit: UnitCost) -> UnitCost:
    """Return the unit without a backward, like a model's frozen first units."""
    names = ("backward_ms", "activation_bytes", "boundary_bytes", "output_gradient_bytes")
    nothing = dict.fromkeys(names, np.zeros_like(unit.forward_ms))
    return replace(unit, **nothing, trained_parameters=0)


def all_cuts(model: ModelConfig, parts: int) -> list[tuple[Stage, ...]]:
    """Return every split of a model into parts with at least one layer."""
    units = range(1, len(unit_names(model)))
    every = (stages_from_cuts(model, cuts) for cuts in combinations(units, parts - 1))
    return [parts for parts in every if all(part.number_of_layers() for part in parts)]


def equal_steps(shape: tuple[int, int, int], features: np.ndarray, **columns) -> Workload:
    """Return steps of the given [steps, ranks, slots], with features in this order."""
    step, dp_rank, slot = (axis.ravel() for axis in np.indices(shape))
    return Workload(
        features=features, step=step, dp_rank=dp_rank, slot=slot, data_parallel_size=shape[1],
        **columns,
    )  # fmt: skip


def numbers_of(
    model: ModelConfig, cost: CostModel, p: int, freedom: RecomputeFreedom
) -> Iterator[list[dict[str, int]]]:
    """Yield every choice of recomputed layer counts: per stage, by tower."""
    with_backward = {k.tower for k in cost.kinds if k.is_layer and cost.units[k.name].has_backward}
    layers = {name: tower.layers for name, tower in model.encoders.items() if name in with_backward}
    language = model.language.layers
    if freedom is RecomputeFreedom.STAGES:
        most = max([*(tower.layers for tower in model.encoders.values()), language])
        for numbers in product(range(most + 1), repeat=p):
            yield [dict.fromkeys([*model.encoders, LANGUAGE], number) for number in numbers]
        return
    encoders = [(0, number) for number in layers.values()]
    of_language = (0, language) if freedom is RecomputeFreedom.ALL else range(language + 1)
    for *of_encoders, number in product(*encoders, of_language):
        yield [dict(zip(layers, of_encoders, strict=True)) | {LANGUAGE: number}] * p


def recomputing(stage: Stage, numbers: dict[str, int]) -> Stage:
    """Return the stage with the first `numbers[tower]` of its layers recomputed."""
    again = [Span(tower, stage.layers(tower)[:number]) for tower, number in numbers.items()]
    return stage.model_copy(update={"recompute": tuple(span for span in again if span.layers)})
