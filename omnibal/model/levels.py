"""Packing levels: packs of one size limit, and the context-parallel ranks that share each pack.

HBP (Hierarchical Balance Packing, arXiv 2503.07680, section 4) packs short and long samples to
different lengths, each with its own sequence-parallel size. Here a level's context size is its
context-parallel size: the number of data-parallel ranks that share each of its packs.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from omnibal.base.frozen import Frozen, written_unless
from omnibal.model.limits import Caps

MAX_CONTEXT = 4_096
"""Most ranks that may share a pack."""
MAX_LEVELS = 8  # most of a plan


class CutRule(StrEnum):
    """Rule by which the tokens of a shared pack are divided over its ranks."""

    CONTIGUOUS = "contiguous"
    """Equally many tokens each, in pack order."""
    COST = "cost"
    """Equal predicted cost each, in pack order."""
    ZIGZAG = "zigzag"
    """Two pieces of each sample a rank, one from its start and one from its end, which sum to equal
    attention."""
    WHOLE = "whole"
    """Short samples whole on one rank, long ones by zigzag."""


class ContextExchange(StrEnum):
    """Exchange by which attention reaches the tokens of other ranks."""

    GATHER = "gather"
    """All-gather of keys and values; backward scatters their gradients."""
    HEADS = "heads"
    """All-to-all from tokens to heads before attention, and back after it (DeepSpeed-Ulysses, arXiv
    2309.14509)."""


class FillRule(StrEnum):
    """Rule by which samples of short levels fill the room of long packs."""

    COST = "cost"
    """Samples that take less device time there than in a pack of their own level."""
    GREEDY = "greedy"
    """All that fit: GreedyFill of HBP (section 4)."""


class Level(Frozen):
    """Size limit of packs, and how the ranks that share one divide it."""

    caps: Caps
    """Caps of a whole pack, over all ranks that share it."""
    context: Annotated[int, Field(ge=1, le=MAX_CONTEXT, strict=True)] = 1
    """Data-parallel ranks that share a pack, a power of two: an aligned block of them."""
    cut: CutRule = CutRule.CONTIGUOUS
    exchange: ContextExchange = ContextExchange.GATHER
    attention_weight: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Cost of one squared token (`squared_tokens`) relative to that of one token, by which `cost`
    and `whole` balance."""
    image_weight: Annotated[float, Field(ge=0, le=1e6)] = written_unless(0.0)
    """Cost of one squared token of an image at its native resolution relative to that of one, by
    which images are dealt to ranks."""

    @field_validator("context")
    @classmethod
    def _power_of_two(cls, context: int) -> int:
        if context & (context - 1):
            raise ValueError(f"context is {context}, and must be a power of two: 1, 2, 4, 8 ...")
        return context


def are_plain(levels: Sequence[Level]) -> bool:
    """Whether all packs have the same limits, and each is one rank's."""
    return len(levels) == 1 and levels[0].context == 1


def largest_caps(levels: Sequence[Level]) -> Caps:
    """Largest cap of every feature over all levels, which must limit the same features."""
    names = levels[0].caps.names
    return Caps.of(**{name: max(level.caps[name] for level in levels) for name in names})
