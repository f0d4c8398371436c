"""Portions: large datasets are packed, stored and trained a few million samples at a time.

Samples are dealt to portions at random. Portions are packed separately and trained in sequence, so
a portion bounds the memory.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.packing.pack_settings import PackSettings

_PLACE_TYPE = np.uint16
_DEAL = 1  # with the number of portions, no pair of an epoch and a portion: a seed of its own
_DEALT_AT_ONCE = 1 << 22  # samples to draw portions for at once, to bound memory


@dataclass(frozen=True, slots=True)
class PortionPlace:
    epoch: int  # from 0
    number: int  # portion of the data, from 0, with the same samples in every epoch


FIRST_PORTION = PortionPlace(epoch=0, number=0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PortionedSamples:
    lengths: Lengths
    settings: PackSettings
    portion: np.ndarray  # portion of every sample, uint16 [samples]
    count: int  # number of portions

    @classmethod
    def deal(cls, lengths: Lengths, settings: PackSettings) -> Self | None:
        """Deal samples at random to the fewest portions of about `portion_samples`. None if one."""
        count = -(-len(lengths) // settings.portion_samples)
        if count < 2:
            return None
        rng = np.random.default_rng([settings.seed, _DEAL, count])
        portion = np.empty(len(lengths), _PLACE_TYPE)
        for first in range(0, len(portion), _DEALT_AT_ONCE):
            chunk = portion[first : first + _DEALT_AT_ONCE]
            chunk[:] = rng.integers(count, size=len(chunk))
        # Caps and levels are chosen on the first portion, so it has the largest samples.
        for name in (*lengths.item_names, "tokens", "loss_tokens"):
            portion[int(lengths.column(name).argmax())] = 0
        return cls(lengths=lengths, settings=settings, portion=portion, count=count)

    @property
    def epochs(self) -> int:
        return self.settings.epochs

    def samples(self, number: int) -> Lengths:
        """Return the samples of a portion in order, with their rows in the data as `sample`."""
        return self.lengths.take(np.flatnonzero(self.portion == number))

    def settings_of(self, place: PortionPlace) -> PackSettings:
        """Return settings to pack a portion in an epoch. The first keeps seed and curriculum."""
        if place == FIRST_PORTION:
            return replace(self.settings, epochs=1)
        key = [self.settings.seed, place.epoch, place.number]
        (drawn,) = np.random.SeedSequence(key).generate_state(1)
        return replace(self.settings, epochs=1, seed=int(drawn), curriculum_steps=0)
