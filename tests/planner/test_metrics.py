"""Metrics: the paper's equations on numbers that can be checked by hand."""

from itertools import permutations

import numpy as np
import pytest
from length_cases import lengths_of

from omnibal.data.lengths import Lengths
from omnibal.model.levels import ContextExchange, CutRule, Level
from omnibal.model.limits import Caps
from omnibal.packing.pack_bound import naive_lower_bound
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.steps.metrics import (
    dist_ratio,
    least_dist_ratio,
    measure_packs,
    pad_ratio,
    straggler_factor,
)

pytestmark = pytest.mark.quick


def test_pad_ratio_is_equation_1():
    """Prevents a ratio over all rows at once instead of the mean over mini-batches."""
    rows = np.array([10, 5, 5, 8, 8])
    # (0 + 5 + 5) / (10 * 3) = 1/3 and 0.
    assert pad_ratio(rows, np.array([0, 3, 5])) == pytest.approx(1 / 6)


def test_dist_ratio_is_equation_2():
    """Prevents division by N - 1, which is what the paper's Figure 2 shows."""
    # Figure 2, step 0: 4 and 9 images; Eq. 2 gives half of the 0.55 printed there.
    assert dist_ratio(np.array([[4.0, 9.0]])) == pytest.approx((9 - 4) / (9 * 2))
    # Mean over steps; a step without any image is balanced.
    assert dist_ratio(np.array([[4.0, 9.0], [0.0, 0.0]])) == pytest.approx((9 - 4) / (9 * 2) / 2)


def test_straggler_factor_is_the_time_that_ranks_wait_for():
    """Prevents a ratio of sums over all steps, which long steps would rule."""
    assert straggler_factor(np.array([[1.0, 3.0], [10.0, 10.0]])) == pytest.approx((1.5 + 1) / 2)


def test_lower_bound_takes_the_tighter_dimension():
    """Prevents a bound that is rounded down or looks at tokens alone."""
    lengths = four_samples()
    assert naive_lower_bound(lengths, Caps.of(tiles=3, tokens=10_000)) == 3  # 7 tiles
    assert naive_lower_bound(lengths, Caps.of(tiles=100, tokens=30)) == 4  # 100 tokens


def test_figures_of_a_small_schedule():
    """Prevents figures taken over the wrong ranks, epochs or caps."""
    scheduled = ScheduledPacks.of(
        Packs.from_lists([[0, 1], [2], [3]]),
        four_samples(),
        np.array([0, 0, 1]),
        np.array([0, 1, 1]),
    )
    caps, load = Caps.of(tiles=4, tokens=50), np.array([1.0, 3.0, 5.0])
    metrics = measure_packs(scheduled, four_samples(), [Level(caps=caps)], 2, load, lower_bound=2)
    assert (metrics.samples, metrics.packed, metrics.packs, metrics.steps) == (4, 4, 3, 2)
    assert metrics.packs_lower_bound == 2
    assert metrics.gap == pytest.approx(1 / 2)
    assert metrics.straggler_factor == pytest.approx((3 / 2 + 5 / 2.5) / 2)
    # Squares of 10 and 20 against 30, then rank 0 idle.
    assert metrics.attention_balance_ratio == pytest.approx((400 / 1800 + 1 / 2) / 2)
    assert metrics.samples_per_pack == pytest.approx(4 / 3)
    assert metrics.fill["tiles"] == pytest.approx(7 / 12)
    assert metrics.fill["tokens"] == pytest.approx(100 / 150)
    assert metrics.pad_ratio == 0
    assert metrics.dist_ratio["tiles"] == pytest.approx((1 / 8 + 0) / 2)
    # No shared packs: nothing is exchanged. 100 tokens over 2 steps of 2 ranks.
    assert metrics.communication_ratio == metrics.exchanged_ratio == 0
    assert metrics.tokens_per_rank == 25
    of_three = measure_packs(scheduled, four_samples(), [Level(caps=caps)], 3, load, 2)
    assert of_three.tokens_per_rank == pytest.approx(100 / 6)
    assert of_three.straggler_factor == pytest.approx((3 / (4 / 3) + 3) / 2)
    # Step 1 leaves rank 0 idle: (40 - 0) / (40 * 2).
    assert metrics.dist_ratio["tokens"] == pytest.approx((0 + 1 / 2) / 2)


def shared_schedule(cut: CutRule) -> tuple[ScheduledPacks, tuple[Level, ...]]:
    """Sample 3 alone on two ranks, beside packs of one rank each in another step."""
    packs = ScheduledPacks.of(
        Packs.from_lists([[3], [0, 1], [2]]),
        four_samples(),
        np.array([0, 1, 1]),
        np.array([0, 0, 1]),
        level=np.array([1, 0, 0]),
    )
    short, long = Caps.of(tiles=4, tokens=30), Caps.of(tiles=4, tokens=40)
    return packs, (Level(caps=short), Level(caps=long, context=2, cut=cut))


@pytest.mark.parametrize(
    ("cut", "uneven"),
    # 20^2 against 40^2 - 20^2 of one rank; by zigzag both have the same.
    [(CutRule.CONTIGUOUS, 1 - (400 + 1200) / 2 / 1200), (CutRule.ZIGZAG, 0.0)],
)
def test_figures_of_shared_packs(cut, uneven):
    """Prevents figures that take a shared pack for its first rank's."""
    packs, levels = shared_schedule(cut)
    load = np.array([4.0, 3.0, 3.0])
    metrics = measure_packs(packs, four_samples(), levels, 2, load, 1)
    assert metrics.dist_ratio == {"tiles": pytest.approx(1 / 16), "tokens": 0}
    assert metrics.attention_balance_ratio == pytest.approx((uneven + (1 - 1400 / 1800)) / 2)
    assert metrics.straggler_factor == 1
    # All of step 0, nothing of step 1.
    assert metrics.communication_ratio == pytest.approx(1 / 2)
    assert metrics.exchanged_ratio == pytest.approx(0.4)
    assert metrics.fill["tokens"] == 1


def test_exchanged_heads_balance_attention():
    """Prevents attention that is counted by tokens where every rank has all tokens of its heads."""
    packs, levels = shared_schedule(CutRule.CONTIGUOUS)
    heads = levels[1].model_copy(update={"exchange": ContextExchange.HEADS})
    metrics = measure_packs(packs, four_samples(), (levels[0], heads), 2, np.ones(3), 1)
    assert metrics.attention_balance_ratio == pytest.approx((1 - 1400 / 1800) / 2)


def test_least_dist_ratio_is_below_every_grouping():
    """Prevents a bound that some way to form steps breaks, or one that says nothing."""
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


def four_samples() -> Lengths:
    return lengths_of(tiles=[1, 2, 4, 0], tokens=[10, 20, 30, 40])
