"""`omnibal plan --window`: balance of streams, which are trained in file order."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.job.planner import PlanResult


class Dispatch(StrEnum):
    """Balancing of a window's samples over ranks."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowFacts:
    """Balance of a plan's windows over ranks: max / mean predicted rank time, over all steps."""

    samples: int  # of a window
    dispatch: Dispatch
    imbalance: float
    imbalance_as_read: float  # of packs by next fit, dealt round robin

    @property
    def note(self) -> str:
        as_read = f"; as they are read, {self.imbalance_as_read:.3f} times"
        return (
            f"windows of {self.samples:,} samples: the busiest rank takes {self.imbalance:.3f} "
            f"times as long as the mean{as_read if self.dispatch is Dispatch.ON else ''}"
        )


def window_facts(result: "PlanResult") -> WindowFacts | None:
    """Return the balance of a plan's windows and of a plain loader, or None without windows."""
    from omnibal.job.job import JobSpec
    from omnibal.job.plan_data import StreamData
    from omnibal.steps.balance_metrics import imbalance, rank_sums

    stream = StreamData.of_plan(result.plan, result.data)
    if stream is None or result.data is None:
        return None
    job = JobSpec.of_plan(result.plan, result.cost_source)
    as_read = replace(stream, is_dispatched=False).schedule(job)[0]  # as a plain loader would
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
