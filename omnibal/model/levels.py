"""Levels: caps of packs with a context-parallel size of their own, for short and for long samples
(Hierarchical Balance Packing, HBP, arXiv 2503.07680, section 4).
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from omnibal.base.frozen import Frozen, written_unless
from omnibal.model.config import ModelConfig
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel

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


def exchange_mistake(model: ModelConfig, parallel: Parallel, level: Level) -> str | None:
    """Return why attention, its heads or lockstep ranks rule out a level, or None."""
    lockstep_ranks = parallel.lockstep_ranks
    if level.context % lockstep_ranks and lockstep_ranks % level.context:
        ranks = f"the {lockstep_ranks} lockstep ranks of {parallel.options}"
        return f"context size {level.context} and {ranks} must divide one another: change either"
    if level.context > 1 and any(kind.attention == "linear" for kind in model.language.kinds):
        return f"{model.name} has linear attention: use levels of context size 1"
    # Latent attention has a key and value for every head.
    language, is_latent = model.language, any(kind.latent for kind in model.language.kinds)
    all_heads = language.heads if is_latent else language.kv_heads
    heads, remainder = divmod(all_heads, parallel.tensor)
    is_gather = level.exchange is ContextExchange.GATHER
    if is_gather or level.context == 1 or (not remainder and heads % level.context == 0):
        return None
    rule = f"context size {level.context} with exchange of heads must divide the key-value heads"
    has = f"{model.name} has {all_heads} over {parallel.tensor}"
    return f"{rule} of a tensor-parallel rank, and {has}; exchange by gather, or lower it"
