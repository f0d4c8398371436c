"""Simulated 1F1B against textbook cases, a hand-drawn one, and a plain event loop."""

import numpy as np
import pytest
from cost_cases import random_cost, random_features, small_model
from packing_cases import scheduled_packs
from schedule_cases import needed_ms, simulate_1f1b, workload_of

from omnibal.model.parallel import Parallel
from omnibal.pipeline import simulate
from omnibal.pipeline.predict import predict
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.unit_runs import stages_from_cuts

pytestmark = pytest.mark.quick


def test_unequal_stages_drawn_by_hand():
    """Prevents a wrong link direction or order, and waits charged to the wrong pass.

    Times are in ms, links of 0.5.
    stage 0: F0 0-1, F1 1-2, waits for B0 of stage 1 until 8.5 + 0.5, B0 9-11,
      waits for B1 of stage 1 until 15.5 + 0.5, B1 16-18
    stage 1: waits until 1 + 0.5, F0 1.5-4.5, B0 4.5-8.5, F1 8.5-11.5, B1 11.5-15.5
    """
    forward, backward = np.array([[1.0, 3.0]] * 2), np.array([[2.0, 4.0]] * 2)
    link = np.full((2, 1), 0.5)
    timeline = simulate_1f1b(forward, backward, link, link)
    assert (timeline.step_ms, timeline.finish_ms.tolist()) == (18, [18, 15.5])
    assert timeline.busy_ms.tolist() == [6, 14]
    waits = simulate.idle_before_passes(timeline)
    for kind, starts, ends, waited in (
        (Pass.FORWARD, [[0, 1.5], [1, 8.5]], [[1, 4.5], [2, 11.5]], [[0, 1.5], [0, 0]]),
        (Pass.BACKWARD, [[9, 4.5], [16, 11.5]], [[11, 8.5], [18, 15.5]], [[7, 0], [5, 0]]),
    ):
        assert timeline.start_ms[kind].tolist() == starts
        assert timeline.end_ms[kind].tolist() == ends
        assert waits[kind].tolist() == waited


def test_waits_are_the_gaps_between_passes():
    """Prevents compute time counted as waiting."""
    rng = np.random.default_rng(3)
    for m, p in ((1, 1), (1, 3), (2, 4), (7, 3), (5, 1)):
        forward, link = rng.exponential(1, (m, p)), rng.exponential(0.3, (m, p - 1))
        timeline = simulate_1f1b(forward, 2 * forward[::-1], link, link)
        waits = np.stack(list(simulate.idle_before_passes(timeline).values()))
        assert (waits >= 0).all()
        np.testing.assert_allclose(waits.sum(axis=(0, 1)) + timeline.busy_ms, timeline.finish_ms)


def test_a_prediction_adds_up():
    """Prevents wrong normalisation: compared with sums over the packs and by hand."""
    rng = np.random.default_rng(3)
    model, cost = small_model(4, 5), random_cost(rng)
    stages = stages_from_cuts(model, (4, 8), [(2, 0), (0, 1), (0, 0)])
    features = random_features(rng, 17)
    # Three steps on two ranks, the last steps short.
    workload = workload_of([[4, 4], [4, 3], [2, 0]], features)
    places = {"dp_rank": workload.dp_rank, "slot": workload.slot}
    packs = [[2 * row, 2 * row + 1] for row in range(17)]
    scheduled = scheduled_packs(packs, workload.step, **places)
    parallel = Parallel(tensor=2, pipeline=3, data=2)
    prediction = predict(cost, parallel, [stages], scheduled, workload)
    times = stage_times(cost, stages, features)
    busy_ms = (times.forward_ms + times.backward_ms).sum(axis=0)
    parameters = np.array([unit.parameters for unit in cost.units.values()])
    held = np.array([[1, 3, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 4, 1]]) @ parameters
    once_ms = 3 * 2 * (0.5 + held * 2e-6)
    wait = 1 - (busy_ms + once_ms) / (3 * 2 * prediction.step_ms)
    np.testing.assert_allclose([stage.wait_fraction for stage in prediction.stages], wait)
    assert prediction.bubble_fraction == pytest.approx(wait.mean())
    work_ms = needed_ms(cost, stages_from_cuts(model, (4, 8)), features)
    assert prediction.lost.ideal_ms == pytest.approx(work_ms / (3 * 6))
    assert prediction.lost.ideal_ms < prediction.step_ms
    run_s = 3 * prediction.step_ms / 1e3
    assert prediction.gpu_days == pytest.approx(run_s * 12 / 86_400)
    assert prediction.samples_per_second_per_gpu == pytest.approx(2 * len(features) / run_s / 12)
