"""Balance over ranks of `omnibal plan --window`, which trains samples in file order."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports scipy, which `omnibal --help` should not wait for
    from omnibal.job.planner import PlanResult


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
    from omnibal.steps.balance_metrics import imbalance, rank_sums

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
