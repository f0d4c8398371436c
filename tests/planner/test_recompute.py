"""Recomputation and stage memory, against enumeration and figures computed by hand."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cost_cases import model_of, passes_of, random_cost, random_features, small_model

from omnibal.cost.model import UnitCost
from omnibal.pipeline import recompute
from omnibal.pipeline import stage_memory as stage_memory_module
from omnibal.pipeline.recompute import all_layers, useful_sets
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.stage_memory import (
    GIB,
    build_table,
    fits_cap,
    pareto_maximal_rows,
    stage_memory,
)
from omnibal.pipeline.stage_units import merge_spans
from omnibal.pipeline.unit_runs import (
    counts_of_runs,
    layer_kinds,
    stage_units,
    stages_from_cuts,
    unit_counts,
    unit_runs,
)

pytestmark = pytest.mark.quick


LAYER = "language_layer"


@pytest.mark.parametrize(
    ("towers", "most"),
    [("vision language", 4), ("language", 9), ("runs", 4), ("vision audio language", 3)],
)
def test_a_best_fitting_set_is_always_among_the_useful_ones(towers: str, most: int):
    """Prevents recomputing more than needed, or the wrong tower."""
    rng = np.random.default_rng(0)
    model = model_of(towers, *[3] * len(towers.split()))
    fitting = not_fitting = partial = several = 0
    for _ in range(60):
        cost = random_cost(rng, model)
        features = random_features(rng, 5, len(cost.features))
        links, kind = rng.integers(0, 2, (len(features), 4)), rng.integers(0, 2, len(features))
        passes = passes_of(features, features[::-1], links, kind)
        table = build_table(cost, passes)
        layers = layer_kinds(cost.kinds)
        extreme_ms = rng.uniform(0.1, 1, (len(layers), len(layers)))
        times_ms = rng.dirichlet(np.ones(len(layers)), 20) @ extreme_ms
        counts = np.zeros((8, len(cost.kinds)), np.int64)
        counts[:, layers] = rng.integers(0, most + 1, (len(layers), 8)).T
        counts[:, -1] = rng.integers(0, 2, 8)
        again = all_layers(cost.kinds, counts)
        low, high = table.peak_bytes(counts, again), table.peak_bytes(counts, 0 * counts)
        cap = rng.uniform(0.9 * low.min(), high.max())
        useful, _ = useful_sets(table, counts, extreme_ms, cap)
        for stage in range(len(counts)):
            sets = list(product(*(range(number + 1) for number in counts[stage, layers])))
            held = np.tile(counts[stage], (len(sets), 1))
            recomputed = 0 * held
            recomputed[:, layers] = sets
            peaks = table.peak_bytes(held, recomputed).tolist()
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
    """Prevents dropping a set that is cheapest in some cost, or keeping a dominated set."""
    rng = np.random.default_rng(costs)
    for _ in range(50):
        group, values = rng.integers(0, 4, 30), rng.integers(0, 5, (30, costs)).astype(float)
        as_good = (group[:, None] == group) & (values[:, None] <= values).all(axis=2)
        better = (values[:, None] < values).any(axis=2) | (np.arange(30)[:, None] < np.arange(30))
        expected = np.flatnonzero(~(as_good & better).any(axis=0)).tolist()
        assert sorted(recompute.pareto_minimal_sets(group, values).tolist()) == expected


def flat_unit(unit: UnitCost, kept: int, input_: int, working: int, parameters: int) -> UnitCost:
    """Return the unit with costs per token only; kept, input and working memory are in MB."""
    tokens = np.array([0.0, 0, 1, 0, 0])
    return replace(
        unit,
        forward_ms=tokens,
        backward_ms=2 * tokens,
        recompute_ms=0.75 * tokens,
        activation_bytes=kept * 1e6 * tokens,
        boundary_bytes=input_ * 1e6 * tokens,
        output_gradient_bytes=input_ * 1e6 * tokens,
        transient_bytes=np.outer([1, 0.5], working * 1e6 * tokens),
        shared_bytes=0 * tokens,
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
    layer, head = cost.units[LAYER], cost.units["head"]
    flat = {LAYER: flat_unit(layer, 10, 1, 3, 1000), "head": flat_unit(head, 4, 1, 20, 500)}
    cost = replace(cost, units=cost.units | flat)
    *_, stage = stages_from_cuts(small_model(2, 4), (7,), [(0, 0), (0, 1)])
    features = np.array([[1.0, 0, 2, 0, 0], [1.0, 0, 3, 0, 0]])
    others = passes_of(features, features[::-1])
    table, runs = build_table(cost, others), unit_runs(cost.kinds, [stage])
    held = table.activation_bytes(*counts_of_runs(len(cost.kinds), runs)).max()
    counts, needed = unit_counts(cost.kinds, stage.units), table.stage_bytes([runs]).max()
    memory = stage_memory(cost, counts, table, needed, held)
    assert len(stage.layers("language")) == 2
    assert stage.recomputed_in("language") == (2,)
    expected = {"weights": 2500 * 2, "gradients": 2500 * 4, "optimizer": 2500 * 12}
    # The head's 20 MB per token exceed the recomputed layer's 3 + 10 - 1.
    expected |= {"activations": 5 * (10 + 1 + 4) * 1e6, "transient": 3 * 20 * 1e6}
    for name, count in expected.items():
        np.testing.assert_allclose(getattr(memory, f"{name}_gib") * GIB, count)
    times = stage_times(cost, [stage], features)
    np.testing.assert_allclose(times.forward_ms, [[6], [9]])
    np.testing.assert_allclose(times.recompute_ms, [[1.5], [2.25]])
    np.testing.assert_allclose(times.backward_ms, [[13.5], [20.25]])


def test_undominated_rows_are_exactly_the_front():
    """Prevents dropping the micro-batches that decide a stage's peak."""
    rng = np.random.default_rng(5)
    for _ in range(30):
        rows = rng.integers(0, 4, (25, 3)).astype(float)
        distinct = np.unique(rows, axis=0)
        below = (distinct[:, None] <= distinct).all(axis=2).sum(axis=1) > 1  # by another row
        assert sorted(rows[pareto_maximal_rows(rows)].tolist()) == distinct[~below].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_a_stage_may_recompute_any_of_its_layers(seed: int):
    """Prevents an edited plan that recomputes last layers from needing more than predicted."""
    rng = np.random.default_rng(seed)
    cost = random_cost(rng)
    # A layer's output is as large as its input.
    layer = replace(cost.units[LAYER], output_gradient_bytes=cost.units[LAYER].boundary_bytes)
    cost = replace(cost, units=cost.units | {LAYER: layer})
    vision, language = rng.integers(2, 6, 2)
    model, cut = small_model(int(vision), int(language)), (int(vision + language) + 3,)
    plain, _ = stages_from_cuts(model, cut)
    features = random_features(rng, 4)
    links, kind = rng.integers(0, 2, (4, 4)), rng.integers(0, 2, 4)
    table = build_table(cost, passes_of(features, features[::-1], links, kind))
    in_order = [unit for span in plain.units for unit in span.units]
    layers = [unit for span in plain.units if span.layers for unit in span.units]
    counts, names = unit_counts(cost.kinds, plain.units), [kind.name for kind in cost.kinds]
    kinds = [names.index(name) for name in stage_units(cost.kinds, plain.units)]
    last = names.index(LAYER)
    more = 0
    for _ in range(30):
        chosen = rng.integers(0, 2, len(layers)).astype(bool)
        again = [layer for layer, is_chosen in zip(layers, chosen, strict=True) if is_chosen]
        stage = plain.model_copy(update={"recompute": merge_spans(again)})
        found = table.stage_bytes([unit_runs(cost.kinds, [stage])])
        own, others, most = np.zeros((3, 4))
        for unit, kind in zip(in_order, kinds, strict=True):
            kept, left = table.own_kept_bytes[:, kind], table.own_input_bytes[:, kind]
            of_others = table.others_input_bytes if unit in again else table.others_kept_bytes
            others += of_others[:, kind]
            # A recomputed layer runs with all activations that it keeps otherwise.
            running = own + kept + table.working_bytes[:, kind]
            gradient = 0 if unit is in_order[-1] else table.own_gradient_bytes[:, last]
            most = np.maximum(most, running + gradient)
            own = own + (left if unit in again else kept)
        links_bytes = links @ np.append(table.cut_bytes[:2, 0], table.cut_bytes[2:, last])
        links_bytes += max(table.once_bytes[: last + 1, 0])
        np.testing.assert_allclose(found, others + most + links_bytes)
        earliest = table.pass_bytes(counts, unit_counts(cost.kinds, stage.recompute))
        assert (found >= earliest * (1 - 1e-12)).all()
        more += (found > earliest * 1.001).any()
        numbers = [sum(layer.name == tower for layer in again) for tower in ("vision", "language")]
        first, _ = stages_from_cuts(model, cut, [numbers, (0, 0)])
        np.testing.assert_allclose(table.stage_bytes([unit_runs(cost.kinds, [first])]), earliest)
    assert more >= 5


def test_a_cap_holds_a_peak_of_its_size():
    """Prevents the order of a sum from deciding whether bytes fit."""
    parts = np.array([0.1, 0.2, 0.3]) * GIB
    one, other = parts.sum(), parts[::-1].sum()
    assert one != other and fits_cap(one, other) and fits_cap(other, one)
    assert not fits_cap(one + 1, one)


def test_drawn_stages_keep_each_unit_once():
    """Prevents passes chosen by stages that hold part of a layer, or lose a layer."""
    rng = np.random.default_rng(8)
    cost = random_cost(rng, small_model(3, 3))
    fours = np.full(len(cost.features), 4.0)
    flat = {"activation_bytes": fours, "boundary_bytes": fours, "transient_bytes": 0 * fours[None]}
    units = {name: replace(unit, **flat) for name, unit in cost.units.items()}
    plain = replace(cost, units=units)
    drawn = stage_memory_module._draw_stages(plain, fours)
    others, own, _, links = np.split(drawn, len(fours) * np.arange(1, 4), axis=1)
    # A unit keeps four bytes of each feature, recomputed or not, plus an input.
    numbers = (others - others.min()) / 4
    np.testing.assert_allclose(numbers, np.rint(numbers), atol=1e-9)
    assert numbers.max() >= 10
    assert (own <= others + 1e-9).all() and (own < others - 0.5).any()
    # Some stages begin with the model, others after a cut.
    assert len(np.unique(links[:, 0])) > 1
