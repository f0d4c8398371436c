"""Iterative sampling and filtering (ISF), OmniBal's packing (arXiv 2407.20761, Algorithm 1)."""

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.fit import Seed, check_samples_fit
from omnibal.packing.packs import Packs


def pack_isf(lengths: Lengths, caps: Caps, seed: Seed, *, iterations: int = 10) -> Packs:
    """Pack all samples by Algorithm 1 of the paper, with T = `iterations`.

    Each iteration shuffles the remaining samples, cuts them into groups up to the caps, and keeps
    groups with a sum at its threshold: the cap, or for tokens Qt - 128 as in the paper (below Qt =
    4096 in proportion, Qt - Qt / 32). Samples left after the last iteration are grouped and kept,
    which the paper leaves open.

    The authors' code differs: it silently drops samples larger than a cap (here an error), and the
    open group if the last sample is one; it keeps a group only if its tiles equal the threshold
    (here >=); it reuses the seed for the second shuffle; and it truncates packs to the token cap.
    """
    check_samples_fit(lengths, caps)
    full_from = caps.values
    full_from[-1] -= min(128, full_from[-1] // 32)
    rng = np.random.default_rng(seed)
    sizes, most = lengths.sizes(caps.names), caps.values
    left = np.arange(len(lengths))
    kept: list[np.ndarray] = []
    for _ in range(iterations):
        if not len(left):
            break
        left = rng.permutation(left)
        drawn = sizes[:, left]
        bounds = cut_groups(drawn, most)
        sums = np.add.reduceat(drawn, bounds[:-1], axis=1)
        full = np.any(sums >= full_from[:, None], axis=0)
        groups = np.split(left, bounds[1:-1])
        kept += [group for group, is_full in zip(groups, full, strict=True) if is_full]
        left = left[np.repeat(~full, np.diff(bounds))]
    if len(left):
        left = rng.permutation(left)
        kept += np.split(left, cut_groups(sizes[:, left], most)[1:-1])
    return Packs.from_lists(kept)


def cut_groups(sizes: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Bounds of greedy groups. Ends depend only on starts, so all are computed at once."""
    ends = np.min(
        [_ends(row, cap) for row, cap in zip(sizes, caps.tolist(), strict=True)], axis=0
    ).tolist()
    bounds = [0]
    while bounds[-1] < len(ends):
        bounds.append(ends[bounds[-1]])
    return np.array(bounds)


def _ends(sizes: np.ndarray, cap: int) -> np.ndarray:
    """Largest end per start such that sizes[start:end] sums to at most the cap."""
    sums = np.concatenate([[0], np.cumsum(sizes)])
    return np.searchsorted(sums, sums[:-1] + cap, side="right") - 1
