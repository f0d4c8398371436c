"""Results of `omnibal plan` by level, window and encoder; notes and cost of another trainer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omnibal.base.errors import UserError
from omnibal.cli.console import ConsoleListener, print_notes, progress
from omnibal.job.plan import Plan
from omnibal.model.targets import TargetName
from omnibal.packing.packing import PackingMethod
from omnibal.report.table import Table

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.job.planner import PlanResult
    from omnibal.packing.packs import ScheduledPacks
    from omnibal.packing.phase_balance import PhaseBalance
    from omnibal.search.goal import Goal
    from omnibal.search.planning import Planned

_IMAGES_LOST = (
    "XTuner's preset packs lose images in the versions that were read (5cda4fb and 5081ed2, "
    "xtuner/v1/datasets/preset_pack.py, __getitem__): train with the module that `omnibal export` "
    "writes next to the packs, or see whether your version needs it (docs/trainers.md)"
)


def levels_of_plan(plan: Plan, packs: "ScheduledPacks | None") -> list[dict[str, Any]]:
    """Return a JSON entry per level of a plan; a plan without levels has one.

    Packs and samples are counted over all epochs, or None for a plan of shapes only.
    """
    import numpy as np

    entries: list[dict[str, Any]] = []
    for index, level in enumerate(plan.pack_levels):
        pack_count = sample_count = None
        if packs is not None:
            is_at_level = packs.level == index  # [packs]
            pack_count = int(is_at_level.sum())
            sample_count = int(np.diff(packs.packs.offsets)[is_at_level].sum())
        stages = plan.merge_chunks(plan.stages_at(index))
        entries.append(
            {
                **level.caps.model_dump(),
                "context": level.context,
                "packs": pack_count,
                "samples": sample_count,
                "recompute": [stage.recomputed_layers for stage in stages],
            }
        )
    return entries


def levels_table(plan: Plan, packs: "ScheduledPacks | None") -> Table | None:
    """Return the table of a plan's levels with their `packs`, or None without levels."""
    if not plan.levels:
        return None
    names = plan.levels[0].caps.names  # all levels limit the same features
    titles = (*(f"max {name}" for name in names), "ranks", "cut", "exchange", "packs", "samples")
    rows = [
        (
            *(f"{cap:,}" for cap in level.caps.values),
            str(level.context),
            *([level.cut.value, level.exchange.value] if level.context > 1 else "--"),
            *("-" if entry[name] is None else f"{entry[name]:,}" for name in ("packs", "samples")),
            " ".join(map(str, entry["recompute"])),
        )
        for level, entry in zip(plan.levels, levels_of_plan(plan, packs), strict=True)
    ]
    return Table.of_rows("Levels of packs", (*titles, "recomputed by stage"), rows)


def balance_of(result: "PlanResult") -> dict[str, float | None]:
    """Return balance metrics of attention and its exchange by JSON key, each None without packs."""
    from omnibal.packing.balance_metrics import measure_packs

    names = (
        "attention_balance_ratio",
        "least_attention_balance_ratio",
        "communication_ratio",
        "exchanged_ratio",
        "tokens_per_rank",
    )
    plan = result.plan
    if result.data is None or plan.data is None:
        return dict.fromkeys(names)
    (packs, lengths), dp = result.data, plan.parallel.data
    # Packs' tokens stand for their load, and 1 for the bound on packs: these metrics use neither.
    metrics = measure_packs(packs, lengths, plan.pack_levels, dp, packs.tokens, 1).as_dict()
    return {name: metrics[name] for name in names}


def window_facts(result: "PlanResult") -> tuple[dict[str, Any], str] | None:
    """Return a plan's windows for JSON, and a note on them. None for a plan without windows.

    Imbalance is the max rank time over the mean, both predicted and summed over steps: of the plan,
    and of samples packed in file order and not balanced.
    """
    from omnibal.job.plan_data import StreamData
    from omnibal.packing.balance_metrics import imbalance, rank_sums

    stream = StreamData.of_plan(result.plan, result.data)
    if stream is None or result.data is None:
        return None
    job = result.job
    as_read = replace(stream, is_dispatched=False).schedule(job)[0]  # as plain loaders do
    planned, loaded = (
        imbalance(rank_sums(packs, job.load_ms(packs.packs, stream.lengths), job.parallel.data))
        for packs in (result.data[0], as_read)
    )
    is_on = stream.is_dispatched
    facts = {"samples": stream.window, "dispatch": "on" if is_on else "off"}
    note = (
        f"windows of {stream.window:,} samples: the busiest rank takes {planned:.3f} times as "
        f"long as the mean{f'; as they are read, {loaded:.3f} times' if is_on else ''}"
    )
    return {**facts, "imbalance": planned, "imbalance_as_read": loaded}, note


def phases_of_plan(result: "PlanResult") -> list["PhaseBalance"]:
    """Return each phase's balance on a sample of steps. Empty without encoders or packs."""
    import numpy as np

    from omnibal.model.units import feature_names_at
    from omnibal.packing.phase_balance import encoder_balances, language_balance
    from omnibal.pipeline.predict import MAX_SIMULATED_STEPS
    from omnibal.pipeline.stage_cost import model_ms

    plan = result.plan
    if not plan.model.encoders or result.data is None:
        return []
    # The language phase excludes the pipeline's waits for data-parallel encoders.
    job = replace(result.job, data_parallel_encoders=None)
    workload = job.workload(*result.data, plan.pack_levels).some_steps(MAX_SIMULATED_STEPS)
    cost, ranks = job.cost_of_all(plan.pack_levels), plan.parallel.data
    names = feature_names_at(job.cost.features, plan.pack_levels)
    steps, step = np.unique(workload.step, return_inverse=True)
    cell = step * ranks + workload.dp_rank
    items, samples = {}, {}
    for name, tower in plan.model.encoders.items():
        counts = workload.features[:, names.index(tower.feature)]
        of_ranks = np.bincount(cell, counts, len(steps) * ranks).astype(np.int64)
        items[name] = of_ranks.reshape(-1, ranks)  # in the ranks' packs, [steps, ranks]
        if tower.feature in workload.samples:
            samples[name] = workload.samples[tower.feature]
    language_ms = model_ms(cost, plan.model.without_encoders(), workload.features_of(cost))
    ranks_of_pipeline = plan.parallel.pipeline * plan.parallel.tensor
    return [
        *encoder_balances(items, ranks_of_pipeline, plan.data_parallel_encoders, samples, cell),
        language_balance(workload.step, workload.dp_rank, language_ms, ranks),
    ]


def phases_table(phases: Sequence["PhaseBalance"]) -> Table | None:
    """Return the phases' busiest rank over the mean, by phase. None without phases."""
    if not phases:
        return None
    rows = [
        (
            phase.phase,
            f"{phase.imbalance_before:.4f}",
            "-" if phase.imbalance_after is None else f"{phase.imbalance_after:.4f}",
            f"{phase.bound:.4f}",
        )
        for phase in phases
    ]
    titles = ("phase", "own packs", "balanced", "lower bound")
    return Table.of_rows("Phases: busiest rank over the mean", titles, rows)


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


def cost_of_limits(goal: "Goal", planned: "Planned", packing: PackingMethod) -> dict[str, Any]:
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
    print_notes(["planning without the trainer's limits, to compare"])
    try:
        free = planning.plan(without_trainer(goal, result), ConsoleListener())
    except UserError as error:
        print_notes([f"not compared: without limits there is no plan of this job: {error}"])
        return {}
    requests = requests_lifted(trainer, result, packing, free.result)
    with progress("lifting limits", len(requests)) as advance:
        lifted = rates_lifted(trainer, result, packing, requests, advance)
    cost = CostOfLimits.compare(trainer, rate_of(result), rate_of(free.result), lifted, free.gap)
    unit, rate = ("packs", None) if result.data is None else ("samples", cost.free_rate)
    # Rates in samples are comparable: both plans have steps of the same size.
    print_notes([f"at {samples_per_step(result):,} {unit} a step, {cost.sentence}"], prefix="")
    return {"free_samples_per_second_per_gpu": rate, **cost.as_dict()}
