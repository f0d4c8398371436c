"""Levels by the rule of HBP, from how long packs of every length take.

Hierarchical Balance Packing (arXiv 2503.07680, Algorithm 1) measures packs of some lengths with
every context size, each with the least recomputation that fits, and derives at most four levels
from the fastest length and the longest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from omnibal.base.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledLength:
    """Time to train packs of one length with one context size."""

    tokens: int
    """Length of a pack."""
    context: int
    """Ranks that share a pack."""
    ms: float
    """Time for equally many tokens at every length, with the least recomputation that fits."""


def hbp_levels(profiled: Sequence[ProfiledLength]) -> tuple[tuple[int, int], ...]:
    """Choose levels, as (length, context size) from short to long, by HBP's Algorithm 1.

    1. Of every length the fastest context size is kept.
    2. The fastest length is a level, and so is the longest.
    3. What one rank has of a pack of the fastest length is a level of context size 1: samples of
       that length fit one rank in the same memory, without communication. What one rank has of a
       pack of the longest length is another such level, if it is not below the fastest length.

    Example:
        >>> figures = [(8, 2, 2.69), (16, 1, 2.65), (32, 8, 2.83), (64, 4, 3.01), (128, 8, 3.05)]
        >>> hbp_levels([ProfiledLength(tokens=n, context=c, ms=t) for n, c, t in figures])
        ((16, 1), (128, 8))
    """
    if not profiled:
        raise UserError(
            "no length of packs can be trained with any context size, so that there is nothing to "
            "choose levels from: use more or larger devices, or shorten the longest samples"
        )
    fastest: dict[int, ProfiledLength] = {}
    for each in sorted(profiled, key=lambda one: (one.tokens, one.ms, one.context)):
        fastest.setdefault(each.tokens, each)
    best = min(fastest.values(), key=lambda one: (one.ms, one.tokens))
    longest = fastest[max(fastest)]
    chosen = {longest.tokens: longest.context, best.tokens: best.context}
    part = longest.tokens // longest.context
    if part >= best.tokens:
        chosen.setdefault(part, 1)
    chosen.setdefault(best.tokens // best.context, 1)
    return tuple(sorted(chosen.items()))
