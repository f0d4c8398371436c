"""Results of `omnibal plan` by level: packs with equal caps and context-parallel size."""

from typing import TYPE_CHECKING, Any

from omnibal.job.plan import Plan
from omnibal.report.table import Table

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.data.lengths import Lengths
    from omnibal.packing.packs import ScheduledPacks


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
                **level.caps.model_dump(mode="json"),
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
    entries = levels_of_plan(plan, packs)
    names = plan.levels[0].caps.names  # all levels limit the same features
    titles = (*(f"max {name}" for name in names), "ranks", "cut", "exchange", "packs", "samples")
    rows = [
        (
            *(f"{cap:,}" for cap in level.caps.values),
            str(level.context),
            level.cut.value if level.context > 1 else "-",
            level.exchange.value if level.context > 1 else "-",
            f"{entry['packs']:,}",
            f"{entry['samples']:,}",
            " ".join(map(str, entry["recompute"])),
        )
        for level, entry in zip(plan.levels, entries, strict=True)
    ]
    return Table.of_rows("Levels of packs", (*titles, "recomputed by stage"), rows)


def balance_of(
    plan: Plan, data: "tuple[ScheduledPacks, Lengths] | None"
) -> dict[str, float | None]:
    """Return balance metrics of attention and its exchange by JSON key, each None without packs."""
    from omnibal.steps.balance_metrics import measure_packs

    names = (
        "attention_balance_ratio",
        "least_attention_balance_ratio",
        "communication_ratio",
        "exchanged_ratio",
        "tokens_per_rank",
    )
    if data is None or plan.data is None:
        return dict.fromkeys(names)
    packs, lengths = data
    dp = plan.parallel.data
    # Packs' tokens stand for their load, and 1 for the bound on packs: these metrics use neither.
    metrics = measure_packs(packs, lengths, plan.pack_levels, dp, packs.tokens, 1).as_dict()
    return {name: metrics[name] for name in names}
