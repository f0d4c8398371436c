"""Settings by which samples become packs and steps, from the command line to the steps."""

from dataclasses import dataclass

from omnibal.model.levels import FillRule
from omnibal.packing.packing import PackingMethod


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
