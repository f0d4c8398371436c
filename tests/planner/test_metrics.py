"""Metrics: the paper's equations on numbers that can be checked by hand."""

import numpy as np
import pytest

from omnibal.data.bound import naive_lower_bound
from omnibal.data.lengths import Lengths
from omnibal.data.metrics import dist_ratio, measure_packs, pad_ratio, straggler_factor
from omnibal.data.packs import Packs, ScheduledPacks
from omnibal.limits import Caps

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
    scheduled = ScheduledPacks(
        packs=Packs.from_lists([[0, 1], [2], [3]]),
        step=np.array([0, 0, 1]),
        dp_rank=np.array([0, 1, 1], np.int32),
        slot=np.zeros(3, np.int32),
        epoch=np.zeros(3, np.int32),
        items={"tiles": np.array([3, 4, 0], np.int32)},
        tokens=np.array([30, 30, 40], np.int32),
        level=np.zeros(3, np.int32),
    )
    caps, load = Caps.of(tiles=4, tokens=50), np.array([1.0, 3.0, 5.0])
    metrics = measure_packs(scheduled, four_samples(), caps, 2, load, lower_bound=2)
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
    # Step 1 leaves rank 0 idle: (40 - 0) / (40 * 2).
    assert metrics.dist_ratio["tokens"] == pytest.approx((0 + 1 / 2) / 2)


def four_samples() -> Lengths:
    return Lengths(
        items={"tiles": np.array([1, 2, 4, 0], np.int32)},
        tokens=np.array([10, 20, 30, 40], np.int32),
        loss_tokens=np.zeros(4, np.int32),
        source=np.zeros(4, np.int32),
        source_names=("docs",),
        origin=None,
    )
