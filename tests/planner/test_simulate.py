"""Simulated 1F1B against textbook cases, a hand-drawn one, and a plain event loop."""

import numpy as np
import pytest
from cost_cases import random_cost, random_features, small_model
from packing_cases import scheduled_packs

from omnibal.model.parallel import Parallel
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline import simulate
from omnibal.pipeline.predict import predict
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.simulate import (
    simulate_step,
)
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.unit_runs import stage_units, stages_from_cuts
from omnibal.pipeline.workload import Workload

pytestmark = pytest.mark.quick

SIZES = [(1, 1), (5, 1), (1, 4), (2, 4), (3, 4), (4, 4), (9, 4), (7, 2), (13, 6)]


@pytest.mark.parametrize(("m", "p"), SIZES)
def test_equal_stages_have_the_textbook_bubble(m: int, p: int):
    """Prevents a schedule that is not 1F1B: its bubble is (p - 1) / (m + p - 1)."""
    forward, links = np.ones((m, p)), np.zeros((m, p - 1))
    timeline = simulate_step(forward, 2 * forward, links, links)
    assert timeline.step_ms == 3 * (m + p - 1)
    np.testing.assert_allclose(timeline.wait_ms / timeline.step_ms, (p - 1) / (m + p - 1))


def test_unequal_stages_drawn_by_hand():
    """Prevents a wrong link direction or order; times in ms, links of 0.5.

    stage 0: F0 0-1, F1 1-2, waits for B0 of stage 1 until 8.5 + 0.5, B0 9-11,
             waits for B1 of stage 1 until 15.5 + 0.5, B1 16-18
    stage 1: waits until 1 + 0.5, F0 1.5-4.5, B0 4.5-8.5, F1 8.5-11.5, B1 11.5-15.5
    """
    forward, backward = np.array([[1.0, 3.0]] * 2), np.array([[2.0, 4.0]] * 2)
    link = np.full((2, 1), 0.5)
    timeline = simulate_step(forward, backward, link, link)
    np.testing.assert_allclose(timeline.start_ms[Pass.FORWARD], [[0, 1.5], [1, 8.5]])
    np.testing.assert_allclose(timeline.end_ms[Pass.FORWARD], [[1, 4.5], [2, 11.5]])
    np.testing.assert_allclose(timeline.start_ms[Pass.BACKWARD], [[9, 4.5], [16, 11.5]])
    np.testing.assert_allclose(timeline.end_ms[Pass.BACKWARD], [[11, 8.5], [18, 15.5]])
    assert timeline.step_ms == 18
    np.testing.assert_allclose(timeline.finish_ms, [18, 15.5])
    np.testing.assert_allclose(timeline.busy_ms, [6, 14])
    np.testing.assert_allclose(timeline.wait_ms, [12, 4])


def test_waits_are_the_gaps_between_passes():
    """Prevents waits that are counted to another pass, or the time of a pass as waiting."""
    # Stage 0 runs F0 F1, waits for 2, B0, waits for 1, B1; stage 1 waits for 1, F0 B0 F1 B1.
    ones, links = np.ones((2, 2)), np.zeros((2, 1))
    drawn = simulate.simulate_step(ones, 2 * ones, links, links)
    waits = simulate.waits_before(drawn)
    assert waits[Pass.FORWARD].tolist() == [[0, 1], [0, 0]]
    assert waits[Pass.BACKWARD].tolist() == [[2, 0], [1, 0]]
    rng = np.random.default_rng(3)
    for m, p in ((1, 1), (1, 3), (2, 4), (7, 3), (5, 1)):
        forward, link = rng.exponential(1, (m, p)), rng.exponential(0.3, (m, p - 1))
        timeline = simulate_step(forward, 2 * forward[::-1], link, link)
        waits = np.stack(list(simulate.waits_before(timeline).values()))
        assert (waits >= 0).all()
        np.testing.assert_allclose(waits.sum(axis=(0, 1)) + timeline.busy_ms, timeline.finish_ms)


def uneven_packs() -> ScheduledPacks:
    """Packs of 3 steps on 2 ranks, the last ones short."""
    counts = [(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 3), (2, 0, 2)]
    rows = [(step, rank, slot) for step, rank, n in counts for slot in range(n)]
    step, rank, slot = np.array(rows).T
    packs = [[2 * row, 2 * row + 1] for row in range(len(rows))]
    return scheduled_packs(packs, step, dp_rank=rank, slot=slot)


def test_a_prediction_adds_up():
    """Prevents wrong normalisation: compared with sums over the packs and by hand."""
    rng = np.random.default_rng(3)
    model, cost, scheduled = small_model(4, 5), random_cost(rng), uneven_packs()
    stages = stages_from_cuts(model, (4, 8), [(2, 0), (0, 1), (0, 0)])
    features = random_features(rng, len(scheduled))
    parallel = Parallel(tensor=2, pipeline=3, data=2)
    workload = Workload.of(scheduled, features, 2)
    prediction = predict(cost, model, parallel, [stages], scheduled, workload)
    times = stage_times(cost, stages, features)
    kept_only = stage_times(cost, stages_from_cuts(model, (4, 8)), features)
    busy_ms = (times.forward_ms + times.backward_ms).sum(axis=0)
    parameters = np.array([unit.parameters for unit in cost.units.values()])
    held = np.array([[1, 3, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 4, 1]]) @ parameters
    once_ms = 3 * 2 * (0.5 + held * 2e-6)
    wait = 1 - (busy_ms + once_ms) / (3 * 2 * prediction.step_ms)
    np.testing.assert_allclose([stage.wait_fraction for stage in prediction.stages], wait)
    assert prediction.bubble_fraction == pytest.approx(wait.mean())
    needed_ms = (kept_only.forward_ms + kept_only.backward_ms).sum()
    needed_ms -= sum(
        features.sum(axis=0) @ cost.units[unit].collective_ms.sum(axis=0)
        for stage in stages
        for unit in stage_units(cost.kinds, stage)
    )
    assert prediction.ideal_step_ms == pytest.approx(needed_ms / (3 * 6))
    assert prediction.ideal_step_ms < prediction.step_ms
    run_s = 3 * prediction.step_ms / 1e3
    assert prediction.gpu_days == pytest.approx(run_s * 12 / 86_400)
    assert prediction.samples_per_second_per_gpu == pytest.approx(2 * len(features) / run_s / 12)
