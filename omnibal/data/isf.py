"""Iterative sampling and filtering (ISF), OmniBal's packing (arXiv 2407.20761, Algorithm 1)."""

import numpy as np

from omnibal.data.fit import Seed, check_samples_fit
from omnibal.data.lengths import Lengths
from omnibal.data.packs import Packs
from omnibal.limits import Caps


def pack_isf(
    lengths: Lengths,
    caps: Caps,
    seed: Seed,
    *,
    iterations: int = 10,
    tile_threshold: int | None = None,
    token_threshold: int | None = None,
) -> Packs:
    """Pack all samples by Algorithm 1 of the paper.

    Each iteration shuffles the samples that are left, cuts them into consecutive groups as long as
    the caps allow, and keeps the groups that are full: tiles >= `tile_threshold` or tokens >=
    `token_threshold`. What is left after the last iteration is grouped once more and kept as it is,
    a case on which the paper is silent.

    The authors' public code differs from the algorithm, and this function from that code, in these
    points: it drops samples larger than a cap without a word (here an error); it loses the open
    group when the last shuffled sample is such a one; it keeps a group only when its tiles equal
    the threshold, so that a fuller group is refused when the threshold is below the cap (here >=);
    it shuffles the first two times with the same seed; and it cuts packs at the token cap when
    they are loaded (here no pack is longer).

    Args:
        lengths: tiles and tokens of every sample.
        caps: Qv and Qt of the paper.
        seed: the same seed gives the same packs.
        iterations: T, the number of times that groups are drawn and filtered.
        tile_threshold: Q'v; default Qv, as in the paper.
        token_threshold: Q't; default Qt - 128 as in the paper, where Qt is 4096, and in proportion
            (Qt - Qt / 32) below that, since 128 tokens are a quarter of a cap of 512.

    Raises:
        UserError: a sample is larger than a cap.
    """
    check_samples_fit(lengths, caps)
    tile_threshold = caps["tiles"] if tile_threshold is None else tile_threshold
    if token_threshold is None:
        token_threshold = caps["tokens"] - min(128, caps["tokens"] // 32)
    rng = np.random.default_rng(seed)
    tiles, tokens = lengths.column("tiles").astype(np.int64), lengths.tokens.astype(np.int64)
    left = np.arange(len(lengths))
    kept: list[np.ndarray] = []
    for _ in range(iterations):
        if not len(left):
            break
        left = rng.permutation(left)
        bounds = cut_groups(tiles[left], tokens[left], caps)
        group_tiles = np.add.reduceat(tiles[left], bounds[:-1])
        group_tokens = np.add.reduceat(tokens[left], bounds[:-1])
        full = (group_tiles >= tile_threshold) | (group_tokens >= token_threshold)
        groups = np.split(left, bounds[1:-1])
        kept += [group for group, is_full in zip(groups, full, strict=True) if is_full]
        left = left[np.repeat(~full, np.diff(bounds))]
    if len(left):
        left = rng.permutation(left)
        kept += np.split(left, cut_groups(tiles[left], tokens[left], caps)[1:-1])
    return Packs.from_lists(kept)


def cut_groups(tiles: np.ndarray, tokens: np.ndarray, caps: Caps) -> np.ndarray:
    """Bounds of the groups that are filled in order until the next sample would exceed a cap.

    Where a group that starts at i ends does not depend on what came before, so all possible ends
    are looked up at once and only the chain of actual starts is followed one by one.
    """
    ends = np.minimum(_ends(tiles, caps["tiles"]), _ends(tokens, caps["tokens"])).tolist()
    bounds = [0]
    while bounds[-1] < len(ends):
        bounds.append(ends[bounds[-1]])
    return np.array(bounds)


def _ends(sizes: np.ndarray, cap: int) -> np.ndarray:
    """Largest end for every start such that sizes[start:end] sums to no more than the cap."""
    sums = np.concatenate([[0], np.cumsum(sizes)])
    return np.searchsorted(sums, sums[:-1] + cap, side="right") - 1
