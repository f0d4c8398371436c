"""Dry run: a plan's layout over ranks, without building or launching anything."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from omnibal.job.plan import Plan
from omnibal.pipeline.stage_units import Span, Stage
from omnibal.pipeline.unit_runs import encoders_stage


def print_dry_run(plan: Plan, console: Console) -> None:
    """Print stages, context-parallel sizes if any, and each node's ranks with their coordinates."""
    sizes, per_node = plan.parallel, plan.cluster.gpus_per_node
    console.print(f"Stages of {plan.model.name}")
    console.print(_stages_table(plan))
    if plan.beside is not None:
        sharded = plan.beside.sharded
        held = "whole on every rank" if sharded == 1 else f"divided over {sharded} ranks"
        console.print(f"Beside them, {held}: {_words(encoders_stage(plan.model).units)}")
        ranks = plan.beside.pipelines * sizes.pipeline * sizes.tensor
        titles = ("encoder", "items a pass", "items kept", "ranks that share")
        table = Table(*titles, box=box.SIMPLE_HEAD)
        for name in plan.model.encoders:
            counts = plan.beside.items_per_pass[name], plan.beside.kept_items[name], ranks
            table.add_row(name, *map(str, counts))
        console.print(table)
    if plan.levels:
        console.print("Levels of packs")
        console.print(_levels_table(plan))
    console.print(
        f"{sizes.world_size} processes: {sizes}, {per_node} a node of {plan.cluster.name}"
    )
    groups = ["stage" if name == "pipeline" else name for name in sizes.place(0)]
    ranks_table = Table("node", "rank", *groups, box=box.SIMPLE_HEAD)
    for rank in range(sizes.world_size):
        ranks_table.add_row(*map(str, (rank // per_node, rank, *sizes.place(rank).values())))
    console.print(ranks_table)


def _stages_table(plan: Plan) -> Table:
    table = Table("stage", "holds", "recomputes", "loads", box=box.SIMPLE_HEAD)
    if plan.prediction is not None:
        table.add_column("predicted GiB", justify="right")
    for number in range(plan.parallel.pipeline):
        parts = plan.parts_of(number)
        cells = [
            str(number),
            "\n".join(_words(plan.stages[part].units) for part in parts),
            "\n".join(_list_recomputed(plan, part) for part in parts),
            _list_loads(plan.units_of(number)),
        ]
        if plan.prediction is not None:
            cells.append(f"{plan.prediction.stages[number].memory.peak_gib:.2f}")
        table.add_row(*cells)
    return table


def _words(spans: Sequence[Span]) -> str:
    return ", ".join(map(str, spans)) or "nothing"


def _list_recomputed(plan: Plan, part: int) -> str:
    """Recomputed layers of a part of the model, a line per context-parallel size."""
    again = [_words(stages[part].recompute) for stages in plan.stages_at_levels]
    if not plan.levels:
        return again[0]
    return "\n".join(f"level {level}: {layers}" for level, layers in enumerate(again))


def _levels_table(plan: Plan) -> Table:
    names = plan.levels[0].caps.names
    table = Table("level", *names, "context", "cut", "exchange", box=box.SIMPLE_HEAD)
    for number, level in enumerate(plan.levels):
        caps = [f"{level.caps[name]:,}" for name in names]
        shared = [level.cut, level.exchange] if level.context > 1 else ["", ""]
        table.add_row(str(number), *caps, str(level.context), *shared)
    return table


def _list_loads(stage: Stage) -> str:
    loads = {"vision embed": "pixels", "language embed": "token ids", "head": "labels"}
    return ", ".join(what for unit, what in loads.items() if stage.holds(unit)) or "nothing"
