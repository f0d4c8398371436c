"""Dry run: print a plan's layout over ranks, without building or launching anything."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from omnibal.job.plan import Plan
from omnibal.pipeline.stage_units import Span
from omnibal.pipeline.unit_runs import encoders_stage


def print_dry_run(plan: Plan, console: Console) -> None:
    """Print stages, data-parallel encoders, context-parallel sizes and each rank's coordinates."""
    sizes, per_node = plan.parallel, plan.cluster.gpus_per_node
    console.print(f"Stages of {plan.model.name}")
    console.print(_make_stages_table(plan))
    if (encoders := plan.data_parallel_encoders) is not None:
        sharded = encoders.sharded
        weights = "replicated" if sharded == 1 else f"weights sharded over {sharded} ranks"
        units = _join_spans(encoders_stage(plan.model).units)
        console.print(f"Data-parallel encoders, {weights}: {units}")
        ranks = encoders.pipelines * sizes.pipeline * sizes.tensor
        titles = ("encoder", "items per pass", "items kept", "ranks per group")
        table = Table(*titles, box=box.SIMPLE_HEAD)
        for name in plan.model.encoders:
            counts = encoders.items_per_pass[name], encoders.kept_items[name], ranks
            table.add_row(name, *map(str, counts))
        console.print(table)
    if plan.levels:
        console.print("Context-parallel sizes of packs (levels)")
        names = plan.levels[0].caps.names
        levels = Table("level", *names, "context", "cut", "exchange", box=box.SIMPLE_HEAD)
        for number, level in enumerate(plan.levels):
            caps = [f"{level.caps[name]:,}" for name in names]
            sharing = [level.cut, level.exchange] if level.context > 1 else ["", ""]
            levels.add_row(str(number), *caps, str(level.context), *sharing)
        console.print(levels)
    console.print(
        f"{sizes.world_size} processes: {sizes}, {per_node} per node of {plan.cluster.name}"
    )
    groups = ["stage" if name == "pipeline" else name for name in sizes.place(0)]
    ranks_table = Table("node", "rank", *groups, box=box.SIMPLE_HEAD)
    for rank in range(sizes.world_size):
        ranks_table.add_row(*map(str, (rank // per_node, rank, *sizes.place(rank).values())))
    console.print(ranks_table)


def _make_stages_table(plan: Plan) -> Table:
    table = Table("stage", "units", "recomputes", "loads", box=box.SIMPLE_HEAD)
    inputs = {"vision embed": "pixels", "language embed": "token ids", "head": "labels"}
    if plan.prediction is not None:
        table.add_column("predicted GiB", justify="right")
    for number in range(plan.parallel.pipeline):
        parts, units = plan.parts_of(number), plan.units_of(number)
        cells = [
            str(number),
            "\n".join(_join_spans(plan.stages[part].units) for part in parts),
            "\n".join(_list_recomputed(plan, part) for part in parts),
            ", ".join(name for unit, name in inputs.items() if units.holds(unit)) or "nothing",
        ]
        if plan.prediction is not None:
            cells.append(f"{plan.prediction.stages[number].memory.peak_gib:.2f}")
        table.add_row(*cells)
    return table


def _join_spans(spans: Sequence[Span]) -> str:
    return ", ".join(map(str, spans)) or "nothing"


def _list_recomputed(plan: Plan, part: int) -> str:
    """Return the recomputed layers of a part of the model, one line per level if any."""
    layers_of_levels = [_join_spans(stages[part].recompute) for stages in plan.stages_at_levels]
    if not plan.levels:
        return layers_of_levels[0]
    return "\n".join(f"level {level}: {layers}" for level, layers in enumerate(layers_of_levels))
