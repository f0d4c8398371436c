"""Dry run: a plan's layout over ranks, without building or launching anything."""

from rich import box
from rich.console import Console
from rich.table import Table

from omnibal.pipeline.stage import Stage
from omnibal.plan import Plan


def print_dry_run(plan: Plan, console: Console) -> None:
    """Print the stages, and every node's ranks with their places."""
    sizes, per_node = plan.parallel, plan.cluster.gpus_per_node
    console.print(f"Stages of {plan.model.name}")
    console.print(_stages_table(plan))
    console.print(
        f"{sizes.world_size} processes: {sizes}, {per_node} a node of {plan.cluster.name}"
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
    parallel = plan.parallel
    groups = ["stage" if name == "pipeline" else name for name in parallel.place(0)]
    table = Table("node", "rank", *groups, box=box.SIMPLE_HEAD)
    for rank in range(parallel.world_size):
        node = rank // plan.cluster.gpus_per_node
        table.add_row(*map(str, (node, rank, *parallel.place(rank).values())))
    return table
