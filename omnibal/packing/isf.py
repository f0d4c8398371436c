"""Iterative sampling and filtering (ISF), OmniBal's packing (arXiv 2407.20761, Algorithm 1)."""

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.fit import Seed, check_samples_fit
from omnibal.packing.packs import Packs


def pack_isf(lengths: Lengths, caps: Caps, seed: Seed, *, iterations: int = 10) -> Packs:
    """Pack all samples by Algorithm 1 of the paper, with T = `iterations`.

    Each iteration shuffles the remaining samples, cuts them into groups up to the caps, and keeps
    groups with a sum of at least its threshold: the cap, and for tokens `Qt - min(128, Qt / 32)`.
    Samples left after the last iteration are grouped and kept, which the paper leaves open.

    The authors' code differs: it silently drops samples larger than a cap (here an error), and the
    open group if the last sample is larger; it keeps a group only if its tiles equal the threshold
    (here >=); it reuses the seed for the second shuffle; and it truncates packs to the token cap.
    """
    check_samples_fit(lengths, caps)
    threshold = caps.values
    threshold[-1] -= min(128, threshold[-1] // 32)  # the paper's Qt - 128, less for Qt < 4096
    rng = np.random.default_rng(seed)
    sizes, cap_values = lengths.sizes(caps.names), caps.values
    left = np.arange(len(lengths))
    kept: list[np.ndarray] = []
    for _ in range(iterations):
        if not len(left):
            break
        left = rng.permutation(left)
        drawn = sizes[:, left]
        bounds = cut_groups(drawn, cap_values)
        sums = np.add.reduceat(drawn, bounds[:-1], axis=1)  # [features, groups]
        full = np.any(sums >= threshold[:, None], axis=0)
        groups = np.split(left, bounds[1:-1])
        kept += [group for group, is_full in zip(groups, full, strict=True) if is_full]
        left = left[np.repeat(~full, np.diff(bounds))]
    if len(left):
        left = rng.permutation(left)
        kept += np.split(left, cut_groups(sizes[:, left], cap_values)[1:-1])
    return Packs.from_lists(kept)


def cut_groups(sizes: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Return bounds [groups + 1] of next-fit groups of sizes [features, samples], in order."""
    # An end depends only on its start, so the ends of all starts are computed at once.
    ends = np.full(sizes.shape[1], sizes.shape[1])
    for row, cap in zip(sizes, caps.tolist(), strict=True):
        sums = np.concatenate([[0], np.cumsum(row)])
        ends = np.minimum(ends, np.searchsorted(sums, sums[:-1] + cap, side="right") - 1)
    bounds, end_of = [0], ends.tolist()
    while bounds[-1] < len(end_of):
        bounds.append(end_of[bounds[-1]])
    return np.array(bounds)
