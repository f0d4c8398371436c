"""The fewest packs for a handful of samples, by enumeration of all subsets."""

import numpy as np

MAX_SAMPLES = 12  # 4,096 subsets


def pack_exactly(sizes: np.ndarray, caps: np.ndarray) -> list[list[int]]:
    """Fewest packs of at most `MAX_SAMPLES` samples, as lists of their indices.

    A breadth-first search: after k packs, all sets of samples that k packs can leave over. The next
    pack always takes the first sample that is left, so that no set of packs is seen in two orders.

    Args:
        sizes: int64 [features, samples]; each sample fits alone.
        caps: of every pack, int64 [features].
    """
    samples = np.arange(sizes.shape[1])
    sets = np.arange(1 << len(samples))
    held = (sets[:, None] >> samples & 1).astype(np.int64)
    fits = (held @ sizes.T <= caps).all(axis=1)
    packable = [sets[fits & (sets & -sets == 1 << sample)] for sample in samples.tolist()]
    came_by = {int(sets[-1]): 0}
    left_over = [int(sets[-1])]
    while 0 not in came_by:
        reached = []
        for left in left_over:
            candidates = packable[(left & -left).bit_length() - 1]
            for pack in candidates[candidates & ~left == 0].tolist():
                if left ^ pack not in came_by:
                    came_by[left ^ pack] = pack
                    reached.append(left ^ pack)
        left_over = reached
    packs, left = [], 0
    while left != sets[-1]:
        pack = came_by[left]
        packs.append(np.flatnonzero(held[pack]).tolist())
        left |= pack
    return packs
