"""`omnibal plan --for`: options, notes, and the cost of another trainer's limits."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnibal.base.errors import UserError
from omnibal.cli.console import ConsoleListener, print_notes, progress
from omnibal.cli.options import count_option, size_option
from omnibal.model.targets import TargetName

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.job.planner import PlanResult
    from omnibal.packing.packing import PackingMethod
    from omnibal.search.goal import Goal
    from omnibal.search.planning import Planned

_IMAGES_LOST = (
    "XTuner's preset packs lose images in the versions that were read (5cda4fb and 5081ed2, "
    "xtuner/v1/datasets/preset_pack.py, __getitem__): train with the module that `omnibal export` "
    "writes next to the packs, or see whether your version needs it (docs/trainers.md)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyOptions:
    gpus: Annotated[int | None, size_option("number of GPUs; unset sizes are searched")] = None
    samples_per_step: Annotated[
        int | None, count_option("global batch size (default: 128 to 512, by --gpus)")
    ] = None
    made_for: Annotated[
        TargetName | None,
        typer.Option("--for", metavar="TRAINER", help=f"{', '.join(TargetName)} (default: own)"),
    ] = None
    compare: Annotated[bool, typer.Option(help="cost of the limits of --for")] = True


def notes_for_trainer(result: "PlanResult") -> list[str]:
    """Return notes on training a plan in another trainer, empty for this project's."""
    import numpy as np

    notes = []
    if result.plan.made_for is TargetName.XTUNER and result.plan.model.encoders:
        notes.append(f"WARNING: {_IMAGES_LOST}")
    if result.plan.made_for and result.data is not None and result.plan.data is not None:
        data = result.plan.data
        size = int(np.bincount(result.data[0].step).max())  # packs of the fullest step
        if size < data.packs_per_step:
            notes.append(f"the data is less than a step: {size:,} packs of {data.packs_per_step:,}")
        if data.left_out:
            notes.append(
                f"{data.left_out:,} of {data.epochs * data.samples:,} samples are left out, "
                "of a step that is not full; other --micro-batches or caps may fill it"
            )
    return notes


def cost_of_limits(
    options: StrategyOptions, packing: "PackingMethod", goal: "Goal", planned: "Planned"
) -> dict[str, Any]:
    """Plan without the trainer's limits; return the comparison for JSON, and print it as notes."""
    from omnibal.search import planning
    from omnibal.search.limit_costs import (
        CostOfLimits,
        rate_of,
        rates_lifted,
        requests_lifted,
        samples_per_step,
        without_trainer,
    )

    trainer, result = goal.job.trainer, planned.result
    summary: dict[str, Any] = {"made_for": options.made_for}
    if trainer.name is None or not options.compare:
        return summary
    print_notes(["planning without the trainer's limits, to compare"])
    try:
        free = planning.plan(without_trainer(goal, result), ConsoleListener())
    except UserError as error:
        print_notes([f"not compared: without limits there is no plan of this job: {error}"])
        return summary
    requests = requests_lifted(trainer, result, packing, free.result)
    with progress("lifting limits", len(requests)) as advance:
        lifted = rates_lifted(trainer, result, packing, requests, advance)
    cost = CostOfLimits.compare(trainer, rate_of(result), rate_of(free.result), lifted, free.gap)
    unit, rate = ("packs", None) if result.data is None else ("samples", cost.free_rate)
    # Rates in samples are comparable: both plans have steps of the same size.
    print_notes([f"at {samples_per_step(result):,} {unit} a step, {cost.sentence}"], prefix="")
    return summary | {"free_samples_per_second_per_gpu": rate, **cost.as_dict()}
