"""Lower bounds on the max load of ranks."""

import numpy as np

_ROUNDING = 1e-12
"""Relative tolerance of sums, subtracted to keep the bound valid."""


def load_bound(weight: np.ndarray, ranks: int) -> float:
    """Max of three lower bounds on the max load. Integral if all weights are.

    The mean, the heaviest item, and for k >= 1: of the k d + 1 heaviest items some rank of d has k
    + 1, with at least the weight of the k + 1 lightest of them. (Graham's argument, SIAM Journal on
    Applied Mathematics 17, 1969, with sums instead of multiples of the lightest.)
    """
    if not len(weight):
        return 0.0
    sums = np.concatenate([[0.0], np.cumsum(np.sort(weight.astype(np.float64))[::-1])])
    per_rank = np.arange(1, (len(weight) - 1) // ranks + 1)
    last = per_rank * ranks + 1
    crowded = sums[last] - sums[last - per_rank - 1]
    bound = max(sums[-1] / ranks, sums[1], crowded.max(initial=0.0)) * (1 - _ROUNDING)
    return float(np.ceil(bound) if (weight == np.floor(weight)).all() else bound)
