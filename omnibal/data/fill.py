"""Packs filled one by one, each with the most valuable samples that fit.

For up to some hundred packs: either a knapsack is solved for each, in units that sizes are rounded
up to, or all pairs of samples are looked at in turn, by exact sizes.
"""

from collections.abc import Iterator

import numpy as np

from omnibal.data.patterns import Grid
from omnibal.limits import Caps

_MAX_CELLS = 1 << 14
_MAX_PAIRED = 160
"""Most samples whose pairs are all tried: half of them the largest, half the smallest."""


def fill_one_by_one(
    tiles: np.ndarray, tokens: np.ndarray, values: np.ndarray, first: np.ndarray | None, caps: Caps
) -> Iterator[np.ndarray]:
    """Packs [samples] of indices into the arguments, each as valuable as what is left allows.

    Args:
        tiles, tokens: int64 [samples].
        values: float64 [samples], positive.
        first: float64 [samples]; the sample with the highest opens the next pack (Gupta and Ho,
            Production Planning & Control 10, 1999, as modified by Fleszar and Hindi, Computers &
            Operations Research 29, 2002). Where it is None, no sample must be in a pack.
        caps: of every pack.
    """
    grid = Grid.of(min(caps["tiles"], int(tiles.sum())), caps["tokens"], _MAX_CELLS)
    tile_units = np.minimum(-(-tiles // grid.tile_unit), grid.tiles)
    token_units = np.minimum(-(-tokens // grid.token_unit), grid.tokens)
    # Samples of equal units and about equal value are copies of one item.
    order = np.lexsort((-values, token_units, tile_units))
    units = tile_units[order] << 32 | token_units[order]
    starts = np.flatnonzero(np.diff(units, prepend=-1))
    queues = np.split(order, starts[1:]) if len(order) else []
    while queues:
        opened = np.zeros(0, np.int64)
        if first is not None:
            largest = int(np.argmax([first[queue[0]] for queue in queues]))
            opened, queues[largest] = np.split(queues[largest], [1])
        bundles = [(index, n) for index, queue in enumerate(queues) for n in _doubling(len(queue))]
        item = np.array([index for index, _ in bundles], np.int64)
        copies = np.array([n for _, n in bundles], np.int64)
        head = np.array([queue[0] if len(queue) else -1 for queue in queues])[item]
        taken = _best_bundles(
            copies * values[head],
            copies * tile_units[head],
            copies * token_units[head],
            grid.tiles - int(tile_units[opened].sum()),
            grid.tokens - int(token_units[opened].sum()),
        )
        counts = np.bincount(item[taken], weights=copies[taken], minlength=len(queues)).astype(int)
        chosen = [queue[:n] for queue, n in zip(queues, counts, strict=True)]
        yield np.concatenate([opened, *chosen])
        queues = [queue[n:] for queue, n in zip(queues, counts, strict=True) if n < len(queue)]


def fill_by_pairs(
    tiles: np.ndarray, tokens: np.ndarray, values: np.ndarray, first: np.ndarray, caps: Caps
) -> Iterator[np.ndarray]:
    """Packs [samples] of indices, each opened by one sample and filled by the best pairs.

    Where packs hold two or three samples, this is the best that can go with the first.

    Args:
        tiles, tokens: int64 [samples].
        values: float64 [samples], positive.
        first: float64 [samples]; the sample with the highest opens the next pack.
        caps: of every pack.
    """
    left = np.argsort(-first, kind="stable")
    while len(left):
        pack, left = [left[:1]], left[1:]
        tiles_left = caps["tiles"] - tiles[pack[0][0]]
        tokens_left = caps["tokens"] - tokens[pack[0][0]]
        while True:
            fits = left[(tiles[left] <= tiles_left) & (tokens[left] <= tokens_left)]
            if not len(fits):
                break
            if len(fits) > _MAX_PAIRED:
                fits = np.concatenate([fits[: _MAX_PAIRED // 2], fits[-_MAX_PAIRED // 2 :]])
            chosen = fits[
                _best_pair(tiles[fits], tokens[fits], values[fits], tiles_left, tokens_left)
            ]
            pack.append(chosen)
            tiles_left -= tiles[chosen].sum()
            tokens_left -= tokens[chosen].sum()
            left = left[~np.isin(left, chosen)]
        yield np.concatenate(pack)


def _best_pair(
    tiles: np.ndarray, tokens: np.ndarray, values: np.ndarray, max_tiles: int, max_tokens: int
) -> list[int]:
    """The most valuable one or two samples that fit together; each fits alone."""
    alone = np.eye(len(tiles), dtype=bool)

    def pairs(sizes: np.ndarray) -> np.ndarray:
        return np.where(alone, sizes, sizes[:, None] + sizes)

    fits = (pairs(tiles) <= max_tiles) & (pairs(tokens) <= max_tokens)
    best = int(np.where(fits, pairs(values), -1.0).argmax())
    return sorted(set(divmod(best, len(tiles))))


def _doubling(count: int) -> list[int]:
    """Bundles 1, 2, 4, ... and a rest, whose subsets give every number up to `count`.

    Example:
        >>> _doubling(10)
        [1, 2, 4, 3]
    """
    bundles: list[int] = []
    while count > 0:
        bundles.append(min(1 << len(bundles), count))
        count -= bundles[-1]
    return bundles


def _best_bundles(
    values: np.ndarray, tiles: np.ndarray, tokens: np.ndarray, max_tiles: int, max_tokens: int
) -> list[int]:
    """The most valuable set of bundles within both maxima, as indices; each is taken once."""
    table = np.zeros((max_tiles + 1, max_tokens + 1), np.float32)
    fits = np.flatnonzero((tiles <= max_tiles) & (tokens <= max_tokens))
    taken = np.zeros((len(fits), *table.shape), bool)
    for row, bundle in enumerate(fits):
        v, t = tiles[bundle], tokens[bundle]
        below = table[v:, t:]
        with_it = table[: len(below), : below.shape[1]] + np.float32(values[bundle])
        np.greater(with_it, below, out=taken[row, v:, t:])
        np.maximum(below, with_it, out=below)
    chosen = []
    tiles_left, tokens_left = max_tiles, max_tokens
    for row in range(len(fits) - 1, -1, -1):
        if taken[row, tiles_left, tokens_left]:
            chosen.append(int(fits[row]))
            tiles_left -= tiles[fits[row]]
            tokens_left -= tokens[fits[row]]
    return chosen
