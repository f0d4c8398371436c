"""Packing of the few hundred samples that patterns leave over, by the best of several methods."""

import numpy as np

from omnibal.packing.best_fit import pack_best_fit, pack_first_fit, pack_nearest
from omnibal.packing.fill import fill_by_pairs, fill_one_by_one

_SIZE_VALUE = 1e-3
"""Value of a pack's full capacity added to the given values, which may be 0."""
_VALUE_NOISE = 0.02
"""Relative noise on values, so that epochs differ among equally good sets."""
_MAX_FILLED = 2000
"""Max samples for filling packs in turn."""
_MAX_LOOKED_AT = 10_000
"""Max samples for methods that try all samples or packs per placement."""


class Rest:
    """Samples to pack, with sizes relative to the caps."""

    def __init__(self, sizes: np.ndarray, caps: np.ndarray):
        """Compare sizes, int64 [features, samples], with caps, int64 [features]."""
        self.sizes, self.caps = sizes, caps
        shares = sizes / caps[:, None]
        self.total, self.larger = shares.sum(axis=0), shares.max(axis=0)

    def take(self, samples: np.ndarray) -> "Rest":
        return Rest(self.sizes[:, samples], self.caps)

    def best_fit(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Minimal packs by best fit (three size measures), first fit and nearest."""
        noise = self._noise(rng)
        total, larger = self.total * noise, self.larger * noise
        ways = [
            pack_best_fit(self.sizes, values, first, self.caps)
            for values, first in ((total, total), (total, larger), (larger, larger))
        ]
        if len(self.total) <= _MAX_LOOKED_AT:
            ways.append(pack_first_fit(self.sizes, larger, self.caps))
            ways.append(pack_nearest(self.sizes, self.caps))
        return [np.array(pack) for pack in min(ways, key=len)]

    def pack(self, values: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Packs [samples], by best fit and by filling with the values [samples]."""
        ways = [self.best_fit(rng)]
        if len(self.total) <= _MAX_FILLED and len(ways[0]) > np.ceil(values.sum() - 1e-6):
            worth = (values + _SIZE_VALUE * self.total) * self._noise(rng)
            ways.append(list(fill_one_by_one(self.sizes, worth, None, self.caps)))
            # Also opens packs with the largest sample left.
            noise = self._noise(rng)
            arguments = (self.sizes, self.total * noise, self.larger * noise, self.caps)
            ways += [list(fill_one_by_one(*arguments)), list(fill_by_pairs(*arguments))]
        return min(ways, key=len)

    def _noise(self, rng: np.random.Generator) -> np.ndarray:
        return 1 + _VALUE_NOISE * rng.random(len(self.total))
