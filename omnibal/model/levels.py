"""Packing levels: a size limit of packs, and the context-parallel size of each pack.

HBP (Hierarchical Balance Packing, arXiv 2503.07680, section 4) packs short and long samples to
different lengths, each with its own context-parallel size.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from omnibal.base.frozen import Frozen, written_unless
from omnibal.model.limits import Caps

MAX_CONTEXT = 4_096  # max context-parallel size
MAX_LEVELS = 8  # max levels of a plan


class CutRule(StrEnum):
    """Rule that divides the tokens of a shared pack over its ranks."""

    CONTIGUOUS = "contiguous"  # equal token counts, in pack order
    COST = "cost"  # equal predicted cost, in pack order
    ZIGZAG = "zigzag"
    """Two pieces per sample and rank, from its start and end, with equal attention in sum."""
    WHOLE = "whole"  # short samples undivided on one rank, long samples by zigzag


class ContextExchange(StrEnum):
    """Exchange of attention between context-parallel ranks."""

    GATHER = "gather"  # all-gather of keys and values; backward reduce-scatters their gradients
    HEADS = "heads"
    """All-to-all from tokens to heads and back (DeepSpeed-Ulysses, arXiv 2309.14509)."""


class FillRule(StrEnum):
    """Rule that fills free capacity of long packs with short samples."""

    COST = "cost"  # samples that take less device time there than in a pack of their own level
    GREEDY = "greedy"  # all that fit (GreedyFill of HBP, section 4)


class Level(Frozen):
    """Size limit of packs, and their division over ranks."""

    caps: Caps  # caps of a pack, over all its ranks
    context: Annotated[int, Field(ge=1, le=MAX_CONTEXT, strict=True)] = 1
    """Context-parallel size, a power of two: an aligned block of data-parallel ranks."""
    cut: CutRule = CutRule.CONTIGUOUS
    exchange: ContextExchange = ContextExchange.GATHER
    attention_weight: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Cost of a squared token relative to a token, for the cut rules `cost` and `whole`."""
    image_weight: Annotated[float, Field(ge=0, le=1e6)] = written_unless(0.0)
    """Cost of a squared image token relative to an image token, to balance images over ranks."""

    @field_validator("context")
    @classmethod
    def _power_of_two(cls, context: int) -> int:
        if context & (context - 1):
            raise ValueError(f"context is {context}, and must be a power of two: 1, 2, 4, 8 ...")
        return context


def are_plain(levels: Sequence[Level]) -> bool:
    """Whether all packs have the same limits and context size 1."""
    return len(levels) == 1 and levels[0].context == 1


def largest_caps(levels: Sequence[Level]) -> Caps:
    """Largest cap of every feature over all levels, which must limit the same features."""
    names = levels[0].caps.names
    return Caps.of(**{name: max(level.caps[name] for level in levels) for name in names})
