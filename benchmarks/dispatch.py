"""How long assignments of items to ranks take, and how near they come to their lower bounds.

    python benchmarks/dispatch.py

Weights are log-normal, and uniform between 0.1 and 1, for 100,000 items on 2,560 ranks; uniform for
fewer. Samples of images are log-normal in their cells, and are held by pipelines of eight ranks.

Then how much of what is encoded leaves its node of eight GPUs: where nodes are not known, and where
they are. Pipelines hold packs of random tiles, or random samples of images.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from omnibal.dispatch.balance import balance, longest_first
from omnibal.dispatch.items import share_items
from omnibal.dispatch.load_bounds import load_bound
from omnibal.dispatch.near_home import Homes, brought_home
from omnibal.dispatch.whole_samples import deal_group
from omnibal.model.data_parallel_encoders import nodes_of_groups
from omnibal.model.parallel import Parallel

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
    print(f"whole samples, mean of {_DRAWS}: above the bound, part that stays at home, ms")
    for samples, ranks in ((24, 8), (192, 64), (640, 64), (1_024, 256)):
        dealt = [_dealt(rng, samples, ranks) for _ in range(_DRAWS)]
        above, at_home, ms = np.array(dealt).mean(axis=0)
        print(f"  {samples:5,} on {ranks:3}       {above:7.2%} {at_home:7.1%} {ms:7.2f}")
    _print_nodes(rng)


def _print_nodes(rng: np.random.Generator) -> None:
    print(f"leaves its node, mean of {_DRAWS}: tiles before, after, samples before, after, more ms")
    for tensor, pipeline, data, pipelines in (
        (1, 1, 64, 64),
        (2, 1, 32, 16),
        (2, 1, 256, 256),
        (4, 1, 64, 64),
        (4, 2, 16, 4),
        (2, 4, 64, 16),
    ):
        sizes = Parallel(tensor=tensor, pipeline=pipeline, data=data)
        node, of_pipeline = nodes_of_groups(sizes, pipelines, 8)[0], tensor * pipeline
        tiles = np.mean([_tiles_away(rng, node, of_pipeline) for _ in range(_DRAWS)], axis=0)
        images = np.mean([_images_away(rng, node, of_pipeline) for _ in range(_DRAWS)], axis=0)
        name = f"TP {tensor}, PP {pipeline}, {pipelines} together"
        print(
            f"  {name:24} {tiles[0]:6.1%} {tiles[1]:6.1%} {images[0]:8.1%} {images[1]:6.1%}", end=""
        )
        print(f" {images[2]:8.2f}")


def _tiles_away(
    rng: np.random.Generator, node: np.ndarray, of_pipeline: int
) -> tuple[float, float]:
    """Shares of the tiles of eight packs a pipeline that leave their node, before and after."""
    pipelines = len(node) // of_pipeline
    home, tiles = np.arange(8 * pipelines) % pipelines, rng.integers(0, 27, 8 * pipelines)
    away = []
    for known in (None, node):
        runs = share_items(
            {"vision": tiles},
            home,
            pipelines=pipelines,
            ranks_of_pipeline=of_pipeline,
            item_ms={"vision": 1.0},
            node=known,
        )["vision"]
        leaves = node[runs.rank] != node[::of_pipeline][home[runs.pack]]
        away.append(float(runs.count[leaves].sum() / tiles.sum()))
    return away[0], away[1]


def _images_away(
    rng: np.random.Generator, node: np.ndarray, of_pipeline: int
) -> tuple[float, float, float]:
    """Shares of the time of ten samples a rank that leave their node, before and after, and the ms
    of one core that it takes to bring them home."""
    pipelines, ranks = len(node) // of_pipeline, len(node)
    cells = np.clip(rng.lognormal(6, 0.6, 10 * ranks), 16, 16_384).astype(np.int64)
    weight, home = 1_000 * cells + cells**2 // 10, rng.integers(0, pipelines, len(cells))
    before = deal_group(weight, home, pipelines, of_pipeline)
    homes = Homes.of(node[None], of_pipeline)
    seconds, after = _timed(lambda: brought_home(weight, home, before, homes))
    shares = [
        float(weight[node[rank] != node[::of_pipeline][home]].sum() / weight.sum())
        for rank in (before, after)
    ]
    return shares[0], shares[1], 1e3 * seconds


def _dealt(rng: np.random.Generator, samples: int, ranks: int) -> tuple[float, float, float]:
    """How far above the bound samples are dealt, which part stays at home, and ms of one core."""
    cells = np.clip(rng.lognormal(6, 0.6, samples), 16, 16_384).astype(np.int64)
    weight, of_pipeline = 1_000 * cells + cells**2 // 10, 8
    pipeline = rng.integers(0, ranks // of_pipeline, samples)
    seconds, rank = _timed(lambda: deal_group(weight, pipeline, ranks // of_pipeline, of_pipeline))
    busiest = np.bincount(rank, weight, ranks).max()
    is_home = rank // of_pipeline == pipeline
    at_home = weight[is_home].sum() / weight.sum()
    return busiest / load_bound(weight, ranks) - 1, at_home, 1e3 * seconds


def _timed(run: Callable[[], Found]) -> tuple[float, Found]:
    """Seconds of one core, and what is found."""
    start = time.process_time()
    found = run()
    return time.process_time() - start, found


if __name__ == "__main__":
    main()
