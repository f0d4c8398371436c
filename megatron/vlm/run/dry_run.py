"""Dry run: a plan's layout over ranks, without building or launching anything."""

from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from omnibal.parallel import Parallel
from omnibal.pipeline.stage import Stage
from omnibal.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """One rank's coordinates in the parallel groups."""

    rank: int
    tensor: int
    data: int
    pipeline: int


def rank_places(parallel: Parallel) -> list[RankPlace]:
    """Places of all ranks in Megatron's order: tensor varies fastest, then data, then pipeline."""
    return [
        RankPlace(
            rank=rank,
            tensor=rank % parallel.tensor,
            data=rank // parallel.tensor % parallel.data,
            pipeline=rank // (parallel.tensor * parallel.data),
        )
        for rank in range(parallel.world_size)
    ]


def units_of(plan: Plan, number: int) -> str:
    """The units of stage `number` in words, layers by their first and last number."""
    stage, before = plan.stages[number], plan.stages[:number]
    first_vision = sum(one.vision_layers for one in before)
    first_language = sum(one.language_layers for one in before)
    parts = [
        "vision embed" if stage.vision_embed else "",
        _layers("vision layer", first_vision, stage.vision_layers),
        "projector" if stage.projector else "",
        "language embed" if stage.language_embed else "",
        _layers("language layer", first_language, stage.language_layers),
        "head" if stage.head else "",
    ]
    return ", ".join(part for part in parts if part)


def _layers(name: str, first: int, count: int) -> str:
    """Layers by first and last number, in words; `name` is in the singular."""
    if count <= 1:
        return f"{name} {first}" if count else ""
    return f"{name}s {first} to {first + count - 1}"


def print_dry_run(plan: Plan, console: Console) -> None:
    """Print the stages, and every node's ranks with their places."""
    sizes, per_node = plan.parallel, plan.cluster.gpus_per_node
    console.print(f"Stages of {plan.model.name}")
    console.print(_stages_table(plan))
    console.print(
        f"{sizes.world_size} processes: tensor {sizes.tensor} x pipeline {sizes.pipeline} x data "
        f"{sizes.data}, {per_node} a node of {plan.cluster.name}"
    )
    console.print(_ranks_table(plan))


def _stages_table(plan: Plan) -> Table:
    table = Table("stage", "holds", "recomputes", "loads", box=box.SIMPLE_HEAD)
    if plan.prediction is not None:
        table.add_column("predicted GiB", justify="right")
    for number, stage in enumerate(plan.stages):
        cells = [str(number), units_of(plan, number), _recomputed(stage), _loaded(stage)]
        if plan.prediction is not None:
            cells.append(f"{plan.prediction.stages[number].memory.peak_gib:.2f}")
        table.add_row(*cells)
    return table


def _recomputed(stage: Stage) -> str:
    layers = [
        f"{name} {', '.join(map(str, numbers))}"
        for name, numbers in (
            ("vision", stage.recompute_vision),
            ("language", stage.recompute_language),
        )
        if numbers
    ]
    return "; ".join(layers) or "nothing"


def _loaded(stage: Stage) -> str:
    parts = [
        "pixels" if stage.vision_embed else "",
        "token ids" if stage.language_embed else "",
        "labels" if stage.head else "",
    ]
    return ", ".join(part for part in parts if part) or "nothing"


def _ranks_table(plan: Plan) -> Table:
    table = Table("node", "rank", "tensor", "data", "stage", box=box.SIMPLE_HEAD)
    for place in rank_places(plan.parallel):
        node = place.rank // plan.cluster.gpus_per_node
        columns = (node, place.rank, place.tensor, place.data, place.pipeline)
        table.add_row(*map(str, columns))
    return table
