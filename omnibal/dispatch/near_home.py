"""Nodes of an encoding group's ranks, and items kept on the node whose ranks embed their tokens.

The features of an item go to the first stage of the pipeline that holds it, which is its *home*. A
node's links are many times as fast as the network, so that what is encoded on the home's node costs
next to nothing to send. No rank's load grows for that: ranks have their shares before.

Shapes: L pipelines of a group, R ranks of a pipeline, N = L x R.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

NO_LOAD = np.zeros((), np.int64)
"""Load of ranks that encode nothing yet."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Homes:
    """Where the ranks of some groups are, and the homes of what their pipelines hold.

    Ranks, pipelines and nodes are numbered over all groups; arrays are int64.
    """

    pipeline: np.ndarray
    """The pipeline of every rank."""
    node: np.ndarray
    """The node of every rank."""
    home: np.ndarray
    """Node of every pipeline's first rank; these ascend."""

    @classmethod
    def of(cls, node: np.ndarray, ranks_of_pipeline: int) -> Self:
        """From the nodes of every group's ranks, [groups, N]."""
        groups, ranks = node.shape
        inside = node - node.min(axis=1, keepdims=True)
        of_group = int(inside.max(initial=0)) + 1
        numbers = (inside + of_group * np.arange(groups)[:, None]).ravel()
        return cls(
            pipeline=np.arange(groups * ranks) // ranks_of_pipeline,
            node=numbers,
            home=numbers[::ranks_of_pipeline],
        )

    @property
    def is_home(self) -> np.ndarray:
        """Whether a rank is on its own pipeline's home, [ranks]."""
        return self.node == self.home[self.pipeline]


def nearest_first(
    items: np.ndarray, pipeline: np.ndarray, room: np.ndarray, homes: Homes
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Match items with room on ranks in four rounds, as many as may be in each.

    First with room of their own pipeline's ranks on its home, then of others' there, then of their
    own pipeline's elsewhere, then anywhere, which is of one group alone. No matching leaves fewer
    for the last two rounds: what is left for them has no room on its home.

    Args:
        items: of every entry.
        pipeline: of every entry, ascending.
        room: of every rank, of all rounds as much as there are items.

    Yields:
        Items of every entry that are matched, room of every rank that is, and the ranks in the
        order in which they are.
    """
    nowhere = len(homes.home)
    own_at_home = np.where(homes.is_home, homes.pipeline, nowhere)
    rounds = (
        (pipeline, own_at_home),
        (homes.home[pipeline], homes.node),
        (pipeline, homes.pipeline),
        (np.zeros_like(pipeline), np.zeros_like(homes.node)),
    )
    for of_entry, of_rank in rounds:
        order = np.argsort(of_rank, kind="stable")
        keys = max(nowhere, int(homes.node.max())) + 1
        both = np.bincount(of_entry, items, keys), np.bincount(of_rank, room, keys)
        limit = np.minimum(*both).astype(np.int64)
        here, taken = first_of_each(items, of_entry, limit), np.empty_like(room)
        taken[order] = first_of_each(room[order], of_rank[order], limit)
        yield here, taken, order
        items, room = items - here, room - taken


def first_of_each(counts: np.ndarray, group: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """How many of each entry's counts are among the first `limit` of its group; groups ascend."""
    before = np.cumsum(counts) - counts
    of_group = np.bincount(group, counts, len(limit)).astype(np.int64)
    before_in_group = before - (np.cumsum(of_group) - of_group)[group]
    return np.clip(limit[group] - before_in_group, 0, counts)
