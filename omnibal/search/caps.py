"""Caps of packs to try: of items such as tiles (Qv in OmniBal's paper) and of tokens (Qt).

Larger packs pay fixed costs less often; smaller packs mean more micro-batches, less bubble and less
recomputation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.job.plan_data import caps_of_tokens, smallest_caps
from omnibal.model.limits import Caps
from omnibal.search.strategy import StrategyRequest

_GRID_FACTORS = tuple(2 ** (step / 2) for step in range(5))
"""Token caps of the grid, relative to the minimum."""
MOST_IN_GRID = len(_GRID_FACTORS)
"""Max caps of a grid, which has fewer if some are equal: few token steps, or a fixed cap."""
_TOKEN_STEPS = 8  # min number of token steps, a power of two each, in the smallest token cap
_COMMON_SHARE = 1 / 8  # min share of all items for a per-sample count to be common


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CapSpace:
    """Caps that a search by time may reach. Every sample fits the smallest."""

    items: dict[str, "_ItemAxis"]  # caps of every limited feature except tokens
    tokens: np.ndarray
    """Token caps, int64: ascending multiples of a power of two up to 4 times the min, or fixed."""
    of_tokens: Callable[[int], Caps] | None = None
    """Function from a token cap to all caps, if tokens alone limit packs."""

    @classmethod
    def for_lengths(
        cls, lengths: Lengths, names: Sequence[str], fixed: Mapping[str, int] | None = None
    ) -> "CapSpace":
        """Return the cap space of these features for these lengths, with some caps fixed."""
        least = smallest_caps(lengths, names)
        unit = 1 << max((least["tokens"] // _TOKEN_STEPS).bit_length() - 1, 0)
        first = -(-least["tokens"] // unit) * unit  # rounded up to the unit
        tokens = np.arange(first, _GRID_FACTORS[-1] * first + 1, unit, dtype=np.int64)
        items = {
            name: _ItemAxis.from_lengths(lengths, name, int(tokens[-1]))
            for name in least.names
            if name != "tokens"
        }
        for name, cap in (fixed or {}).items():
            if name == "tokens":
                tokens = np.array([cap])
            else:
                items[name] = replace(items[name], caps=np.array([cap]))
        return cls(items=items, tokens=tokens)

    @property
    def smallest_caps(self) -> Caps:
        return self._caps({name: int(caps[0]) for name, caps in self._axes().items()})

    def grid(self) -> list[Caps]:
        """Return caps with one to four times the minimum tokens, and items in proportion."""
        tokens = (_nearest(self.tokens, factor * self.tokens[0]) for factor in _GRID_FACTORS)
        every = (
            self._caps({**{name: a.matching(cap) for name, a in self.items.items()}, "tokens": cap})
            for cap in tokens
        )
        return list(dict.fromkeys(every))

    def moves(self, caps: Caps, factor: float) -> list[Caps]:
        """Return caps with one or all features smaller or larger by about the factor."""
        less, more = (
            {name: _move_cap(axis, caps[name], by) for name, axis in self._axes().items()}
            for by in (1 / factor, factor)
        )
        now = {name: caps[name] for name in less}
        around = [
            less,
            *({**now, name: cap} for name, cap in less.items()),
            *({**now, name: cap} for name, cap in more.items()),
            more,
        ]
        return [self._caps(moved) for moved in around]

    def _caps(self, of_axes: Mapping[str, int]) -> Caps:
        if self.of_tokens is not None:
            return self.of_tokens(of_axes["tokens"])
        return Caps.of(**of_axes)

    def _axes(self) -> dict[str, np.ndarray]:
        return {**{name: axis.caps for name, axis in self.items.items()}, "tokens": self.tokens}


def cap_space(request: StrategyRequest) -> CapSpace:
    """Return the cap space of a request's samples, with its fixed caps, under its pack rules."""
    names, fixed = request.limited_features, request.fixed_caps
    if not request.rules.tokens_alone:
        return CapSpace.for_lengths(request.lengths, names, fixed)
    of_tokens = partial(caps_of_tokens, request.lengths, names)
    return replace(CapSpace.for_lengths(request.lengths, ["tokens"], fixed), of_tokens=of_tokens)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ItemAxis:
    """Caps of one item kind, such as tiles."""

    caps: np.ndarray
    """Caps, int64, ascending: the max items of a sample, and larger sums of common counts."""
    per_token: float  # mean items per token
    main: int  # per-sample count that covers the most items; 1 if there are no items

    @classmethod
    def from_lengths(cls, lengths: Lengths, name: str, most_tokens: int) -> "_ItemAxis":
        """Return the caps of an item for these samples, for token caps up to `most_tokens`."""
        column = lengths.column(name)
        least = max(int(column.max()), 1)
        held = np.bincount(column) * np.arange(int(column.max()) + 1)  # items by count per sample
        per_token = float(held.sum() / lengths.tokens.sum(dtype=np.int64))
        common = np.flatnonzero(held >= max(_COMMON_SHARE * held.sum(), 1)).tolist()
        sums = _sums(
            common or [1], math.ceil(max(_GRID_FACTORS[-1] * least, per_token * most_tokens))
        )
        return cls(
            caps=np.concatenate([[least], sums[sums > least]]),
            per_token=per_token,
            main=max(int(held.argmax()), 1),
        )

    def matching(self, tokens: int) -> int:
        """Return the cap that fills with a token cap, by mean items or samples of `main` items."""
        matched = tokens * self.per_token
        whole = round(matched / self.main) * self.main
        # The larger cap, so that tokens limit the pack.
        return max(_nearest(self.caps, matched), _nearest(self.caps, whole))


def _sums(parts: Sequence[int], most: int) -> np.ndarray:
    """Return all sums up to `most` of repeatable parts, int64, ascending from 0."""
    reached = np.zeros(most + 1, bool)  # subset sums by dynamic programming
    reached[0] = True
    for part in parts:
        times = part
        while times <= most:
            # Doubling: the reachable multiples of `part` double in each round.
            reached[times:] |= reached[:-times]
            times *= 2
    return np.flatnonzero(reached)


def _nearest(axis: np.ndarray, value: float) -> int:
    return int(axis[np.abs(axis - value).argmin()])


def _move_cap(axis: np.ndarray, value: int, factor: float) -> int:
    """Return the entry nearest to `factor` times `value`, at least one step away if possible."""
    old, new = (int(np.abs(axis - near).argmin()) for near in (value, value * factor))
    new = max(new, old + 1) if factor > 1 else min(new, old - 1)
    return int(axis[min(max(new, 0), len(axis) - 1)])
