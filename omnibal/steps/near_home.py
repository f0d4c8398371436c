"""Nodes of an encoding group's ranks, and encoding of items near the stage that embeds their
tokens.

The *home* of an item is the node of its pipeline's first stage. Features encoded there need no
network. Loads are settled before, so they do not change.

Shapes: L pipelines of a group, R ranks of a pipeline, N = L x R.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

NO_LOAD = np.zeros((), np.int64)
"""Load of ranks without items."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Homes:
    """Pipelines and nodes of ranks, and homes of pipelines, numbered over all groups, int64."""

    pipeline: np.ndarray
    node: np.ndarray
    home: np.ndarray
    """Node of every pipeline's first rank, ascending."""

    @classmethod
    def of(cls, node: np.ndarray, ranks_of_pipeline: int) -> Self:
        """Build from the nodes of every group's ranks, [groups, N]."""
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
    """Match items with ranks in four rounds, each maximal.

    Rounds: own pipeline's ranks at home, other ranks at home, own pipeline's ranks elsewhere, any
    rank (within one group only). No matching leaves fewer items away from home.

    Args:
        items: of every entry.
        pipeline: of every entry, ascending.
        room: capacity of every rank, with the same sum as items.

    Yields:
        Matched items of every entry, matched capacity of every rank, and the order of ranks.
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
    """Part of each entry's counts within the first `limit` of its group. Groups ascend."""
    before = np.cumsum(counts) - counts
    of_group = np.bincount(group, counts, len(limit)).astype(np.int64)
    before_in_group = before - (np.cumsum(of_group) - of_group)[group]
    return np.clip(limit[group] - before_in_group, 0, counts)
