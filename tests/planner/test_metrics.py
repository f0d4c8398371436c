"""Metrics: the paper's equations on numbers that can be checked by hand."""

from itertools import permutations

import numpy as np
import pytest
from length_cases import lengths_of

from omnibal.model.levels import ContextExchange, CutRule, Level
from omnibal.model.limits import Caps
from omnibal.packing.balance_metrics import (
    dist_ratio,
    least_dist_ratio,
    measure_packs,
    pad_ratio,
    straggler_factor,
)
from omnibal.packing.packs import Packs, ScheduledPacks

pytestmark = pytest.mark.quick
FOUR = lengths_of(tiles=[1, 2, 4, 0], tokens=[10, 20, 30, 40])


def test_ratios_are_the_paper_s_equations_1_and_2():
    """Prevents ratios over all rows or steps at once, and division by N - 1, as in Figure 2."""
    rows = np.array([10, 5, 5, 8, 8])
    # (0 + 5 + 5) / (10 * 3) = 1/3 and 0.
    assert pad_ratio(rows, np.array([0, 3, 5])) == pytest.approx(1 / 6)
    # Figure 2, step 0: 4 and 9 images; Eq. 2 gives half of the 0.55 printed there.
    assert dist_ratio(np.array([[4.0, 9.0]])) == pytest.approx((9 - 4) / (9 * 2))
    # Mean over steps. A step without images is balanced.
    assert dist_ratio(np.array([[4.0, 9.0], [0.0, 0.0]])) == pytest.approx((9 - 4) / (9 * 2) / 2)
    # Slowest over mean rank, averaged over steps.
    assert straggler_factor(np.array([[1.0, 3.0], [10.0, 10.0]])) == pytest.approx((1.5 + 1) / 2)


def test_figures_of_a_small_schedule():
    """Prevents figures over the wrong ranks, epochs or caps."""
    packs, step = Packs.from_lists([[0, 1], [2], [3]]), np.array([0, 0, 1])
    scheduled = ScheduledPacks.from_packs(packs, FOUR, step, np.array([0, 1, 1]))
    levels, load = [Level(caps=Caps.of(tiles=4, tokens=50))], np.array([1.0, 3.0, 5.0])
    metrics = measure_packs(scheduled, FOUR, levels, 2, load, lower_bound=2)
    expected = {
        "samples": 4,
        "packed": 4,
        "packs": 3,
        "steps": 2,
        "packs_lower_bound": 2,
        "gap": 1 / 2,
        "straggler_factor": (3 / 2 + 5 / 2.5) / 2,
        # Squares of 10 and 20 against 30, then rank 0 idle.
        "attention_balance_ratio": (400 / 1800 + 1 / 2) / 2,
        "samples_per_pack": 4 / 3,
        "fill": {"tiles": 7 / 12, "tokens": 100 / 150},
        "pad_ratio": 0,
        # Step 1 leaves rank 0 idle: (40 - 0) / (40 * 2).
        "dist_ratio": {"tiles": (1 / 8 + 0) / 2, "tokens": (0 + 1 / 2) / 2},
        # No shared packs: nothing is exchanged. 100 tokens over 2 steps of 2 ranks.
        "communication_ratio": 0,
        "exchanged_ratio": 0,
        "tokens_per_rank": 25,
    }
    for name, value in expected.items():
        assert getattr(metrics, name) == pytest.approx(value), name
    of_three = measure_packs(scheduled, FOUR, levels, 3, load, 2)
    assert of_three.tokens_per_rank == pytest.approx(100 / 6)
    assert of_three.straggler_factor == pytest.approx((3 / (4 / 3) + 3) / 2)


def shared_schedule(cut: CutRule) -> tuple[ScheduledPacks, tuple[Level, ...]]:
    """Return sample 3 on two ranks, and packs of one rank each in another step."""
    packs, level = Packs.from_lists([[3], [0, 1], [2]]), np.array([1, 0, 0])
    step, rank = np.array([0, 1, 1]), np.array([0, 0, 1])
    packs = ScheduledPacks.from_packs(packs, FOUR, step, rank, level=level)
    short, long = Caps.of(tiles=4, tokens=30), Caps.of(tiles=4, tokens=40)
    return packs, (Level(caps=short), Level(caps=long, context=2, cut=cut))


@pytest.mark.parametrize(
    ("cut", "uneven"),
    # 20^2 against 40^2 - 20^2 on one rank; zigzag balances the two.
    [(CutRule.CONTIGUOUS, 1 - (400 + 1200) / 2 / 1200), (CutRule.ZIGZAG, 0.0)],
)
def test_figures_of_shared_packs(cut, uneven):
    """Prevents counting a context-parallel pack for its first rank only."""
    packs, levels = shared_schedule(cut)
    load = np.array([4.0, 3.0, 3.0])
    metrics = measure_packs(packs, FOUR, levels, 2, load, 1)
    assert metrics.dist_ratio == {"tiles": pytest.approx(1 / 16), "tokens": 0}
    assert metrics.attention_balance_ratio == pytest.approx((uneven + (1 - 1400 / 1800)) / 2)
    assert metrics.straggler_factor == 1
    # All of step 0, nothing of step 1.
    assert metrics.communication_ratio == pytest.approx(1 / 2)
    assert metrics.exchanged_ratio == pytest.approx(0.4)
    assert metrics.fill["tokens"] == 1


def test_exchanged_heads_balance_attention():
    """Prevents attention counted by token shards if every rank has all tokens of its heads."""
    packs, levels = shared_schedule(CutRule.CONTIGUOUS)
    heads = levels[1].model_copy(update={"exchange": ContextExchange.HEADS})
    metrics = measure_packs(packs, FOUR, (levels[0], heads), 2, np.ones(3), 1)
    assert metrics.attention_balance_ratio == pytest.approx((1 - 1400 / 1800) / 2)


def test_least_dist_ratio_is_below_every_grouping():
    """Prevents a lower bound that a grouping beats, or that is too loose to be useful."""
    rng = np.random.default_rng(0)
    tight = 0
    for _ in range(30):
        loads = rng.pareto(1.0, 6) + 0.1
        best = min(dist_ratio(loads[list(order)].reshape(3, 2)) for order in permutations(range(6)))
        bound = least_dist_ratio(loads, 2)
        assert bound <= best + 1e-12
        tight += bound > 0.5 * best
    assert tight > 10
    assert least_dist_ratio(np.array([8.0, 1.0]), 2) == pytest.approx(1 - 4.5 / 8)
