"""Results of `omnibal plan` about levels: packs of several sizes."""

from typing import TYPE_CHECKING, Any

from omnibal.job.plan import Plan
from omnibal.report.table import Table

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.data.lengths import Lengths
    from omnibal.packing.packs import ScheduledPacks


def levels_of_plan(plan: Plan, packs: "ScheduledPacks | None") -> list[dict[str, Any]]:
    """Return every level of a plan for JSON, by default of context size 1.

    Packs and samples are of all epochs, or None for a plan of shapes only.
    """
    import numpy as np

    samples = None if packs is None else np.diff(packs.packs.offsets)
    found = []
    for index, level in enumerate(plan.pack_levels):
        here = None if packs is None else packs.level == index
        found.append(
            {
                **level.caps.model_dump(mode="json"),
                "context": level.context,
                "packs": None if here is None else int(here.sum()),
                "samples": None if here is None or samples is None else int(samples[here].sum()),
                "recompute": [
                    each.recomputed_layers for each in plan.merge_chunks(plan.stages_at(index))
                ],
            }
        )
    return found


def levels_table(plan: Plan, packs: "ScheduledPacks | None") -> Table | None:
    """Table of a plan's levels, or None for a single level of context size 1."""
    if not plan.levels:
        return None
    entries = levels_of_plan(plan, packs)
    names = plan.levels[0].caps.names
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
    """Return attention balance and exchange, by JSON keys."""
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
    metrics = measure_packs(packs, lengths, plan.pack_levels, dp, packs.tokens, 1).as_dict()
    return {name: metrics[name] for name in names}
