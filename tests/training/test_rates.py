"""Rates that are measured here: what is measured, on how many processes. No bounds on times."""

from itertools import product

import pytest
from ranks import run_ranks
from rich.console import Console

from megatron.vlm.measure.rates import group_sizes, measure_rates
from omnibal.cost.measured_sizes import MeasuredSizes
from omnibal.model.parallel import Parallel

pytestmark = pytest.mark.quick

SIZES = MeasuredSizes(rows=(8, 512), inner=(16, 512), outer=(32,), collective_bytes=(1680, 6720))


def measure(links):
    return measure_rates("this one", "fp32", SIZES, Console(quiet=True))


@pytest.mark.parametrize("processes", [1, 3])
def test_rates_are_of_all_processes(processes):
    """Prevents: groups that wait for each other, kinds or sizes left out, and a process alone that
    is said to have collectives, or to hide them."""
    ranks = run_ranks(Parallel(pipeline=processes), measure)
    assert all(rates == ranks[0] for rates in ranks)
    sizes = [(one.rows, one.inner, one.outer) for one in ranks[0].products]
    assert sizes == list(product(SIZES.rows, SIZES.inner, SIZES.outer))
    measured = {(one.kind, one.ranks, one.bytes) for one in ranks[0].collectives}
    assert measured == {
        (kind, size, sent)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for size in {1: (), 3: (2, 3)}[processes]
        for sent in SIZES.collective_bytes
    }
    assert [one.bytes for one in ranks[0].copies] == [1 << 27]
    assert (ranks[0].hidden is None) == (processes == 1)
    small, large = ranks[0].products[0], ranks[0].products[-1]
    # 2,048 times the operations; a core may be lost for a moment.
    assert large.ms > 5 * small.ms


def test_group_sizes_are_those_of_tensor_parallelism():
    """Prevents: groups that no job has, and a group of one."""
    assert [group_sizes(count) for count in (1, 2, 6, 8)] == [[], [2], [2, 4, 6], [2, 4, 8]]
