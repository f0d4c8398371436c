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
        held, again = (", ".join(map(str, spans)) for spans in (stage.units, stage.recompute))
        cells = [str(number), held, again or "nothing", _loaded(stage)]
        if plan.prediction is not None:
            cells.append(f"{plan.prediction.stages[number].memory.peak_gib:.2f}")
        table.add_row(*cells)
    return table


def _loaded(stage: Stage) -> str:
    loads = {"vision embed": "pixels", "language embed": "token ids", "head": "labels"}
    return ", ".join(what for unit, what in loads.items() if stage.holds(unit)) or "nothing"


def _ranks_table(plan: Plan) -> Table:
    table = Table("node", "rank", "tensor", "data", "stage", box=box.SIMPLE_HEAD)
    for place in rank_places(plan.parallel):
        node = place.rank // plan.cluster.gpus_per_node
        columns = (node, place.rank, place.tensor, place.data, place.pipeline)
        table.add_row(*map(str, columns))
    return table
