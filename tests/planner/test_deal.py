"""Packs assigned to ranks of unequal speed."""

from itertools import product

import numpy as np
import pytest

from omnibal.packing.deal import deal_by_speed


def done_at(dealt: np.ndarray, load: np.ndarray, slowness: np.ndarray) -> float:
    """Return when the last rank finishes its packs [dp, slots]."""
    loads = [load[packs[packs >= 0]].sum() for packs in dealt]
    return float((loads * slowness).max())


def test_slow_ranks_are_done_with_the_others():
    """Prevents waiting for a slow rank that could have fewer packs; tries all assignments."""
    rng = np.random.default_rng(0)
    over = []
    for _ in range(60):
        ranks = int(rng.integers(2, 4))
        size = int(rng.integers(ranks + 1, 9))
        load, slowness = rng.uniform(1, 4, size), np.ones(ranks)
        slowness[rng.integers(ranks)] = rng.uniform(1.1, 2.5)
        most = -(-3 * size // (2 * ranks))
        [dealt] = deal_by_speed(np.arange(size)[None], load, slowness, most)
        assert sorted(dealt[dealt >= 0].tolist()) == list(range(size))
        assert (dealt[:, 0] >= 0).all() and dealt.shape[1] <= most
        every = map(np.array, product(range(ranks), repeat=size))
        counted = ((deal, np.bincount(deal, minlength=ranks)) for deal in every)
        allowed = (deal for deal, count in counted if count.min() and count.max() <= most)
        best = min((np.bincount(deal, load, ranks) * slowness).max() for deal in allowed)
        over.append(done_at(dealt, load, slowness) / best)
    assert np.mean(over) < 1.01 and max(over) < 1.15


def test_many_ranks_share_what_a_slow_one_leaves():
    """Prevents one rank from receiving all packs that a slow rank leaves."""
    rng = np.random.default_rng(1)
    rows = np.arange(20 * 128).reshape(20, 128)
    load, slowness = rng.uniform(1, 2, rows.size), np.ones(16)
    slowness[3] = 1.5
    for step, dealt in zip(rows, deal_by_speed(rows, load, slowness, 12), strict=True):
        least = load[step].sum() / (1 / slowness).sum()
        assert done_at(dealt, load, slowness) == pytest.approx(least, rel=0.02)
