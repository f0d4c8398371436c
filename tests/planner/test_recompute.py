"""Recomputation and stage memory against enumeration and figures worked out by hand."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from cost_cases import model_of, random_cost, random_features, small_model

from omnibal.cost.model import UnitCost
from omnibal.pipeline import recompute
from omnibal.pipeline.recompute import least_peak_bytes, useful_recomputes
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.stage_memory import (
    GIB,
    RunningPasses,
    fits_cap,
    memory_table,
    memory_tables,
    stage_memory,
    undominated,
)
from omnibal.pipeline.units import layer_kinds, stages_from_cuts

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("towers", "most"),
    [("vision language", 4), ("language", 9), ("runs", 4), ("vision audio language", 3)],
)
def test_a_best_fitting_set_is_always_among_the_useful_ones(towers: str, most: int):
    """Prevents recomputing more than needed, or the wrong tower: compared with all sets, whatever
    the micro-batches say of the kinds' times between the extremes."""
    rng = np.random.default_rng(0)
    model = model_of(towers, *[3] * len(towers.split()))
    fitting = not_fitting = partial = several = 0
    for _ in range(60):
        cost = random_cost(rng, model)
        features = random_features(rng, 5, len(cost.features))
        table = memory_table(cost, RunningPasses(own=features, others=features[::-1]))
        layers = layer_kinds(cost.kinds)
        extreme_ms = rng.uniform(0.1, 1, (len(layers), len(layers)))
        times_ms = rng.dirichlet(np.ones(len(layers)), 20) @ extreme_ms
        counts = np.zeros((8, len(cost.kinds)), np.int64)
        counts[:, layers] = rng.integers(0, most + 1, (len(layers), 8)).T
        counts[:, -1] = rng.integers(0, 2, 8)
        low, high = least_peak_bytes(table, counts), table.peak_bytes(counts, 0 * counts)
        cap = rng.uniform(0.9 * low.min(), high.max())
        useful = useful_recomputes(table, counts, extreme_ms, cap)
        for stage in range(len(counts)):
            sets = list(product(*(range(number + 1) for number in counts[stage, layers])))
            recomputed = np.zeros((len(sets), len(cost.kinds)), np.int64)
            recomputed[:, layers] = sets
            peaks = [table.peak_bytes(counts[stage], again) for again in recomputed]
            feasible = [each for each, peak in zip(sets, peaks, strict=True) if peak <= cap]
            chosen = list(map(tuple, useful.layers[useful.stage == stage].tolist()))
            assert set(chosen) <= set(feasible)
            assert bool(chosen) == bool(feasible)
            assert chosen == sorted(chosen)
            np.testing.assert_allclose(low[stage], min(peaks))
            if feasible:
                best_ms = (times_ms @ np.array(feasible).T).min(axis=1)
                np.testing.assert_allclose((times_ms @ np.array(chosen).T).min(axis=1), best_ms)
            several += len(chosen) > 1
            fitting += len(feasible) == len(sets)
            not_fitting += len(feasible) == 0
            partial += 0 < len(feasible) < len(sets)
    assert min(fitting, not_fitting, partial) >= 20
    assert several >= 20 or len(layers) == 1


@pytest.mark.parametrize("costs", [1, 2, 3])
def test_only_dominated_sets_are_dropped(costs: int):
    """Prevents losing a set that is the least in some cost, and keeping one that never is."""
    rng = np.random.default_rng(costs)
    for _ in range(50):
        group, values = rng.integers(0, 4, 30), rng.integers(0, 5, (30, costs)).astype(float)
        expected = [
            i
            for i in range(30)
            if not any(
                group[j] == group[i]
                and (values[j] <= values[i]).all()
                and ((values[j] < values[i]).any() or j < i)
                for j in range(30)
            )
        ]
        assert sorted(recompute.undominated_sets(group, values).tolist()) == expected


def flat_unit(megabytes: tuple[float, float, float], parameters: int) -> UnitCost:
    """Costs that grow with tokens only; kept, input and working memory in MB per token."""
    kept, boundary, transient = (np.array([0, 0, value * 1e6, 0, 0]) for value in megabytes)
    return UnitCost(
        forward_ms=np.array([0.0, 0, 1, 0, 0]),
        backward_ms=np.array([0.0, 0, 2, 0, 0]),
        recompute_ms=np.array([0.0, 0, 0.75, 0, 0]),
        collective_ms=np.zeros((2, 5)),
        padding_ms=np.zeros((2, 5)),
        context_ms=np.zeros((3, 5)),
        activation_bytes=kept,
        boundary_bytes=boundary,
        output_bytes=boundary,
        output_gradient_bytes=boundary,
        transient_bytes=np.stack([transient, transient / 2]),
        parameters=parameters,
        trained_parameters=parameters,
    )


def test_stage_memory_and_time_by_hand():
    """Prevents a wrong term in the one memory formula.

    Stage: 2 language layers (10 MB kept, 1 MB input, 3 MB working per token, 1,000 parameters),
    the first recomputed, and the head (4 kept, 1 input, 20 working, 500 parameters). Two
    micro-batches of 2 and 3 tokens are in flight; the largest alone has 3 tokens.
    """
    cost = random_cost(np.random.default_rng(0))
    units = {
        **cost.units,
        "language_layer": flat_unit((10, 1, 3), 1000),
        "head": flat_unit((4, 1, 20), 500),
    }
    cost = replace(cost, units=units)
    *_, stage = stages_from_cuts(small_model(2, 4), (7,), [(0, 0), (0, 1)])
    features = np.array([[1.0, 0, 2, 0, 0], [1.0, 0, 3, 0, 0]])
    others = RunningPasses(own=features, others=features[::-1])
    memory = stage_memory(cost, stage, memory_table(cost, others))
    assert len(stage.layers("language")) == 2
    assert stage.recomputed("language") == (2,)
    np.testing.assert_allclose(memory.weights_gib * GIB, 2500 * 2)
    np.testing.assert_allclose(memory.gradients_gib * GIB, 2500 * 4)
    np.testing.assert_allclose(memory.optimizer_gib * GIB, 2500 * 12)
    np.testing.assert_allclose(memory.activations_gib * GIB, 5 * (10 + 1 + 4) * 1e6)
    # The head's 20 MB per token exceed the recomputed layer's 3 + 10 - 1.
    np.testing.assert_allclose(memory.transient_gib * GIB, 3 * 20 * 1e6)
    times = stage_times(cost, [stage], features)
    np.testing.assert_allclose(times.forward_ms, [[6], [9]])
    np.testing.assert_allclose(times.recompute_ms, [[1.5], [2.25]])
    np.testing.assert_allclose(times.backward_ms, [[13.5], [20.25]])


def test_recomputed_layers_bring_back_their_activations_as_working_memory():
    """Prevents an out-of-memory while the recomputed layer runs backward."""
    cost = random_cost(np.random.default_rng(0))
    cost = replace(cost, units={**cost.units, "language_layer": flat_unit((10, 1, 3), 0)})
    features = np.array([[1.0, 0, 7, 0, 0]])
    stages = stages_from_cuts(small_model(2, 4), (5, 6), [(0, 0), (0, 1), (0, 0)])
    alone = RunningPasses(own=features, others=0 * features)
    memory = stage_memory(cost, stages[1], memory_table(cost, alone))
    np.testing.assert_allclose(memory.activations_gib * GIB, 7e6)
    np.testing.assert_allclose(memory.transient_gib * GIB, 7 * (3 + 10 - 1) * 1e6)


def test_undominated_rows_are_exactly_the_front():
    """Prevents dropping the micro-batches that decide a stage's peak."""
    rng = np.random.default_rng(5)
    for _ in range(30):
        rows = rng.integers(0, 4, (25, 3)).astype(float)
        distinct = {tuple(row) for row in rows}
        front = {
            a
            for a in distinct
            if not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for b in distinct)
        }
        found = undominated(rows)
        assert {tuple(row) for row in found} == front
        assert len(found) == len(front)


def test_tables_of_all_stages_have_every_pass():
    """Prevents a stage whose peak leaves out micro-batches, or is that of another stage: compared
    with every run of micro-batches whose first or last one runs; more stages than a rank has of
    them, and steps with fewer than others, included."""
    rng = np.random.default_rng(6)
    cost = random_cost(rng)
    units = list(cost.units.values())
    activation, boundary, working = (
        np.stack([getattr(unit, f"{name}_bytes") for unit in units])
        for name in ("activation", "boundary", "transient")
    )
    counts = rng.integers(0, 5, (20, 6))
    recomputed = np.minimum(counts, rng.integers(0, 5, (20, 6))) * [0, 1, 0, 0, 1, 0]
    for micro_batches, stages in ((6, 4), (3, 5), (1, 3)):
        sizes = [micro_batches] * 6 + [max(micro_batches - 2, 1)]
        slot = np.concatenate([np.arange(size) for size in sizes])
        features = random_features(rng, len(slot))
        ranks = np.split(features, np.cumsum(sizes)[:-1])
        for stage, table in enumerate(memory_tables(cost, features, slot, stages)):
            own, others = [], []
            for rank in ranks:
                for first, stop in combinations(range(len(rank) + 1), 2):
                    if stop - first <= stages - stage:
                        held = rank[first:stop]
                        own += [held[0], held[-1]]
                        others += [held[1:].sum(axis=0), held[:-1].sum(axis=0)]
            kept = (counts - recomputed) @ activation + recomputed @ boundary
            most = (kept @ (np.array(own) + others).T).max(axis=1)
            np.testing.assert_allclose(table.activation_bytes(counts, recomputed).max(-1), most)
            needed = kept @ np.array(others).T
            for row, (held, again) in enumerate(zip(counts, recomputed, strict=True)):
                upto = np.cumsum(
                    (held - again)[:, None] * activation + again[:, None] * boundary, 0
                )
                whole = ((held > again) | (held == 0))[:, None]
                running = upto + np.where(whole, 0, activation - boundary)
                moments = running[:, None] + working
                own_bytes = moments[held > 0].reshape(-1, len(features[0])) @ np.array(own).T
                needed[row] += own_bytes.max(axis=0, initial=0)
            found = table.pass_bytes(counts, recomputed).max(axis=-1)
            np.testing.assert_allclose(found, needed.max(axis=1))


def test_a_cap_holds_a_peak_of_its_size():
    """Prevents that the order in which bytes are added decides whether they fit."""
    parts = np.array([0.1, 0.2, 0.3]) * GIB
    assert parts.sum() != parts[::-1].sum()
    assert fits_cap(parts.sum(), parts[::-1].sum())
    assert fits_cap(parts[::-1].sum(), parts.sum())
    assert not fits_cap(parts.sum() + 1, parts.sum())
