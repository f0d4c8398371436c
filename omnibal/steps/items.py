"""Items shared: the rank of an encoding group that encodes each tile or clip of a step's packs.

Shapes: P packs, G groups (steps, and blocks of pipelines), L pipelines of a group, R ranks of a
pipeline, N = L x R ranks of a group.

Item counts per rank are settled first: encoders by descending item time, each deals its items to
the ranks with minimal load. With two encoders the busiest rank is at most one shorter item above
the optimum. Then items are assigned as runs, preferably to ranks on the node of the pipeline's
first stage, which embeds tokens (`omnibal.steps.near_home`).

Encoders with attention between items take whole samples, which `omnibal.steps.whole_samples`
deals first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from omnibal.steps.near_home import NO_LOAD, Homes, nearest_first
from omnibal.steps.whole_samples import HEAVIEST

_LONGEST = 1 << 20
"""Units of time of the longest item. Integers make all machines agree."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemRuns:
    """Runs of packs' items of one encoder, each encoded by one rank, int64 [runs].

    Sorted by rank, then pack, then first item.
    """

    pack: np.ndarray
    """Index of the pack."""
    first: np.ndarray
    """First item of the run within the pack's items of this encoder, in sample order."""
    count: np.ndarray
    """Items of the run, at least 1."""
    rank: np.ndarray
    """Rank of the group that encodes them."""

    def __len__(self) -> int:
        return len(self.pack)


def unit_of_time(item_ms: Mapping[str, float], square_ms: Mapping[str, float]) -> float:
    """Return the unit of time for dealing, a fraction of the longest item. 0 without times."""
    whole = [item_ms[name] + each for name, each in square_ms.items()]
    return max(whole or item_ms.values(), default=0.0) / _LONGEST


def share_items(
    items: Mapping[str, np.ndarray],
    pipeline_of_pack: np.ndarray,
    *,
    pipelines: int,
    ranks_of_pipeline: int,
    item_ms: Mapping[str, float],
    load: np.ndarray = NO_LOAD,
    unit_ms: float | None = None,
    node: np.ndarray | None = None,
) -> dict[str, ItemRuns]:
    """Deal the items of one step's packs to the ranks of an encoding group.

    Deterministic, so planner and ranks agree without communication.

    Args:
        items: of every pack by encoder, int [P], possibly 0 or empty.
        pipeline_of_pack: 0 to `pipelines` - 1, int [P].
        ranks_of_pipeline: R. Rank r of the group belongs to pipeline r // R.
        item_ms: time of an item by encoder, at least 0. May name further encoders.
        load: initial load of every rank, int64 [1, N], in units of `unit_ms`.
        unit_ms: `unit_of_time`, if other encoders were dealt before.
        node: of every rank, int64 [N]. None if all are on one node.

    Returns:
        Runs of every encoder of `items`. Every item is in one run.
    """
    pipeline_of_pack = np.asarray(pipeline_of_pack, np.int64)
    held = {
        name: np.bincount(pipeline_of_pack, counts, pipelines).astype(np.int64)[None]
        for name, counts in items.items()
    }
    shares = shares_of_ranks(
        held, ranks_of_pipeline=ranks_of_pipeline, item_ms=item_ms, load=load, unit_ms=unit_ms
    )
    if node is None:
        node = np.zeros(pipelines * ranks_of_pipeline, np.int64)
    homes = Homes.of(node[None], ranks_of_pipeline)
    return {
        name: _runs(np.asarray(counts, np.int64), pipeline_of_pack, shares[name][0], homes)
        for name, counts in items.items()
    }


def shares_of_ranks(
    held: Mapping[str, np.ndarray],
    *,
    ranks_of_pipeline: int,
    item_ms: Mapping[str, float],
    load: np.ndarray = NO_LOAD,
    unit_ms: float | None = None,
) -> dict[str, np.ndarray]:
    """Item counts of `share_items` per rank, int64 [G, N], from items held, int64 [G, L]."""
    if unit_ms is None:
        unit_ms = unit_of_time({name: item_ms[name] for name in held}, {})
    found: dict[str, np.ndarray] = {}
    for name in sorted(held, key=lambda name: (-item_ms[name], name)):
        if item_ms[name] and unit_ms:
            units = min(max(round(item_ms[name] / unit_ms), 1), HEAVIEST)
            found[name] = _level(held[name], load, ranks_of_pipeline, units)
            load = load + units * found[name]
        else:
            found[name] = _level(held[name], np.zeros((), np.int64), ranks_of_pipeline, 1)
    return {name: found[name] for name in held}


def _level(held: np.ndarray, load: np.ndarray, ranks_of_pipeline: int, units: int) -> np.ndarray:
    """Deal every group's items [G, L] to the ranks with minimal load so far, int64 [G, N].

    Water filling: all ranks are filled to a level in whole items, and the lowest ranks get one
    more.
    """
    groups, pipelines = held.shape
    ranks = pipelines * ranks_of_pipeline
    load = np.broadcast_to(load, (groups, ranks))
    total = held.sum(axis=1, keepdims=True)
    # Level if the k lowest ranks hold everything. The minimum over k is right.
    levels = (np.cumsum(np.sort(load, axis=1), axis=1) + total * units) // np.arange(1, ranks + 1)
    counts = np.maximum((levels.min(axis=1, keepdims=True) - load) // units, 0)
    missing = total - counts.sum(axis=1, keepdims=True)
    # Ties prefer ranks of pipelines with unassigned items of their own.
    height = (load + counts * units).reshape(groups, pipelines, ranks_of_pipeline)
    place = np.argsort(np.argsort(height, axis=2, kind="stable"), axis=2)
    over = held[..., None] - counts.reshape(height.shape).sum(axis=2, keepdims=True)
    abroad = (place >= over).reshape(groups, ranks)
    lowest_first = np.lexsort((abroad, height.reshape(groups, ranks)), axis=1)
    one_more = np.zeros_like(counts)
    np.put_along_axis(one_more, lowest_first, np.arange(ranks) < missing, axis=1)
    return counts + one_more


def items_at_home(
    held: np.ndarray, share: np.ndarray, homes: Homes
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Items that `share_items` assigns to the node of their first stage, from the items per
    pipeline and the shares of all ranks.

    Returns:
        Per rank, items of its own pipeline and all items. Per pipeline, all items.
    """
    pipeline = np.arange(len(held))
    (here, own, _), (more, others, _) = islice(nearest_first(held, pipeline, share, homes), 2)
    return own, own + others, here + more


def _runs(
    items: np.ndarray, pipeline_of_pack: np.ndarray, share: np.ndarray, homes: Homes
) -> ItemRuns:
    """Assign the items of packs [P] to ranks with these shares [N], nearest ranks first."""
    packs = np.argsort(pipeline_of_pack, kind="stable")
    items, start, parts = items[packs], np.zeros(len(packs), np.int64), []
    for here, taken, order in nearest_first(items, pipeline_of_pack[packs], share, homes):
        some, ranks = np.flatnonzero(here), order[taken[order] > 0]
        part = _laid(here[some], start[some], taken[ranks])
        part[0], part[3] = packs[some[part[0]]], ranks[part[3]]
        parts.append(part)
        start = start + here
    pack, first, count, rank = np.concatenate(parts, axis=1)
    order = np.lexsort((first, pack, rank))
    return ItemRuns(pack=pack[order], first=first[order], count=count[order], rank=rank[order])


def _laid(items: np.ndarray, start: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Match packs' items, numbered from `start`, with ranks' room in order. Both have equal sums.

    Returns:
        Pack, first item, count and rank of every run, int64 [4, runs].
    """
    pack_ends, rank_ends = np.cumsum(items), np.cumsum(room)
    ends = np.union1d(pack_ends, rank_ends)
    ends = ends[ends > 0]
    begins = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    pack = np.searchsorted(pack_ends, begins, side="right")
    rank = np.searchsorted(rank_ends, begins, side="right")
    first = start[pack] + begins - (pack_ends - items)[pack]
    return np.stack([pack, first, ends - begins, rank])
