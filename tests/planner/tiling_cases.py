"""InternVL's choice of tiles, step by step."""

import math


def internvl_grid(width: int, height: int, lowest: int, highest: int, side: int):
    """InternVL's choice, step by step: equally many tiles stay in the order of Python's set."""
    found = set()
    for most in range(lowest, highest + 1):
        for columns in range(1, most + 1):
            for rows in range(1, most + 1):
                if lowest <= columns * rows <= highest:
                    found.add((columns, rows))
    ordered = list(found)
    ordered.sort(key=lambda grid: grid[0] * grid[1])
    best, nearest = (1, 1), math.inf
    for grid in ordered:
        difference = abs(width / height - grid[0] / grid[1])
        if difference < nearest:
            best, nearest = grid, difference
        elif difference == nearest and width * height > 0.5 * side * side * grid[0] * grid[1]:
            best = grid
    return best
