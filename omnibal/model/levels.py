"""Levels: caps of packs with a context-parallel size of their own, for short and for long samples
(Hierarchical Balance Packing, HBP, arXiv 2503.07680, section 4).
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from omnibal.base.frozen import Frozen, written_unless
from omnibal.model.limits import Caps

MAX_CONTEXT = 4_096  # context-parallel size
MAX_LEVELS = 8  # of a plan


class CutRule(StrEnum):
    """Division of a pack's tokens over its context-parallel ranks."""

    CONTIGUOUS = "contiguous"  # equal token counts, in pack order
    COST = "cost"  # equal predicted cost, in pack order
    ZIGZAG = "zigzag"  # rank i of n has chunks i and 2n - 1 - i of every sample: equal attention
    WHOLE = "whole"  # short samples undivided on a rank, long samples by zigzag


class ContextExchange(StrEnum):
    """Exchange of attention between context-parallel ranks."""

    GATHER = "gather"  # all-gather of keys and values; backward reduce-scatters their gradients
    HEADS = "heads"  # all-to-all from tokens to heads and back (Ulysses, arXiv 2309.14509)


class FillRule(StrEnum):
    """Rule that fills free capacity of long packs with short samples."""

    COST = "cost"  # samples that take less device time there than in their own level
    GREEDY = "greedy"  # all that fit (GreedyFill of HBP, section 4)


class Level(Frozen):
    """Caps of packs, and their division over ranks."""

    caps: Caps  # of a pack, summed over its ranks
    # Context-parallel size: a pack's ranks are an aligned block of data-parallel ranks.
    context: Annotated[int, Field(ge=1, le=MAX_CONTEXT, strict=True)] = 1
    cut: CutRule = CutRule.CONTIGUOUS
    exchange: ContextExchange = ContextExchange.GATHER
    # Cost of a squared token / cost of a token, for the cut rules `cost` and `whole`.
    attention_weight: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    # The same of image tokens, to balance images over ranks.
    image_weight: Annotated[float, Field(ge=0, le=1e6)] = written_unless(0.0)

    @field_validator("context")
    @classmethod
    def _power_of_two(cls, context: int) -> int:
        if context & (context - 1):
            raise ValueError(f"context {context} must be a power of two: 1, 2, 4, 8 ...")
        return context


def are_plain(levels: Sequence[Level]) -> bool:
    """Return whether there is a single level, without context parallelism."""
    return len(levels) == 1 and levels[0].context == 1


def largest_caps(levels: Sequence[Level]) -> Caps:
    """Return the max cap by feature over levels, which limit the same features."""
    names = levels[0].caps.names
    return Caps.of(**{name: max(level.caps[name] for level in levels) for name in names})
