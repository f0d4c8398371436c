"""Assign each tile or clip of a step's packs to a rank of its encoding group.

Shapes: P packs, G groups (steps, and blocks of pipelines), L pipelines of a group, R ranks of a
pipeline, N = L x R ranks of a group.

Item counts per rank come first: encoders by descending item time, each deals its items to the ranks
with minimal load. With two encoders the busiest rank is at most one shorter item above the optimum.
Then items are assigned as runs, preferably to ranks on their *home*: the node of the pipeline's
first stage, which embeds tokens, so that features stay within the node.

Encoders with attention between items get full samples, dealt before (`steps/whole_samples.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Self

import numpy as np

_LONGEST_UNITS = 1 << 20  # integer time of the longest item, so that all machines agree
MAX_UNITS = 1 << 40  # max units of a sample or item, so that sums fit 64-bit integers
NO_LOAD = np.zeros((), np.int64)  # load of ranks without items


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Homes:
    """Pipelines and nodes of ranks, and homes of pipelines, numbered over all groups, int64."""

    pipeline: np.ndarray  # of every rank, [G N]
    node: np.ndarray  # of every rank, [G N]
    home: np.ndarray  # node of every pipeline's first rank, ascending, [G L]

    @classmethod
    def from_nodes(cls, node: np.ndarray, ranks_of_pipeline: int) -> Self:
        """Build from the nodes of every group's ranks, [G, N]."""
        groups = len(node)
        inside = node - node.min(axis=1, keepdims=True)
        nodes_of_group = int(inside.max(initial=0)) + 1
        numbers = (inside + nodes_of_group * np.arange(groups)[:, None]).ravel()
        pipeline = np.arange(node.size) // ranks_of_pipeline
        return cls(pipeline=pipeline, node=numbers, home=numbers[::ranks_of_pipeline])

    @property
    def is_home(self) -> np.ndarray:
        """Whether each rank is on its pipeline's home, bool [G N]."""
        return self.node == self.home[self.pipeline]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemRuns:
    """Runs of packs' items of one encoder, each encoded by one rank, int64 [runs].

    Sorted by rank, then pack, then first item.
    """

    pack: np.ndarray  # index of the pack among the step's
    first: np.ndarray  # first item, among the pack's items of this encoder in sample order
    count: np.ndarray  # items of the run, at least 1
    rank: np.ndarray  # rank of the group that encodes them

    def __len__(self) -> int:
        return len(self.pack)


def unit_of_time(item_ms: Mapping[str, float], square_ms: Mapping[str, float]) -> float:
    """Return 2^-20 of the longest item's ms, of encoders in `square_ms` if any. 0 without times."""
    whole = [item_ms[name] + per_square_ms for name, per_square_ms in square_ms.items()]
    return max(whole or item_ms.values(), default=0.0) / _LONGEST_UNITS


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
    """Deal the items of one step's packs to the ranks of an encoding group, as runs by encoder.

    Deterministic, so planner and ranks agree without communication.

    Args:
        items: number of items of every pack by encoder, int [P].
        pipeline_of_pack: 0 to `pipelines` - 1, int [P].
        ranks_of_pipeline: R. Rank r of the group belongs to pipeline r // R.
        item_ms: milliseconds of an item by encoder, at least 0. May name further encoders.
        load: initial load of every rank, int64 [1, N], in units of `unit_ms`.
        unit_ms: `unit_of_time`, if encoders were dealt before. None for that of `items`' encoders.
        node: node of every rank, int64 [N]. None if all are on one node.
    """
    pipeline_of_pack = np.asarray(pipeline_of_pack, np.int64)
    of_pipelines = {
        name: np.bincount(pipeline_of_pack, counts, pipelines).astype(np.int64)[None]
        for name, counts in items.items()
    }
    shares = shares_of_ranks(
        of_pipelines,
        ranks_of_pipeline=ranks_of_pipeline,
        item_ms=item_ms,
        load=load,
        unit_ms=unit_ms,
    )
    if node is None:
        node = np.zeros(pipelines * ranks_of_pipeline, np.int64)
    homes = Homes.from_nodes(node[None], ranks_of_pipeline)
    return {
        name: _assign_runs(np.asarray(counts, np.int64), pipeline_of_pack, shares[name][0], homes)
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
    """Return `share_items`' item counts per rank, [G, N], from pipelines' items `held`, [G, L]."""
    if unit_ms is None:
        unit_ms = unit_of_time({name: item_ms[name] for name in held}, {})
    shares: dict[str, np.ndarray] = {}
    for name in sorted(held, key=lambda name: (-item_ms[name], name)):
        if item_ms[name] and unit_ms:
            units = min(max(round(item_ms[name] / unit_ms), 1), MAX_UNITS)
            shares[name] = _fill_ranks(held[name], load, ranks_of_pipeline, units)
            load = load + units * shares[name]
        else:
            shares[name] = _fill_ranks(held[name], NO_LOAD, ranks_of_pipeline, 1)
    return {name: shares[name] for name in held}


def _fill_ranks(
    held: np.ndarray, load: np.ndarray, ranks_of_pipeline: int, units: int
) -> np.ndarray:
    """Return items per rank, [G, N], by water filling of `load` [G, N] with items `held` [G, L].

    All ranks are filled to one level in whole items, and the lowest ranks get one more.
    """
    groups, pipelines = held.shape
    ranks = pipelines * ranks_of_pipeline
    load = np.broadcast_to(load, (groups, ranks))
    total = held.sum(axis=1, keepdims=True)
    # The level if the k lowest ranks get all items, for every k. The smallest is the right one.
    levels = (np.cumsum(np.sort(load, axis=1), axis=1) + total * units) // np.arange(1, ranks + 1)
    counts = np.maximum((levels.min(axis=1, keepdims=True) - load) // units, 0)
    missing = total - counts.sum(axis=1, keepdims=True)
    # Of equally loaded ranks, prefer ranks of pipelines with unassigned items.
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
    """Count pipelines' items `held` [G L] that `share_items` encodes at home by `share` [G N].

    Returns items per rank of its own pipeline and in total, [G N] each, and per pipeline, [G L].
    """
    pipeline = np.arange(len(held))
    # The first two rounds are at home.
    (here, own, _), (more, others, _) = islice(nearest_first(held, pipeline, share, homes), 2)
    return own, own + others, here + more


def _assign_runs(
    items: np.ndarray, pipeline_of_pack: np.ndarray, share: np.ndarray, homes: Homes
) -> ItemRuns:
    """Return runs that fill ranks' shares, [N], with packs' items, [P], nearest ranks first."""
    packs = np.argsort(pipeline_of_pack, kind="stable")
    items, start, parts = items[packs], np.zeros(len(packs), np.int64), []
    for here, taken, order in nearest_first(items, pipeline_of_pack[packs], share, homes):
        some, ranks = np.flatnonzero(here), order[taken[order] > 0]
        # Both sides have equal sums, so runs end where an entry of either side ends.
        pack_ends, rank_ends = np.cumsum(here[some]), np.cumsum(taken[ranks])
        ends = np.union1d(pack_ends, rank_ends)
        ends = ends[ends > 0]
        begins = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        entry = np.searchsorted(pack_ends, begins, side="right")
        rank = ranks[np.searchsorted(rank_ends, begins, side="right")]
        first = start[some][entry] + begins - (pack_ends - here[some])[entry]
        parts.append(np.stack([packs[some[entry]], first, ends - begins, rank]))
        start = start + here
    pack, first, count, rank = np.concatenate(parts, axis=1)
    order = np.lexsort((first, pack, rank))
    return ItemRuns(pack=pack[order], first=first[order], count=count[order], rank=rank[order])


def nearest_first(
    items: np.ndarray, pipeline: np.ndarray, room: np.ndarray, homes: Homes
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Match items with ranks in four rounds, each maximal.

    Rounds: own pipeline's ranks at home, other ranks at home, own pipeline's ranks elsewhere, any
    rank (within one group only). No matching leaves fewer items away from home.

    Args:
        items: number of items of every entry (a pack or a pipeline), [entries].
        pipeline: pipeline of every entry, ascending, [entries].
        room: items that every rank takes, with the same sum, [ranks].

    Yields:
        Items matched in a round, by entry and by rank, and the order of ranks in the round.
    """
    nowhere = len(homes.home)
    own_at_home = np.where(homes.is_home, homes.pipeline, nowhere)
    rounds = (
        (pipeline, own_at_home),
        (homes.home[pipeline], homes.node),
        (pipeline, homes.pipeline),
        (np.zeros_like(pipeline), np.zeros_like(homes.node)),
    )
    # An entry may go to ranks with an equal key.
    for of_entry, of_rank in rounds:
        order = np.argsort(of_rank, kind="stable")
        keys = max(nowhere, int(homes.node.max())) + 1
        sums = np.bincount(of_entry, items, keys), np.bincount(of_rank, room, keys)
        limit = np.minimum(*sums).astype(np.int64)
        here, taken = take_first(items, of_entry, limit), np.empty_like(room)
        taken[order] = take_first(room[order], of_rank[order], limit)
        yield here, taken, order
        items, room = items - here, room - taken


def take_first(counts: np.ndarray, group: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Return how much of each count is in the first `limit[g]` of its group g. `group` ascends."""
    before = np.cumsum(counts) - counts
    of_group = np.bincount(group, counts, len(limit)).astype(np.int64)
    before_in_group = before - (np.cumsum(of_group) - of_group)[group]
    return np.clip(limit[group] - before_in_group, 0, counts)
