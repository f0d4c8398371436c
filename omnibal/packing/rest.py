"""Packing of the few hundred samples that patterns leave over: the best of several heuristics."""

import numpy as np

from omnibal.packing.best_fit import pack_best_fit, pack_first_fit, pack_nearest
from omnibal.packing.fill import fill_by_pairs, fill_one_by_one

_SIZE_VALUE = 1e-3  # value of a pack's full capacity added to the given values, which may be 0
_VALUE_NOISE = 0.02  # relative noise on values, so that epochs differ among equally good sets
_MAX_FILLED = 2000  # samples, for filling packs in turn
_MAX_TRIED_SAMPLES = 10_000  # for methods that try all samples or packs per placement


class Rest:
    """Samples to pack, with sizes relative to the caps."""

    def __init__(self, sizes: np.ndarray, caps: np.ndarray):
        """Take sizes, int64 [features, samples], and caps, int64 [features]."""
        self.sizes, self.caps = sizes, caps
        shares = sizes / caps[:, None]  # of a pack's capacity
        self.total, self.larger = shares.sum(axis=0), shares.max(axis=0)

    def take(self, samples: np.ndarray) -> "Rest":
        return Rest(self.sizes[:, samples], self.caps)

    def best_fit(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the fewest packs of best fit (three ways), and if few of first fit and nearest."""
        noise = self._noise(rng)
        total, larger = self.total * noise, self.larger * noise
        ways = [
            pack_best_fit(self.sizes, values, first, self.caps)
            for values, first in ((total, total), (total, larger), (larger, larger))
        ]
        if len(self.total) <= _MAX_TRIED_SAMPLES:
            ways.append(pack_first_fit(self.sizes, larger, self.caps))
            ways.append(pack_nearest(self.sizes, self.caps))
        return [np.array(pack) for pack in min(ways, key=len)]

    def pack(self, values: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the fewest packs of best fit and of filling by `values` [samples] and by size."""
        ways = [self.best_fit(rng)]
        # Duals sum to a lower bound on fractional packs: nothing to gain if best fit reaches it.
        if len(self.total) <= _MAX_FILLED and len(ways[0]) > np.ceil(values.sum() - 1e-6):
            worth = (values + _SIZE_VALUE * self.total) * self._noise(rng)
            ways.append(list(fill_one_by_one(self.sizes, worth, None, self.caps)))
            # Open packs with the largest sample left, and fill them by size.
            noise = self._noise(rng)
            arguments = (self.sizes, self.total * noise, self.larger * noise, self.caps)
            ways += [list(fill_one_by_one(*arguments)), list(fill_by_pairs(*arguments))]
        return min(ways, key=len)

    def _noise(self, rng: np.random.Generator) -> np.ndarray:
        return 1 + _VALUE_NOISE * rng.random(len(self.total))
