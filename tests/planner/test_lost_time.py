"""Lost time against textbook pipelines and its own sum."""

from dataclasses import replace

import numpy as np
import pytest
from cost_cases import random_cost, random_features, small_model
from schedule_cases import lost_time, workload_of

from omnibal.cost.model import CostModel
from omnibal.pipeline.prediction import LostTime
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.pipeline.workload import Workload

MODEL = small_model(3, 3)
CUTS = (4, 7)
"""Vision embed and 3 vision layers | projector and language embed, 1 language layer | the rest."""


def tiles_of(sizes: list[list[list[float]]]) -> Workload:
    """Return micro-batches by step, rank and slot; `sizes` are ms on a unit of cost 1."""
    counts = [[len(own) for own in ranks] for ranks in sizes]
    features = np.zeros((np.sum(counts), 5))
    features[:, 0] = 1
    features[:, 1] = [size for ranks in sizes for own in ranks for size in own]
    return workload_of(counts, features)


def plain_cost(stage_ms: tuple[float, float, float]) -> CostModel:
    """Return costs of tiles: `stage_ms` forward on stages of `CUTS`, twice that backward."""
    per_tile = np.array([0, 1.0, 0, 0, 0])
    cost = random_cost(np.random.default_rng(0))
    shares = dict(zip(cost.units, (0, stage_ms[0] / 3, 0, 0, stage_ms[1], 0), strict=True))
    # The last stage holds two language layers and the head.
    shares["head"] = stage_ms[2] - 2 * stage_ms[1]
    units = {
        kind: replace(
            unit,
            forward_ms=shares[kind] * per_tile,
            backward_ms=2 * shares[kind] * per_tile,
            recompute_ms=shares[kind] * per_tile,
            collective_ms=np.zeros((2, 5)),
            output_bytes=0 * per_tile,
            output_gradient_bytes=0 * per_tile,
        )
        for kind, unit in cost.units.items()
    }
    rates = replace(cost.rates, optimizer_ms=0.0, gradient_reduction_ms=0.0)
    return replace(cost, units=units, rates=rates, optimizer_ms_fixed=0.0, link_latency_ms=0.0)


def find_lost_time(cost: CostModel, stages: tuple[Stage, ...], workload: Workload) -> LostTime:
    step_ms = float(simulate_levels(cost, [stages], workload).step_ms.mean())
    found = lost_time(cost, [stages], workload, step_ms)
    assert sum(found.model_dump().values()) == pytest.approx(step_ms)
    return found


def expect(found: LostTime, **expected: float) -> None:
    """Check the expected entries, and 0 for all other entries."""
    for name, value in found.model_dump().items():
        assert value == pytest.approx(expected.get(name, 0.0), abs=1e-9), name


STAGES = stages_from_cuts(MODEL, CUTS)


@pytest.mark.parametrize(
    ("stage_ms", "tiles", "expected"),
    [
        # (p - 1) of m + p - 1 micro-batches (arXiv 2104.04473, 2.2).
        ((1, 1, 1), [[2.0] * 5], {"bubble_ms": 2 * 3 * 2, "ideal_ms": 5 * 3 * 2}),
        # The mean rank has 4 tiles, the slowest 6, each times (5 + 2) / 5.
        (
            (1, 1, 1),
            [[6.0] * 5, [2.0] * 5],
            {"rank_imbalance_ms": (6 - 4) * 3 * 7, "bubble_ms": 4 * 3 * 2, "ideal_ms": 4 * 3 * 5},
        ),
        # All work is on the first stage, so 5 micro-batches take 5 * 9. Balanced stages take
        # 7 * 3, including a bubble of two.
        (
            (3, 0, 0),
            [[1.0] * 5],
            {"stage_imbalance_ms": 45 - 21, "bubble_ms": 6, "ideal_ms": 15},
        ),
    ],
    ids=["textbook bubble", "slow rank", "slow stage"],
)
def test_plain_pipelines_lose_what_is_worked_out(stage_ms, tiles, expected):
    """Prevents a bubble other than the textbook's, and confused rank and stage imbalances."""
    expect(find_lost_time(plain_cost(stage_ms), STAGES, tiles_of([tiles])), **expected)


def test_each_other_cause_has_its_own_entry():
    """Prevents one cause's time in another's entry, or in no entry."""
    work = tiles_of([[[1.0] * 5]])
    plain = plain_cost((1, 1, 1))
    usual = {"bubble_ms": 6.0, "ideal_ms": 15.0}
    update = replace(plain, optimizer_ms_fixed=7.0)
    expect(find_lost_time(update, STAGES, work), weight_update_ms=7.0, **usual)
    parameters = 1 / sum(unit.trained_parameters for unit in plain.units.values())
    reduced = replace(plain, rates=replace(plain.rates, gradient_reduction_ms=parameters))
    assert 0 < find_lost_time(reduced, STAGES, work).communication_ms < 7
    # A link of 0.5 ms in both directions of the first and the last micro-batch, over both cuts.
    slow = replace(plain, link_latency_ms=0.5)
    assert find_lost_time(slow, STAGES, work).communication_ms >= 4 * 0.5
    again = stages_from_cuts(MODEL, CUTS, [(3, 0), (0, 1), (0, 2)])
    # A third more work everywhere. Stage 2's head (-1 of 1) is not recomputed.
    assert find_lost_time(plain, again, work).recompute_ms > 0
    assert find_lost_time(plain, again, work).ideal_ms == pytest.approx(15)
    for name, entry in (("collective_ms", "communication_ms"), ("padding_ms", "padding_ms")):
        units = {
            kind: replace(
                unit,
                forward_ms=1.5 * unit.forward_ms,
                backward_ms=1.5 * unit.backward_ms,
                **{name: np.stack([unit.forward_ms, unit.backward_ms]) / 2},
            )
            for kind, unit in plain.units.items()
        }
        found = find_lost_time(replace(plain, units=units), STAGES, work)
        expect(found, **{entry: 21 / 2}, **usual)


def test_padding_of_packs_is_padding():
    """Prevents time spent on padding counted as ideal time."""
    padded = tiles_of([[[2.0] * 5]])
    needed = replace(padded, unpadded=tiles_of([[[1.0] * 5]]).features)
    usual = {"bubble_ms": 6.0, "ideal_ms": 15.0}
    expect(find_lost_time(plain_cost((1, 1, 1)), STAGES, needed), padding_ms=21, **usual)
    even = replace(padded, unpadded=padded.features)
    expect(find_lost_time(plain_cost((1, 1, 1)), STAGES, even), bubble_ms=12, ideal_ms=30)


def test_random_pipelines_lose_nothing_twice():
    """Prevents an entry counted twice or omitted, with idle ranks and uneven steps."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        cost = random_cost(rng)
        counts = rng.integers(0, 5, (2, 3))
        counts[0, 0], counts[1, 2] = 1, 2
        workload = workload_of(counts, random_features(rng, counts.sum()))
        stages = stages_from_cuts(MODEL, CUTS, [(int(rng.integers(4)), 0), (0, 1), (0, 1)])
        found = find_lost_time(cost, stages, workload)
        assert found.rank_imbalance_ms >= 0
        for name in ("communication_ms", "weight_update_ms", "recompute_ms", "bubble_ms"):
            assert getattr(found, name) > 0, name
        assert found.padding_ms == pytest.approx(0)
