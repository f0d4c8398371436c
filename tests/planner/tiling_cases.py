"""InternVL's choice of tiles, step by step."""

import math


def internvl_grid(width: int, height: int, lowest: int, highest: int, side: int):
    """Return InternVL's grid. Grids with equally many tiles keep the order of Python's set."""
    found = {
        (columns, rows)
        for most in range(lowest, highest + 1)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if lowest <= columns * rows <= highest
    }
    best, nearest = (1, 1), math.inf
    for grid in sorted(found, key=math.prod):
        difference = abs(width / height - grid[0] / grid[1])
        if difference < nearest:
            best, nearest = grid, difference
        elif difference == nearest and width * height > 0.5 * side * side * grid[0] * grid[1]:
            best = grid
    return best
