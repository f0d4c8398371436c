"""Costs from measured rates, against a device with known times."""

from itertools import product
from typing import get_args

import numpy as np
import pytest
from cost_cases import analytic_cost, assumed_h100
from hypothesis import given
from hypothesis import strategies as st
from rate_cases import ring_ms, tiled_ms, tiled_rates

from omnibal.cost.model import CostModel
from omnibal.cost.shaped_rates import ProductTimes, collective_line
from omnibal.model.config import ClusterConfig, load_model
from omnibal.model.parallel import Parallel
from omnibal.model.rate_tables import CollectiveTime, ProductPass, ProductTime, Rates
from omnibal.model.units import feature_names

pytestmark = pytest.mark.quick

MODEL = load_model("internvl-chat-1.5-6b-20b")
H100 = assumed_h100()
MEASURED = H100.model_copy(update={"rates": {"bf16": tiled_rates()}})
SIZES = st.floats(1, 1e6)


def cost_of(cluster: ClusterConfig, **sizes: int) -> CostModel:
    return analytic_cost(MODEL, cluster, Parallel(pipeline=1, **sizes), "bf16")


SIDES = st.lists(st.integers(1, 4096), min_size=1, max_size=3, unique=True)


@st.composite
def grids(draw: st.DrawFn) -> list[ProductTime]:
    """Draw products with random times, of one to three sizes per axis."""
    return [
        ProductTime(rows=m, inner=k, outer=n, ms=draw(st.floats(1e-4, 1e2)))
        for m, k, n in product(draw(SIDES), draw(SIDES), draw(SIDES))
    ]


@given(measured=grids(), rows=SIZES, inner=SIZES, outer=SIZES)
def test_a_product_is_as_measured_or_between(measured, rows, inner, outer):
    """Prevents rates outside the measured range, and times that differ from the measurements."""
    times = ProductTimes.fit(measured)
    for one in measured:
        assert times.ms("forward", one.rows, one.inner, one.outer) == pytest.approx(one.ms)
    rates = [2 * one.rows * one.inner * one.outer / one.ms for one in measured]
    rate = 2 * rows * inner * outer / times.ms("forward", rows, inner, outer)
    assert min(rates) * (1 - 1e-9) <= rate <= max(rates) * (1 + 1e-9)
    for of in get_args(ProductPass):
        fitted = times.line(of, inner, outer)
        fitted_ms = fitted.fixed_ms + fitted.each_ms * rows
        assert fitted.fixed_ms >= 0
        assert 2 * rows * inner * outer / fitted_ms <= max(rates) * (1 + 1e-9)


def test_larger_products_are_not_faster_where_none_was():
    """Prevents a dip between two measured sizes, which would attract the search."""
    times = ProductTimes.fit(tiled_rates().products)
    sizes = np.geomspace(100, 50_000, 40)
    for axis in range(3):
        shapes = np.full((40, 3), 1000.0)
        shapes[:, axis] = sizes
        assert (np.diff([times.ms("forward", *shape) for shape in shapes]) > -1e-12).all()


def test_sizes_that_were_not_measured_are_near_a_device_of_tiles():
    """Prevents interpolation that is no better than one efficiency for all sizes."""
    times, rng = ProductTimes.fit(tiled_rates().products), np.random.default_rng(0)
    shapes = np.exp(rng.uniform(np.log([256, 384, 384]), np.log([16384, 24576, 24576]), (500, 3)))
    found = np.array([times.ms("forward", *shape) for shape in shapes])
    true = np.array([tiled_ms(*shape) for shape in shapes])
    errors = np.abs(found / true - 1)
    assert np.median(errors) < 0.07 and np.quantile(errors, 0.9) < 0.25
    flops = 2 * shapes.prod(axis=1)
    one_share = np.abs(flops / np.median(flops / true) / true - 1)
    assert np.median(errors) < np.median(one_share) / 3


def test_lines_through_rows_are_near_a_device_of_tiles():
    """Prevents gradient products priced as forward products, and rows confused with widths."""
    times, rng, errors = ProductTimes.fit(tiled_rates().products), np.random.default_rng(1), []
    for inner, outer in np.exp(rng.uniform(np.log(384), np.log(24576), (60, 2))):
        rows = np.exp(rng.uniform(np.log(256), np.log(16384)))
        for line, shape in (
            (times.line("forward", inner, outer), (rows, inner, outer)),
            (times.line("input_gradient", inner, outer), (rows, outer, inner)),
            (times.line("weight_gradient", inner, outer), (inner, rows, outer)),
        ):
            errors.append(abs((line.fixed_ms + rows * line.each_ms) / tiled_ms(*shape) - 1))
    assert np.median(errors) < 0.1 and np.quantile(errors, 0.9) < 0.3


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_collectives_are_of_their_group_size(ranks):
    """Prevents a ring of a wrong size, and an all-reduce counted as one pass."""
    line = collective_line(tiled_rates().collectives, ranks)
    for kind, passes in (("all_reduce", 2), ("all_gather", 1)):
        for size in (2**17, 2**23):
            sent = passes * size * (ranks - 1) / ranks
            expected = ring_ms(kind, ranks, size)
            assert passes * line.fixed_ms + sent * line.each_ms == pytest.approx(expected)
    send = collective_line(tiled_rates().collectives, 2, kind="send")
    assert send.fixed_ms + 5e6 * send.each_ms == pytest.approx(ring_ms("send", 2, 5e6))


def test_group_sizes_that_were_not_measured_take_the_nearest():
    """Prevents a missing rate, or one device's rate, for a group size that was not measured."""
    collectives = tiled_rates().collectives
    assert collective_line(collectives, 6) == collective_line(collectives, 8)
    assert collective_line(collectives, 64) == collective_line(collectives, 8)
    assert collective_line(collectives, 1) is None
    assert collective_line((), 8) is None and collective_line((), 2, kind="send") is None


def test_costs_are_of_the_table_that_the_cluster_has():
    """Prevents a rate table that is ignored, or used without a mention in the cost's source."""
    plain, measured = cost_of(H100, tensor=4), cost_of(MEASURED, tensor=4)
    assert plain.source == "analytic:h100-80g, assumed rates"
    assert measured.source == "analytic:h100-80g, measured rates of tiled device"
    fp32 = analytic_cost(MODEL, MEASURED, Parallel(pipeline=1), "fp32")
    assert fp32.source == "analytic:h100-80g, assumed rates"
    tokens = feature_names(MODEL).index("tokens")
    unit = measured.units["language_layer"]
    # Two all-reduces in each direction, of 1,000 tokens of 6,144 bf16 values.
    found_ms = unit.collective_ms[:, 0] + 1000 * unit.collective_ms[:, tokens]
    assert found_ms == pytest.approx(2 * ring_ms("all_reduce", 4, 1000 * 6144 * 2))
    sent_ms = measured.link_latency_ms + 5e6 * measured.link_ms_per_byte
    assert sent_ms == pytest.approx(ring_ms("send", 2, 5e6))
    assert measured.rates.optimizer_ms == pytest.approx((4 + 2 * (2 + 4 + 12)) * 0.1 / 2**28)
    for name, counted in plain.units.items():
        assert measured.units[name].parameters == counted.parameters
        np.testing.assert_array_equal(
            measured.units[name].activation_bytes, counted.activation_bytes
        )


def test_rates_of_one_node_do_not_price_the_network():
    """Prevents inter-node sends and reductions priced at intra-node rates."""
    plain, measured = cost_of(H100, tensor=4, data=4), cost_of(MEASURED, tensor=4, data=4)
    assert measured.link_ms_per_byte == plain.link_ms_per_byte
    assert measured.rates.gradient_reduction_ms == plain.rates.gradient_reduction_ms
    within, other = (cost_of(each, data=8).rates for each in (MEASURED, H100))
    assert within.gradient_reduction_ms > 2 * other.gradient_reduction_ms


@pytest.mark.parametrize("tokens", [512, 8192])
def test_slices_and_small_micro_batches_cost_what_the_device_takes(tokens):
    """Prevents tensor parallelism priced as if small slices were as efficient as whole layers."""
    h, key_value, f = 6144, 2 * 6144 * 8 // 48, 16384

    def layer_ms(cluster: ClusterConfig) -> float:
        """Return forward ms of a language layer's products."""
        unit = cost_of(cluster, tensor=tensor).units["language_layer"]
        return float([1, 0, tokens, 0, 0] @ (unit.forward_ms - unit.collective_ms[0]))

    for tensor in (1, 8):
        shapes = [
            (h, (h + key_value) / tensor), (h / tensor, h), (h, 2 * f / tensor), (f / tensor, h),
        ]  # fmt: skip
        true = sum(tiled_ms(tokens, *shape) for shape in shapes)
        plain = layer_ms(MEASURED.model_copy(update={"rates": {}}))
        share = sum(2 * tokens * k * n for k, n in shapes) / (989e9 * 0.55)
        waits_ms = plain - share  # memory passes and launches, equal in both
        assert layer_ms(MEASURED) - waits_ms == pytest.approx(true, rel=0.25)


def test_a_table_with_holes_is_read_as_a_grid_nearly():
    """Prevents one missing product that distorts the times of other products."""
    products = tiled_rates().products
    whole, holed = ProductTimes.fit(products), ProductTimes.fit(products[1:])
    one = products[5]
    assert holed.ms("forward", one.rows, one.inner, one.outer) == pytest.approx(one.ms)
    shapes = np.exp(np.random.default_rng(3).uniform(np.log(512), np.log(16384), (50, 3)))
    errors = [whole.ms("forward", *one) / holed.ms("forward", *one) - 1 for one in shapes]
    assert np.median(np.abs(errors)) < 0.15


def test_bytes_without_a_slope_have_a_price():
    """Prevents exchanges that take no time, however large."""
    flat = tuple(
        CollectiveTime(kind="all_reduce", ranks=8, bytes=size, ms=0.05) for size in (2**10, 2**12)
    )
    rates, line = Rates(device="x", collectives=flat), collective_line(flat, 8)
    sent_bytes = 2 * 2**12 * 7 / 8
    assert line.each_ms >= 0.05 / sent_bytes / 2 * (1 - 1e-9)
    assert 2 * line.fixed_ms + sent_bytes * line.each_ms == pytest.approx(0.05, rel=0.2)
    cost = cost_of(H100.model_copy(update={"rates": {"bf16": rates}}), tensor=8)
    assert (cost.units["language_layer"].collective_ms[:, 2] > 0).all()
