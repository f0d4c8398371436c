"""Fill one pack after another with the most valuable samples left, by knapsack or by pairs.

Arrays: sizes [features, samples], values and first [samples], caps [features]; tokens come last.
"""

from collections.abc import Iterator

import numpy as np

from omnibal.packing.fit import size_keys
from omnibal.packing.patterns import CapGrid, limit_item_caps

_MAX_FILL_CELLS = 1 << 14  # of a knapsack table; sizes are rounded up to stay within
_MAX_PAIRED = 160  # samples to try all pairs of: half first, half last by `first`


def fill_one_by_one(
    sizes: np.ndarray, values: np.ndarray, first: np.ndarray | None, caps: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield packs, as sample indices, each of about max total value by a 0/1 knapsack.

    With `first`, about its highest opens a pack (Gupta and Ho, Production Planning & Control 10,
    1999; Fleszar and Hindi, Computers & Operations Research 29, 2002)."""
    grid = CapGrid.from_caps(limit_item_caps(caps, sizes.sum(axis=1)), _MAX_FILL_CELLS)
    units = np.minimum(-(-sizes // grid.units[:, None]), grid.cells[:, None])
    # Samples of equal units count as copies of the most valuable, which packs take first.
    order = np.lexsort((-values, *units[::-1]))
    starts = np.flatnonzero(np.diff(size_keys(units)[order], prepend=-1))
    queues = np.split(order, starts[1:]) if len(order) else []
    while queues:
        opened = np.zeros(0, np.int64)
        if first is not None:
            largest = int(np.argmax([first[queue[0]] for queue in queues]))
            opened, queues[largest] = np.split(queues[largest], [1])
        bundles = [(i, n) for i, queue in enumerate(queues) for n in _split_doubling(len(queue))]
        item = np.array([index for index, _ in bundles], np.int64)
        copies = np.array([n for _, n in bundles], np.int64)
        head = np.array([queue[0] if len(queue) else -1 for queue in queues])[item]
        taken = _best_bundles(
            copies * values[head],
            copies * units[:, head],
            grid.cells - units[:, opened].sum(axis=1),
        )
        counts = np.bincount(item[taken], weights=copies[taken], minlength=len(queues)).astype(int)
        chosen = [queue[:n] for queue, n in zip(queues, counts, strict=True)]
        yield np.concatenate([opened, *chosen])
        queues = [queue[n:] for queue, n in zip(queues, counts, strict=True) if n < len(queue)]


def fill_by_pairs(
    sizes: np.ndarray, values: np.ndarray, first: np.ndarray, caps: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield packs, as sample indices, each opened by the sample highest in `first`. The most
    valuable pairs or samples that fit follow, optimal for packs of three if at most 160 fit."""
    left = np.argsort(-first, kind="stable")
    while len(left):
        pack, left = [left[:1]], left[1:]
        room = caps - sizes[:, pack[0][0]]
        while True:
            fits = left[(sizes.take(left, axis=1) <= room[:, None]).all(axis=0)]
            if not len(fits):
                break
            if len(fits) > _MAX_PAIRED:
                fits = np.concatenate([fits[: _MAX_PAIRED // 2], fits[-_MAX_PAIRED // 2 :]])
            is_single = np.eye(len(fits), dtype=bool)  # one sample, not a pair
            size, value = sizes.take(fits, axis=1)[:, :, None], values[fits][:, None]
            pair_size = np.where(is_single, size, size + size.swapaxes(1, 2))
            pair_value = np.where(is_single, value, value + value.T)
            fitting = (pair_size <= room[:, None, None]).all(axis=0)
            best = int(np.where(fitting, pair_value, -1.0).argmax())
            chosen = fits[sorted(set(divmod(best, len(fits))))]
            pack.append(chosen)
            room -= sizes[:, chosen].sum(axis=1)
            left = left[~np.isin(left, chosen)]
        yield np.concatenate(pack)


def _split_doubling(count: int) -> list[int]:
    """Return bundle sizes 1, 2, 4, ... and a remainder, with subset sums 0 to `count`.

    Example:
        >>> _split_doubling(10)
        [1, 2, 4, 3]
    """
    bundles: list[int] = []
    while count > 0:
        bundles.append(min(1 << len(bundles), count))
        count -= bundles[-1]
    return bundles


def _best_bundles(values: np.ndarray, sizes: np.ndarray, room: np.ndarray) -> list[int]:
    """Return indices of the bundles [bundles] of max total value within `room` [features]."""
    table = np.zeros(room + 1, np.float32)  # max value within each capacity
    fits = np.flatnonzero((sizes <= room[:, None]).all(axis=0))
    taken = np.zeros((len(fits), *table.shape), bool)  # by capacity, if the best set has it
    for row, bundle in enumerate(fits):
        holding = tuple(slice(size, None) for size in sizes[:, bundle].tolist())
        below = table[holding]
        with_it = table[tuple(map(slice, below.shape))] + np.float32(values[bundle])
        np.greater(with_it, below, out=taken[row][holding])
        np.maximum(below, with_it, out=below)
    chosen = []
    left = room.copy()
    for row in range(len(fits) - 1, -1, -1):  # trace the table back
        if taken[row][tuple(left)]:
            chosen.append(int(fits[row]))
            left -= sizes[:, fits[row]]
    return chosen
