"""Portions: samples that are too many are packed, stored and trained a few million at a time.

Every sample is dealt to a portion at random, so that each portion is like the whole. It is packed
and put into steps by itself, and its steps follow those of the one before. Memory of everything but
the dealing then goes by the portion and not by the data.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.steps.pack_settings import PackSettings

_PLACE_TYPE = np.uint16
_DEAL = 1  # its key beside the seed: epochs have keys of their own
_DEALT_AT_ONCE = 1 << 22
"""Samples that portions are drawn for at once, so that 64-bit draws are never there of all."""


@dataclass(frozen=True, slots=True)
class PortionPlace:
    """A portion of the data in an epoch."""

    epoch: int
    number: int
    """Portion of the data, the same samples in every epoch."""


FIRST_PORTION = PortionPlace(epoch=0, number=0)
"""The portion that is trained first."""


def all_places(epochs: int, count: int) -> Iterator[PortionPlace]:
    """List `count` portions of every epoch in the order in which they are trained."""
    for epoch in range(epochs):
        for number in range(count):
            yield PortionPlace(epoch, number)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PortionedSamples:
    """All samples of a dataset, dealt to portions."""

    lengths: Lengths
    settings: PackSettings
    """Settings of the whole run."""
    portion: np.ndarray
    """Portion of every sample, uint16 [samples]."""
    count: int
    """Number of portions."""

    @classmethod
    def of(cls, lengths: Lengths, settings: PackSettings) -> Self | None:
        """Deal samples to as few portions of about the settings' size as there can be.

        The first has the samples of most items and tokens.

        Returns:
            The samples; None where one portion has all.
        """
        count = -(-len(lengths) // settings.portion_samples)
        if count < 2:
            return None
        rng = np.random.default_rng([settings.seed, _DEAL, count])
        portion = np.empty(len(lengths), _PLACE_TYPE)
        for first in range(0, len(portion), _DEALT_AT_ONCE):
            some = portion[first : first + _DEALT_AT_ONCE]
            some[:] = rng.integers(count, size=len(some))
        # Caps and levels are chosen for the first, and must do for all.
        for name in (*lengths.item_names, "tokens", "loss_tokens"):
            portion[int(lengths.column(name).argmax())] = 0
        return cls(lengths=lengths, settings=settings, portion=portion, count=count)

    @property
    def epochs(self) -> int:
        """Times that every sample is trained."""
        return self.settings.epochs

    def samples(self, number: int) -> Lengths:
        """The samples of a portion, in their order, with their rows in the data as `sample`."""
        return self.lengths.take(np.flatnonzero(self.portion == number))

    def settings_of(self, place: PortionPlace) -> PackSettings:
        """Settings by which a portion is packed: one epoch of it, with draws of its own."""
        if place == FIRST_PORTION:
            return replace(self.settings, epochs=1)
        key = [self.settings.seed, place.epoch, place.number]
        (drawn,) = np.random.SeedSequence(key).generate_state(1)
        return replace(self.settings, epochs=1, seed=int(drawn), curriculum_steps=0)
