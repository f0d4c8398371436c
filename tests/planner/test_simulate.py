"""Simulated 1F1B against textbook cases, a hand-drawn one, and a plain event loop."""

import numpy as np
import pytest
from cost_cases import random_cost, random_features, small_model
from schedule_cases import event_loop, simulate_1f1b

from omnibal.model.parallel import Parallel
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.pipeline import simulate
from omnibal.pipeline.predict import predict
from omnibal.pipeline.schedules import Pass, one_forward_one_backward
from omnibal.pipeline.simulate import (
    predict_steps,
    simulate_step,
)
from omnibal.pipeline.stage_cost import PerStepCosts, StageTimes, stage_times
from omnibal.pipeline.stage_memory import running_passes
from omnibal.pipeline.unit_runs import stage_units, stages_from_cuts
from omnibal.pipeline.workload import Workload

pytestmark = pytest.mark.quick

SIZES = [(1, 1), (5, 1), (1, 4), (2, 4), (3, 4), (4, 4), (9, 4), (7, 2), (13, 6)]


def ends_of(forward_ms: np.ndarray, backward_ms: np.ndarray, *links: np.ndarray) -> np.ndarray:
    """Ends of all forwards and backwards, by an event loop. [2, m, p]"""
    schedule = one_forward_one_backward(forward_ms.shape[1], 1, len(forward_ms))
    durations = {Pass.FORWARD: forward_ms, Pass.BACKWARD: backward_ms}
    ends = np.full((2, *forward_ms.shape), np.nan)
    for (stage, one), (_, end) in event_loop(schedule, durations, *links).items():
        ends[int(one.kind is Pass.BACKWARD), one.micro_batch, stage] = end
    return ends


def random_durations(rng: np.random.Generator, *shape: int) -> list[np.ndarray]:
    """Forward, backward [.., m, p] and both links [.., m, p - 1]."""
    link_shape = (*shape[:-1], shape[-1] - 1)
    return [
        rng.exponential(1, shape),
        rng.exponential(2, shape),
        rng.exponential(0.3, link_shape),
        rng.exponential(0.3, link_shape),
    ]


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


def test_steps_of_different_lengths_match_an_event_loop():
    """Prevents micro-batches that do not exist from holding up those that do."""
    rng = np.random.default_rng(1)
    counts = np.array([6, 0, 1, 5, 3, 2, 6, 4])
    durations = random_durations(rng, len(counts), 6, 4)
    timeline = simulate_1f1b(*durations, counts)
    assert timeline.step_ms[1] == 0
    for index, count in enumerate(counts):
        if count:
            real = [values[index, :count] for values in durations]
            forward_end, backward_end = ends_of(*real)
            np.testing.assert_allclose(timeline.end_ms[Pass.FORWARD][index, :count], forward_end)
            np.testing.assert_allclose(timeline.end_ms[Pass.BACKWARD][index, :count], backward_end)
            assert timeline.step_ms[index] == pytest.approx(backward_end.max())
            busy = real[0].sum(axis=0) + real[1].sum(axis=0)
            np.testing.assert_allclose(timeline.busy_ms[index], busy)


def uneven_schedule() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Step, rank and slot of packs of 3 steps on 2 ranks, the last ones short."""
    counts = [(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 3), (2, 0, 2)]
    rows = [(step, rank, slot) for step, rank, n in counts for slot in range(n)]
    step, rank, slot = np.array(rows).T
    return step, rank, slot


def test_a_step_waits_for_the_slowest_rank_then_reduces_and_updates(
    monkeypatch: pytest.MonkeyPatch,
):
    """Prevents mixing up ranks and steps, also where a rank has few micro-batches or none."""
    step, rank, slot = uneven_schedule()
    rng = np.random.default_rng(2)
    forward, backward, link, back_link = random_durations(rng, len(step), 3)
    times = StageTimes(
        forward_ms=forward,
        backward_ms=backward,
        weight_ms=backward / 3,
        recompute_ms=0 * forward,
        forward_link_ms=link,
        backward_link_ms=back_link,
    )
    reduction, optimizer = np.array([5.0, 1, 9]), np.array([0.5, 0.25, 2])
    once = PerStepCosts(
        reduction_ms=reduction - 1, gather_ms=np.zeros(3), buckets=np.ones(3),
        tied_ms=np.ones(3), update_ms=optimizer,
    )  # fmt: skip
    expected_step, expected_busy = [], []
    for chosen in range(3):
        finish, busy = np.zeros(3), np.zeros(3)
        for member in range(2):
            packs = (step == chosen) & (rank == member)
            if packs.any():
                _, ends = ends_of(forward[packs], backward[packs], link[packs], back_link[packs])
                finish = np.maximum(finish, ends.max(axis=0))
                busy += (forward[packs] + backward[packs]).sum(axis=0) / 2
        expected_step.append((finish + reduction).max() + 2)
        expected_busy.append(busy + reduction + optimizer)
    workload = Workload(
        features=np.zeros((len(step), 5)), step=step, dp_rank=rank, slot=slot, data_parallel_size=2
    )
    for entries in (simulate._CHUNK_ENTRIES, 1):
        monkeypatch.setattr(simulate, "_CHUNK_ENTRIES", entries)
        predicted = predict_steps(times, workload, once)
        np.testing.assert_allclose(predicted.step_ms, expected_step)
        np.testing.assert_allclose(predicted.busy_ms, expected_busy)


@pytest.mark.parametrize(("m", "p"), SIZES)
def test_in_flight_runs_are_what_the_schedule_holds(m: int, p: int):
    """Prevents too small a memory peak: compared with what the event loop holds at any time."""
    rng = np.random.default_rng(m * 10 + p)
    durations = random_durations(rng, m, p)
    forward_end, backward_end = ends_of(*durations)
    size = random_features(rng, m)
    for stage in range(p):
        held = [
            size[(forward_end[:, stage] <= now) & (backward_end[:, stage] > now)].sum(axis=0)
            for now in forward_end[:, stage]
        ]
        passes = running_passes(size, np.arange(m), p, stage)
        runs = passes.own + passes.others
        np.testing.assert_allclose(runs[:m], held)
        np.testing.assert_allclose(runs.max(axis=0), np.max(held, axis=0))


def scheduled_packs() -> ScheduledPacks:
    step, rank, slot = uneven_schedule()
    return ScheduledPacks(
        packs=Packs.from_lists([[2 * i, 2 * i + 1] for i in range(len(step))]),
        step=step,
        dp_rank=rank,
        slot=slot,
        epoch=0 * step,
        items={"tiles": 0 * step},
        tokens=0 * step,
        level=np.zeros(len(step), np.int32),
    )


def test_a_prediction_adds_up():
    """Prevents wrong normalisation: compared with sums over the packs and by hand."""
    rng = np.random.default_rng(3)
    model, cost, scheduled = small_model(4, 5), random_cost(rng), scheduled_packs()
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
