"""Packs that a trainer makes itself by next fit: samples one after another, in their order.

ms-swift's `sequential` packing is this (`calculate_matched_group` of `swift/dataset/packing.py`,
4.6.0). A pack ends before the first sample that would not fit into it, and where it is full. So two
packs of a plan come out as one where the second one's first sample still fits the first pack.
"""

import numpy as np


def next_fit_packs(tokens: np.ndarray, packing_length: int) -> np.ndarray:
    """Bounds of the packs that next fit makes of samples in this order. int64 [packs + 1]

    A sample that is longer than a pack is alone in one.

    Args:
        tokens: integers [samples], none negative, in the order in which they are packed.
        packing_length: tokens of a full pack, at least 1.

    Example:
        >>> next_fit_packs(np.array([3, 3, 4, 9]), 6).tolist()
        [0, 2, 3, 4]
    """
    held = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
    wanted = held[:-1] + packing_length
    # Where so many tokens are reached, the pack has ended: there, or before the last sample.
    full = np.searchsorted(held, wanted)
    is_over = held[np.minimum(full, len(tokens))] > wanted
    end = np.maximum(full - is_over, np.arange(1, len(tokens) + 1))
    ends = np.minimum(end, len(tokens)).tolist()
    bounds = [0]
    while bounds[-1] < len(tokens):
        bounds.append(ends[bounds[-1]])
    return np.array(bounds, np.int64)
