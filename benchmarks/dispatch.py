"""How long assignments of items to ranks take, and how near they come to their lower bounds.

    python benchmarks/dispatch.py

Weights are log-normal, and uniform between 0.1 and 1, for 100,000 items on 2,560 ranks; uniform for
fewer.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from omnibal.dispatch.balance import balance, longest_first
from omnibal.dispatch.items import share_items
from omnibal.dispatch.load_bounds import load_bound

ITEMS, RANKS = 100_000, 2_560
_DRAWS = 10
Found = TypeVar("Found")


def main() -> None:
    rng = np.random.default_rng(0)
    print(f"{ITEMS:,} items on {RANKS:,} ranks: seconds of one core, and above the bound")
    drawn = {
        "log-normal weights": rng.lognormal(0, 0.8, ITEMS),
        "uniform weights": rng.uniform(0.1, 1, ITEMS),
    }
    for name, weight in drawn.items():
        seconds, found = _timed(partial(balance, weight, RANKS))
        print(f"  {name:18} {seconds:6.3f} s  {found.above_bound:7.3%}")
    packs = ITEMS // 5
    pipelines = RANKS // 32
    seconds, _ = _timed(
        lambda: share_items(
            {"vision": np.full(packs, 3), "audio": np.full(packs, 2)},
            np.arange(packs) * pipelines // packs,
            pipelines=pipelines,
            ranks_of_pipeline=32,
            item_ms={"vision": 5.0, "audio": 8.0},
        )
    )
    print(f"  {'two encoders':18} {seconds:6.3f} s")
    print(f"above the bound, mean of {_DRAWS}: longest first alone, and with all that follows it")
    for items, ranks in ((192, 64), (200, 8), (640, 64), (3_000, 500)):
        alone, best = [], []
        for _ in range(_DRAWS):
            few = rng.uniform(0.1, 1, items)
            busiest = np.bincount(longest_first(few, ranks), few, ranks).max()
            alone.append(busiest / load_bound(few, ranks) - 1)
            best.append(balance(few, ranks).above_bound)
        print(f"  {items:5,} on {ranks:3}       {np.mean(alone):7.2%} {np.mean(best):7.2%}")


def _timed(run: Callable[[], Found]) -> tuple[float, Found]:
    """Seconds of one core, and what is found."""
    start = time.process_time()
    found = run()
    return time.process_time() - start, found


if __name__ == "__main__":
    main()
