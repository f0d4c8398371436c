"""Balance of a plan's phases: each encoder and the language model, over the ranks that run it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from omnibal.cost.source import CostSource
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.model.units import feature_names_at
from omnibal.packing.packs import ScheduledPacks
from omnibal.packing.phase_balance import PhaseBalance, encoder_balances, language_balance
from omnibal.pipeline.predict import MAX_SIMULATED_STEPS
from omnibal.pipeline.stage_cost import model_ms
from omnibal.report.table import Table


def phases_of_plan(
    plan: Plan, packs: ScheduledPacks, lengths: Lengths, cost_source: CostSource
) -> list[PhaseBalance]:
    """Return each phase's balance over ranks, on a sample of steps. Empty without encoders."""
    if not plan.model.encoders:
        return []
    # The language phase excludes the pipeline's waits for data-parallel encoders.
    job = replace(JobSpec.of_plan(plan, cost_source), data_parallel_encoders=None)
    workload = job.workload(packs, lengths, plan.pack_levels).some_steps(MAX_SIMULATED_STEPS)
    cost, ranks = job.cost_of_all(plan.pack_levels), plan.parallel.data
    names = feature_names_at(job.cost.features, plan.pack_levels)
    steps, step = np.unique(workload.step, return_inverse=True)
    cell = step * ranks + workload.dp_rank
    # Items in the ranks' packs by encoder, int64 [steps, ranks].
    items = {
        name: np.bincount(
            cell, workload.features[:, names.index(tower.feature)], len(steps) * ranks
        )
        .astype(np.int64)
        .reshape(-1, ranks)
        for name, tower in plan.model.encoders.items()
    }
    language_ms = model_ms(cost, plan.model.without_encoders(), workload.features_of(cost))
    samples = {
        name: workload.samples[tower.feature]
        for name, tower in plan.model.encoders.items()
        if tower.feature in workload.samples
    }
    ranks_of_pipeline = plan.parallel.pipeline * plan.parallel.tensor
    return [
        *encoder_balances(items, ranks_of_pipeline, plan.data_parallel_encoders, samples, cell),
        language_balance(workload.step, workload.dp_rank, language_ms, ranks),
    ]


def phases_table(phases: Sequence[PhaseBalance]) -> Table | None:
    """Return the phases' busiest rank over the mean, by phase. None without phases."""
    if not phases:
        return None
    return Table.of_records(
        "Phases: busiest rank over the mean",
        phases,
        {
            "phase": lambda phase: phase.phase,
            "own packs": lambda phase: f"{phase.imbalance_before:.4f}",
            "balanced": lambda phase: (
                "-" if phase.imbalance_after is None else f"{phase.imbalance_after:.4f}"
            ),
            "lower bound": lambda phase: f"{phase.bound:.4f}",
        },
    )
