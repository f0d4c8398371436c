"""Dynamic tiling against InternVL's rule."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiling_cases import internvl_grid

from omnibal.data.tiling import tile_count, tile_grid
from omnibal.model.encoders import TilingConfig

pytestmark = pytest.mark.quick

SIDE = st.integers(1, 4000)


def tiling_of(lowest: int, highest: int, **changes: bool) -> TilingConfig:
    return TilingConfig(min_dynamic_patch=lowest, max_dynamic_patch=highest, **changes)


def ratios(lowest: int, highest: int) -> set[Fraction]:
    """Return columns over rows of all grids."""
    counts = range(1, highest + 1)
    return {Fraction(c, r) for c in counts for r in counts if lowest <= c * r <= highest}


def tied_sizes(lowest: int, highest: int) -> list[Fraction]:
    """Return ratios midway between neighbouring grids."""
    return [(a + b) / 2 for a, b in pairwise(sorted(ratios(lowest, highest)))]


TILES = st.integers(1, 40).flatmap(
    lambda highest: st.tuples(st.integers(1, highest), st.just(highest))
)


@given(SIDE, SIDE, TILES, st.sampled_from([32, 448]), st.booleans())
def test_grid_is_internvls(width, height, tiles, side, thumbnail):
    """Prevents a grid other than InternVL's, which would change every token count."""
    tiling = tiling_of(*tiles, use_thumbnail=thumbnail)
    expected = internvl_grid(width, height, *tiles, side)
    assert tile_grid(width, height, tiling, side) == expected
    blocks = expected[0] * expected[1]
    assert tile_count(width, height, tiling, side) == blocks + (thumbnail and blocks != 1)


@pytest.mark.parametrize(
    ("lowest", "highest"),
    [(1, 4), (1, 6), (1, 12), (2, 24), (1, 40), (2, 2), (4, 4), (5, 5), (6, 7), (8, 9), (16, 17)],
)
def test_all_ties_and_grid_ratios(lowest, highest):
    """Prevents a wrong order among grids with equally many tiles."""
    tiling = tiling_of(lowest, highest)
    for ratio in {*tied_sizes(lowest, highest), *ratios(1, highest)}:
        for unit in (10, 100, 500, 2000):
            size = ratio.numerator * unit, ratio.denominator * unit
            assert tile_grid(*size, tiling, 448) == internvl_grid(*size, lowest, highest, 448)
