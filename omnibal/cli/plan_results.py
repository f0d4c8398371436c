"""Results of `omnibal plan` by level of packs, and by window of a stream."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from omnibal.job.plan import Plan
from omnibal.report.table import Table

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.data.lengths import Lengths
    from omnibal.job.planner import PlanResult
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


def balance_of(
    plan: Plan, data: "tuple[ScheduledPacks, Lengths] | None"
) -> dict[str, float | None]:
    """Return balance metrics of attention and its exchange by JSON key, each None without packs."""
    from omnibal.packing.balance_metrics import measure_packs

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


class Dispatch(StrEnum):
    """Whether a window's samples are balanced over ranks, or its packs dealt in file order."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowFacts:
    """Max rank time over mean, both predicted and summed over steps, which are windows."""

    samples: int  # per window
    dispatch: Dispatch
    imbalance: float  # of the plan
    imbalance_as_read: float  # if packed in file order and not balanced

    @property
    def note(self) -> str:
        as_read = f"; as they are read, {self.imbalance_as_read:.3f} times"
        return (
            f"windows of {self.samples:,} samples: the busiest rank takes {self.imbalance:.3f} "
            f"times as long as the mean{as_read if self.dispatch is Dispatch.ON else ''}"
        )


def window_facts(result: "PlanResult") -> WindowFacts | None:
    """Return the imbalance of a plan and of file order, or None for a plan without windows."""
    from omnibal.job.job import JobSpec
    from omnibal.job.plan_data import StreamData
    from omnibal.packing.balance_metrics import imbalance, rank_sums

    stream = StreamData.of_plan(result.plan, result.data)
    if stream is None or result.data is None:
        return None
    job = JobSpec.of_plan(result.plan, result.cost_source)
    as_read = replace(stream, is_dispatched=False).schedule(job)[0]  # as plain loaders do
    planned, loaded = (
        imbalance(rank_sums(packs, job.load_ms(packs.packs, stream.lengths), job.parallel.data))
        for packs in (result.data[0], as_read)
    )
    return WindowFacts(
        samples=stream.window,
        dispatch=Dispatch.ON if stream.is_dispatched else Dispatch.OFF,
        imbalance=planned,
        imbalance_as_read=loaded,
    )
