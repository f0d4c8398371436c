"""Lower bounds on the busiest rank: no assignment of the items to so many ranks can be below."""

import numpy as np

_ROUNDING = 1e-12
"""Relative; what summing up may add is taken off, so that a bound is one."""


def load_bound(weight: np.ndarray, ranks: int) -> float:
    """Largest of three bounds on the busiest rank's sum of weights; whole where all weights are.

    The mean; the heaviest item; and for every k at least 1, of the k d + 1 heaviest items some rank
    of d has k + 1, which weigh at least what the k + 1 lightest of them do. (The last is Graham's
    argument, SIAM Journal on Applied Mathematics 17, 1969, with sums for the multiples of the
    lightest.)
    """
    if not len(weight):
        return 0.0
    sums = np.concatenate([[0.0], np.cumsum(np.sort(weight.astype(np.float64))[::-1])])
    per_rank = np.arange(1, (len(weight) - 1) // ranks + 1)
    last = per_rank * ranks + 1
    crowded = sums[last] - sums[last - per_rank - 1]
    bound = max(sums[-1] / ranks, sums[1], crowded.max(initial=0.0)) * (1 - _ROUNDING)
    return float(np.ceil(bound) if (weight == np.floor(weight)).all() else bound)
