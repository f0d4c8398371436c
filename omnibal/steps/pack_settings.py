"""Settings by which samples become packs and steps, from the command line to the steps."""

from dataclasses import dataclass

from omnibal.model.levels import FillRule
from omnibal.packing.packing import PackingMethod

PORTION_SAMPLES = 2_000_000
"""Most samples that are packed together, but for the chance of the deal. They take two GiB while
they are packed, a tenth of that on a rank, and leave thousands of steps to shuffle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """How samples become packs and steps, whatever limits packs have and ranks run them."""

    packing: PackingMethod = PackingMethod.BALANCED
    """Rule by which samples go together."""
    epochs: int = 1
    seed: int = 0
    curriculum_steps: int = 0
    """First steps of the first epoch, made of packs of the shortest level alone."""
    fill: FillRule = FillRule.COST
    """Rule for the short samples that fill the room of long packs, where there are levels."""
    portion_samples: int = PORTION_SAMPLES
    """Samples that are packed together, of more (`omnibal.steps.portions`)."""
