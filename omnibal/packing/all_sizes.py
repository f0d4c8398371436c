"""Column generation over every distinct size of sample: patterns and values that are exact.

Types of similar sizes (`omnibal.packing.patterns`) are too coarse where packs hold two or three
samples. Here every size has its own row. Three things keep that fast:

- A pack that has room for a sample has room for a smaller one, so a column may trade a larger size
  for a smaller one at no cost. In the dual problem, a larger sample is worth no less (dual-optimal
  inequalities: Ben Amor, Desrosiers and Valério de Carvalho, Operations Research 54, 2006).
- Columns are priced at a mean of the best values so far and of the master's own (Wentges,
  International Transactions in Operational Research 4, 1997).
- The most valuable pack is found with sizes as they are (`omnibal.packing.best_pack`).
"""

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from omnibal.packing.best_pack import BestPack
from omnibal.packing.fit import size_keys
from omnibal.packing.master import Cover, Master
from omnibal.packing.packs import Packs

_MAX_EXCHANGES = 6
"""Larger sizes that each size is traded with, at most."""
_SMOOTHING = 0.5
"""Share of the best values so far in the values that columns are priced at."""
_MIN_GAIN = 1e-6  # relative, of a column that is worth adding
_ABOVE = 2e-4
"""Relative amount that a bound gives up, so that packs worth just 1 need not be searched."""
_MAX_NEW = 1000
"""Columns, in each round."""
_MAX_CELLS_OF_MASTER = 1e7
"""Most columns times sizes; beyond that, packs hold many samples and the master is slow."""
_MIN_COLUMNS = 2
"""Columns per size that are always allowed."""
_ROUNDING = 1e-9
"""Relative rounding error allowed for; float sums are more exact than that."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sizes:
    """Distinct sizes of samples, sorted by the first feature, then by the next."""

    amounts: np.ndarray
    """Amount of every feature in every size, int64 [features, sizes]."""
    of_sample: np.ndarray
    """Index of every sample's size, int64 [samples]."""

    def __len__(self) -> int:
        return self.amounts.shape[1]

    @classmethod
    def of(cls, sizes: np.ndarray) -> "Sizes":
        """Distinct sizes of samples, int64 [features, samples]."""
        keys, of_sample = np.unique(size_keys(sizes), return_inverse=True)
        amounts = np.empty((len(sizes), len(keys)), np.int64)
        amounts[:, of_sample] = sizes
        return cls(amounts=amounts, of_sample=of_sample)

    @property
    def counts(self) -> np.ndarray:
        """Samples of every size, int64 [sizes]."""
        return np.bincount(self.of_sample, minlength=len(self))

    def columns(self, packs: Packs) -> sparse.csr_array:
        """Count the samples of each size in packs that differ, float64 [columns, sizes]."""
        pack = np.repeat(np.arange(len(packs)), np.diff(packs.offsets))
        held = (np.ones(len(pack)), (pack, self.of_sample[packs.samples]))
        counts = sparse.csr_array(held, shape=(len(packs), len(self)))
        # Packs of the same counts have the same sum of random numbers, and others another one.
        drawn = np.random.default_rng(0).integers(1 << 62, size=len(self), dtype=np.uint64)
        _, first = np.unique(counts.astype(np.uint64) @ drawn, return_index=True)
        return counts[np.sort(first)]

    def exchanges(self) -> np.ndarray:
        """Pairs of sizes of which the second is no smaller in any feature, int64 [pairs, 2].

        Of all such pairs only some next ones; a chain of them leads on.
        """
        pairs = []
        tokens = self.amounts[-1]
        for size in range(len(self) - 1):
            # The first feature ascends. The next larger sizes are those with fewer tokens than all
            # before them.
            is_larger = (self.amounts[1:, size + 1 :] >= self.amounts[1:, [size]]).all(axis=0)
            larger = size + 1 + np.flatnonzero(is_larger)
            fewest = np.minimum.accumulate(np.concatenate([[1 << 40], tokens[larger[:-1]]]))
            next_ones = larger[tokens[larger] < fewest][:_MAX_EXCHANGES]
            pairs += [(size, other) for other in next_ones.tolist()]
        return np.array(pairs, np.int64).reshape(-1, 2)


class SizeMix:
    """Patterns that together cover a demand of sizes, of which more are made as they are needed."""

    def __init__(self, sizes: Sizes, caps: np.ndarray, packs: Packs, max_cells: int):
        """Start from some packs.

        Args:
            sizes: of all samples, each of which fits a pack.
            caps: of every pack, int64 [features].
            packs: of all samples.
            max_cells: of the knapsack's table.
        """
        self.sizes, self.caps = sizes, caps
        self.exchanges = sizes.exchanges()
        self.columns = sizes.columns(packs)
        used = np.clip(sizes.amounts @ sizes.counts, 1, caps)
        self._best = BestPack(sizes.amounts, used, max_cells)
        self._max_columns = max(_MAX_CELLS_OF_MASTER / len(sizes), _MIN_COLUMNS * len(sizes))
        self._master = Master(sizes.counts, self.exchanges)
        self._master.add(self.columns)

    def cover(
        self, demand: np.ndarray, *, max_rounds: int, wanted: int | None = None
    ) -> Cover | None:
        """Cover some samples by the fewest packs, over all columns so far.

        Args:
            demand: samples of every size, int64 [sizes].
            max_rounds: of new columns.
            wanted: packs, which columns are searched for until it is proven that there can be no
                fewer; None for no search.

        Returns:
            None where the master problem takes too long.
        """
        return self._cover(demand, max_rounds, wanted)[0]

    def bound(self, *, max_rounds: int, wanted: int) -> float:
        """Lower bound on the packs of all samples, over all fractional covers.

        Args:
            max_rounds: of new columns.
            wanted: packs; a bound that rounds up to as many is as good as any.
        """
        return self._cover(self.sizes.counts, max_rounds, wanted)[1]

    def _cover(
        self, demand: np.ndarray, max_rounds: int, wanted: int | None
    ) -> tuple[Cover | None, float]:
        self._master.change_demand(demand)
        bound, best_values = 0.0, None
        cover = self._master.solve()
        if cover is None:
            return None, bound
        for _ in range(max_rounds):
            tried = [cover.values]
            if best_values is not None:
                tried.insert(0, _SMOOTHING * best_values + (1 - _SMOOTHING) * cover.values)
            for values in tried:
                needed = wanted if values is cover.values else None
                most, patterns = self._best_packs(values, demand, needed)
                found = patterns[patterns @ cover.values > 1 + _MIN_GAIN][:_MAX_NEW]
                proven = float(values @ demand) / most * (1 - _ROUNDING)
                if proven > bound:
                    bound, best_values = proven, values / most
                if len(found):
                    break
            # Packs come in whole numbers, so the bound rounded up may be all there is to prove.
            proven_all = np.ceil(bound) >= min(cover.packs, wanted or cover.packs)
            if proven_all or not len(found) or self.columns.shape[0] > self._max_columns:
                break
            new = sparse.csr_array(found.astype(np.float64))
            self.columns = sparse.vstack([self.columns, new], format="csr")
            self._master.add(new)
            solved = self._master.solve()
            if solved is None:
                break
            cover = solved
        return cover, bound

    def _best_packs(
        self, values: np.ndarray, demand: np.ndarray, wanted: int | None
    ) -> tuple[float, np.ndarray]:
        """Upper bound on the worth of a pack, and some of the best packs, int64 [patterns, sizes].

        With a bound `wanted`, both are searched for where the first try neither proves it nor finds
        packs worth more than 1.
        """
        priced = self._best.price(values, demand)
        patterns = self._best.patterns(priced, _MAX_NEW)
        found = (patterns @ values > 1 + _MIN_GAIN).any()
        if wanted is None or found or np.ceil(values @ demand / priced.most) >= wanted:
            return priced.most, patterns
        most, patterns = self._best.most(priced, 1 + _ABOVE)
        return most, patterns[np.argsort(-(patterns @ values), kind="stable")]
