"""Settings for packing samples into steps."""

from dataclasses import dataclass

from omnibal.model.levels import FillRule
from omnibal.packing.packing import PackingMethod

PORTION_SAMPLES = 2_000_000  # about two GiB while packing, and thousands of steps to shuffle


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """Settings for packing samples into steps, independent of caps and ranks."""

    packing: PackingMethod = PackingMethod.BALANCED
    epochs: int = 1
    seed: int = 0
    samples_per_step: int | None = None  # Mean, all ranks. None: equal packs per step.
    curriculum_steps: int = 0  # number of first steps with packs of the shortest level only
    fill: FillRule = FillRule.COST  # rule for short samples in packs of longer levels
    portion_samples: int = PORTION_SAMPLES  # max mean samples of a portion, packed together
