"""Iterative sampling and filtering (ISF), OmniBal's packing (arXiv 2407.20761, Algorithm 1)."""

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.fit import Seed, check_samples_fit
from omnibal.packing.packs import Packs


def pack_isf(lengths: Lengths, caps: Caps, seed: Seed, *, iterations: int = 10) -> Packs:
    """Pack all samples by Algorithm 1 of the paper.

    Each iteration shuffles the samples that are left, cuts them into consecutive groups as long as
    the caps allow, and keeps the groups that are full: any of their sums reaches its threshold,
    which is the cap itself, but for tokens Qt - 128 as in the paper, where Qt is 4096, and in
    proportion (Qt - Qt / 32) below that, since 128 tokens are a quarter of a cap of 512.
    What is left after the last iteration is grouped once more and kept as it is, a case on which
    the paper is silent.

    The authors' public code differs from the algorithm, and this function from that code, in these
    points: it drops samples larger than a cap without a word (here an error); it loses the open
    group when the last shuffled sample is such a one; it keeps a group only when its tiles equal
    the threshold, so that a fuller group is refused when the threshold is below the cap (here >=);
    it shuffles the first two times with the same seed; and it cuts packs at the token cap when
    they are loaded (here no pack is longer).

    Args:
        iterations: T, the number of times that groups are drawn and filtered.
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
    """Bounds of the groups that are filled in order until the next sample would exceed a cap.

    Where a group that starts at i ends does not depend on what came before, so all possible ends
    are looked up at once and only the chain of actual starts is followed one by one.
    """
    ends = np.min(
        [_ends(row, cap) for row, cap in zip(sizes, caps.tolist(), strict=True)], axis=0
    ).tolist()
    bounds = [0]
    while bounds[-1] < len(ends):
        bounds.append(ends[bounds[-1]])
    return np.array(bounds)


def _ends(sizes: np.ndarray, cap: int) -> np.ndarray:
    """Largest end for every start such that sizes[start:end] sums to no more than the cap."""
    sums = np.concatenate([[0], np.cumsum(sizes)])
    return np.searchsorted(sums, sums[:-1] + cap, side="right") - 1
