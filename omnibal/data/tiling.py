"""Dynamic tiling of images into square tiles, as in InternVL 1.5 (section 3.2)."""

from functools import lru_cache

from omnibal.model.encoders import TilingConfig


@lru_cache(maxsize=65_536)
def tile_grid(width: int, height: int, tiling: TilingConfig, image_size: int) -> tuple[int, int]:
    """Return columns and rows of the tile grid closest to the image's aspect ratio.

    Ties go to a larger grid only if the image covers more than half of its pixels.

    Example:
        >>> tile_grid(800, 1340, TilingConfig(max_dynamic_patch=6), 448)
        (2, 3)
    """
    ratio = width / height
    best, best_distance = (1, 1), float("inf")
    for columns, rows in _candidate_grids(tiling):
        distance = abs(ratio - columns / rows)
        covers_half = width * height > 0.5 * image_size**2 * columns * rows
        if distance < best_distance or (distance == best_distance and covers_half):
            best, best_distance = (columns, rows), distance
    return best


def tile_count(width: int, height: int, tiling: TilingConfig, image_size: int) -> int:
    """Count the tiles of an image, plus the thumbnail if there are several and tiling has it."""
    columns, rows = tile_grid(width, height, tiling, image_size)
    tiles = columns * rows
    return tiles + 1 if tiling.use_thumbnail and tiles > 1 else tiles


@lru_cache
def _candidate_grids(tiling: TilingConfig) -> tuple[tuple[int, int], ...]:
    """Return every (columns, rows) of min to max tiles, fewest tiles first."""
    # Equal numbers of tiles follow the iteration order of InternVL's Python set, so the same set is
    # built in the same order: an image of ratio 5:2 is as near to (2, 2) as to (4, 1). The
    # processors of Transformers have fewer columns first.
    min_tiles, max_tiles = tiling.min_dynamic_patch, tiling.max_dynamic_patch
    grids = {
        (columns, rows)
        for most in range(min_tiles, max_tiles + 1)
        for columns in range(1, most + 1)
        for rows in range(1, min(most, max_tiles // columns) + 1)
        if columns * rows >= min_tiles
    }
    ordered = sorted(grids) if tiling.by_processor else grids
    return tuple(sorted(ordered, key=lambda grid: grid[0] * grid[1]))
