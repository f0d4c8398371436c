"""Settings for packing samples into steps."""

from dataclasses import dataclass

from omnibal.model.levels import FillRule
from omnibal.packing.packing import PackingMethod

PORTION_SAMPLES = 2_000_000
"""Max samples packed together, about: two GiB while packing, thousands of steps to shuffle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """Settings for packing samples into steps, independent of caps and ranks."""

    packing: PackingMethod = PackingMethod.BALANCED
    epochs: int = 1
    seed: int = 0
    samples_per_step: int | None = None
    """Mean samples of all ranks per step. None for steps of equally many packs."""
    curriculum_steps: int = 0
    """First steps of the first epoch, with packs of the shortest level only."""
    fill: FillRule = FillRule.COST
    """Rule for short samples that fill up long packs with several levels."""
    portion_samples: int = PORTION_SAMPLES
    """Max samples packed together, else split (`omnibal.steps.portions`)."""
