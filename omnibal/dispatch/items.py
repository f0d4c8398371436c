"""Items shared: which rank of an encoding group encodes which tiles and clips of a step's packs.

Shapes: P packs, G groups (steps, and blocks of pipelines), L pipelines of a group, R ranks of a
pipeline, N = L x R ranks of a group.

Items of one encoder take equal time, so a share is a number of items, and shares are settled before
what they hold. Encoders come in the order of their items' time, longest first, and each deals its
items to the ranks with the least load so far. With two encoders the busiest rank is then at most
one item of the shorter kind above what is least; every rank has about equally many of each kind,
which keeps memory even too. What is left open, which of equal ranks have one more, goes to
pipelines that hold more than their share, so that few features cross from one to another.

Ranks on the node of a pipeline's first stage, which embeds tokens, first take what its packs hold,
in the order of packs: those of the pipeline, then others there. Only what is over goes to another
node (`omnibal.dispatch.near_home`). Shares are runs, so that a pack is split only where a share
ends.

Encoders whose items attend to each other take whole samples, which `omnibal.dispatch.whole_samples`
deals before all other items.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from omnibal.dispatch.near_home import NO_LOAD, Homes, nearest_first
from omnibal.dispatch.whole_samples import HEAVIEST

_LONGEST = 1 << 20
"""Units of time of the item that takes longest: whole numbers, so that all machines agree."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemRuns:
    """Runs of packs' items of one encoder, each encoded by one rank; arrays are int64 [runs].

    They are ordered by rank, then pack, then first item.
    """

    pack: np.ndarray
    """Place of the pack among those given."""
    first: np.ndarray
    """Number of the run's first item within the pack's items of this encoder, in sample order."""
    count: np.ndarray
    """Items of the run, at least 1."""
    rank: np.ndarray
    """Rank of the group that encodes them."""

    def __len__(self) -> int:
        return len(self.pack)


def unit_of_time(item_ms: Mapping[str, float], square_ms: Mapping[str, float]) -> float:
    """Time that dealing counts as one: a part of that of the longest item, of encoders that take
    whole samples, and have a time of squares, if there are any; 0 where nothing takes any time."""
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

    A function of its arguments alone, so that planner and all ranks agree without a word.

    Args:
        items: of every pack by encoder, int [P]; packs without items, or no packs, are fine.
        pipeline_of_pack: 0 to `pipelines` - 1, int [P].
        ranks_of_pipeline: R; rank r of the group is of pipeline r // R.
        item_ms: time of an item by encoder, at least 0; encoders without items may be named.
        load: of every rank before, int64 [1, N], in units of `unit_ms`.
        unit_ms: `unit_of_time`, where there are other encoders before.
        node: of every rank, int64 [N]; None where all are on one.

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
    """How many items `share_items` gives to every rank by encoder, int64 [G, N], for many groups or
    steps at once, from those that all packs of every pipeline hold, int64 [G, L]."""
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
    """Deal every group's items [G, L], each to the rank with the least load so far. int64 [G, N]

    Items fill loads [G, N] as water does: a level of which all ranks below have what is missing,
    in whole items of these units, and then one more for the lowest ranks while there are any.
    """
    groups, pipelines = held.shape
    ranks = pipelines * ranks_of_pipeline
    load = np.broadcast_to(load, (groups, ranks))
    total = held.sum(axis=1, keepdims=True)
    # Level at which the k lowest ranks alone would hold everything; the lowest of them is true.
    levels = (np.cumsum(np.sort(load, axis=1), axis=1) + total * units) // np.arange(1, ranks + 1)
    counts = np.maximum((levels.min(axis=1, keepdims=True) - load) // units, 0)
    missing = total - counts.sum(axis=1, keepdims=True)
    # Of equal ranks, those first whose pipeline still has items of its own without a rank.
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
    """Items that `share_items` leaves on the node of the first stage that needs them, from those
    of every pipeline and the share of every rank of all groups.

    Returns:
        Of every rank, those of its own pipeline and all of them; all of every pipeline.
    """
    pipeline = np.arange(len(held))
    (here, own, _), (more, others, _) = islice(nearest_first(held, pipeline, share, homes), 2)
    return own, own + others, here + more


def _runs(
    items: np.ndarray, pipeline_of_pack: np.ndarray, share: np.ndarray, homes: Homes
) -> ItemRuns:
    """Lay the items of packs [P] on ranks with these shares [N], nearest ranks first."""
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
    """Lay packs' items on the ranks' room, both in order and of equal sum. A pack's items begin
    with number `start`.

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
