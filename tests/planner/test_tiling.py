"""Dynamic tiling against a brute-force statement of its rule, and against known grids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.config import TilingConfig
from omnibal.data.tiling import tile_count, tile_grid

SIDE = st.integers(1, 4000)


def brute_force_grid(width: int, height: int, lowest: int, highest: int, side: int):
    """Among the closest grids, the last whose half the image covers, else the first."""
    grids = [(c, r) for c in range(1, highest + 1) for r in range(1, highest + 1)]
    grids = sorted(
        (g for g in grids if lowest <= g[0] * g[1] <= highest), key=lambda g: g[0] * g[1]
    )
    distance = [abs(width / height - columns / rows) for columns, rows in grids]
    closest = [g for g, d in zip(grids, distance, strict=True) if d == min(distance)]
    covered = [g for g in closest[1:] if 2 * width * height > side * side * g[0] * g[1]]
    return covered[-1] if covered else closest[0]


@given(SIDE, SIDE, st.integers(1, 4), st.integers(4, 16), st.sampled_from([32, 448]))
def test_grid_is_the_closest_one(width, height, lowest, highest, side):
    """Prevents a grid other than InternVL's, which would change every token count."""
    tiling = TilingConfig(min_dynamic_patch=lowest, max_dynamic_patch=highest)
    expected = brute_force_grid(width, height, lowest, highest, side)
    assert tile_grid(width, height, tiling, side) == expected


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 700))
def test_grid_of_ties(columns, rows, unit):
    """Prevents a wrong tie rule, which random sizes hardly ever meet."""
    width, height = columns * unit, rows * unit
    expected = brute_force_grid(width, height, 1, 12, 448)
    assert tile_grid(width, height, TilingConfig(max_dynamic_patch=12), 448) == expected


@pytest.mark.parametrize(
    ("size", "highest", "grid"),
    [
        ((800, 1340), 6, (2, 3)),
        ((448, 448), 12, (1, 1)),
        ((633, 633), 12, (1, 1)),
        ((634, 634), 12, (2, 2)),
        ((800, 800), 12, (2, 2)),
        ((2000, 2000), 12, (3, 3)),
        ((640, 480), 4, (1, 1)),
        ((4000, 100), 6, (6, 1)),
        ((100, 4000), 6, (1, 6)),
    ],
)
def test_known_grids(size, highest, grid):
    """Prevents swapped columns and rows, and a square blown up to four tiles below half of them."""
    assert tile_grid(*size, TilingConfig(max_dynamic_patch=highest), 448) == grid


@pytest.mark.parametrize(
    ("size", "use_thumbnail", "tiles"),
    [((448, 448), True, 1), ((896, 448), True, 3), ((896, 448), False, 2), ((800, 1340), True, 7)],
)
def test_thumbnail_goes_with_more_than_one_tile(size, use_thumbnail, tiles):
    """Prevents a thumbnail of a single tile, or one counted where none is made."""
    tiling = TilingConfig(max_dynamic_patch=6, use_thumbnail=use_thumbnail)
    assert tile_count(*size, tiling, 448) == tiles
