"""Packs of few distinct sizes: column generation over exact sizes, its solution rounded down.

With caps on several features a knapsack table is coarse, and only guides the search.
"""

import numpy as np

from omnibal.packing.fit import size_keys
from omnibal.packing.pack_bound import SizeCounts
from omnibal.packing.packs import Packs
from omnibal.packing.patterns import CapGrid, knapsack_table, solve_master
from omnibal.packing.rest import Rest

_MAX_GUIDE_CELLS = 1 << 16  # of the knapsack table that guides the beam search
_MAX_PRICING_ROUNDS = 100
_MAX_PARTIAL = 1000  # beam width, in packs
_WORTH_ROUNDING = 1e-6


def pack_few_sizes(
    sizes: np.ndarray, caps: np.ndarray, packs: Packs, rng: np.random.Generator
) -> Packs:
    """Return fewer packs if found for sizes [features, samples] and caps, otherwise `packs`."""
    distinct = SizeCounts.from_sizes(sizes)
    size_of = np.searchsorted(size_keys(distinct.amounts), size_keys(sizes))
    cells = packs.pack_of_sample * len(distinct) + size_of[packs.samples]
    columns = np.bincount(cells, minlength=len(packs) * len(distinct)).reshape(len(packs), -1)
    columns = np.unique(columns, axis=0)  # [patterns, sizes]
    master = solve_master(columns, distinct.counts)
    for _ in range(_MAX_PRICING_ROUNDS):
        max_worth, patterns = _valuable_patterns(distinct, caps, master.values)
        # Farley's bound: no packing has fewer than packs / max_worth.
        if not len(patterns) or master.packs / max_worth > len(packs) - 1:
            break
        columns = np.vstack([columns, patterns])
        master = solve_master(columns, distinct.counts)
    if master.packs > len(packs) - 1:
        return packs
    times = np.floor(master.times + _WORTH_ROUNDING).astype(np.int64)
    by_size = [rng.permutation(np.flatnonzero(size_of == size)) for size in range(len(distinct))]
    made = []
    for pattern in np.repeat(columns, times, axis=0):
        taken = []
        for size in np.flatnonzero(pattern):
            # Patterns may cover more samples than exist: the last packs with a size get fewer.
            chosen, by_size[size] = np.split(by_size[size], [pattern[size]])
            taken.append(chosen)
        made.append(np.concatenate(taken))
    left = np.concatenate(by_size)
    rest = Rest(sizes.take(left, axis=1), caps).pack(master.values[size_of[left]], rng)
    made += [left[pack] for pack in rest]
    return Packs.from_lists(list(filter(len, made))) if len(made) < len(packs) else packs


def _valuable_patterns(
    distinct: SizeCounts, caps: np.ndarray, values: np.ndarray
) -> tuple[float, np.ndarray]:
    """Return a bound on the worth of a pack, and the best pack worth > 1 per size, [packs, sizes].

    Beam search: a table of rounded-down sizes bounds worth (too low for tokens below one unit).
    """
    grid = CapGrid.from_caps(caps, _MAX_GUIDE_CELLS)
    units = distinct.amounts // grid.units[:, None]
    units[-1] = np.maximum(units[-1], 1)
    table = knapsack_table(values, units, grid).ravel()
    sizes = np.arange(len(distinct))
    packs, left = np.zeros((1, len(distinct)), np.int64), caps[:, None]
    last, worth = np.zeros(1, np.int64), np.zeros(1)
    valuable = [packs[:0]]
    while len(packs):
        after = left[:, :, None] - distinct.amounts[:, None]  # [features, packs, sizes]
        fits = (after >= 0).all(axis=0) & (sizes >= last[:, None]) & (packs < distinct.counts)
        pack, added = np.nonzero(fits)
        left, worth = after[:, pack, added], worth[pack] + values[added]
        reach = worth + table[grid.places(left // grid.units[:, None])]
        kept = np.flatnonzero(reach > 1 + _WORTH_ROUNDING)
        kept = kept[np.argsort(-reach[kept], kind="stable")[:_MAX_PARTIAL]]
        packs, left, last, worth = packs[pack[kept]], left[:, kept], added[kept], worth[kept]
        packs[np.arange(len(kept)), last] += 1
        valuable.append(packs[worth > 1 + _WORTH_ROUNDING])
    patterns = np.concatenate(valuable)
    # The best pattern with each size, as the overall best are nearly identical.
    best = np.where(patterns > 0, (patterns @ values)[:, None], 0.0)
    chosen = np.unique(best.argmax(axis=0)) if len(patterns) else slice(0)
    return float(max(table[-1], 1)), patterns[chosen]
