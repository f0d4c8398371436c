"""Encoder passes of ranks in a step, of equal items or of whole samples.

A pass's cost is linear in its *work*: 1, its items and, if items attend to each other, their sum of
squares. Peak memory is on the busiest rank for equal items, on any rank for whole
samples.

Shapes: [...] ranks of all groups and steps, F 2 or 3 columns of work.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from omnibal.cost.encoder_phase_costs import EncoderCost
from omnibal.cost.sharding_costs import ShardedExchange
from omnibal.packing.whole_samples import SamplePasses

# Bytes of passes by their work, [passes, F] -> [passes].
BytesOfWork = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EqualPasses:
    """Passes of items that take equal time, full except the last."""

    items: np.ndarray  # items of every rank, int64 [...]
    items_per_pass: int
    kept_items: int  # max items kept per rank

    def work(self, *, is_kept: bool) -> np.ndarray:
        """Return the number of kept or other passes, and of their items. [..., 2]"""
        items = self._items(is_kept)
        return np.stack([-(-items // self.items_per_pass), items], axis=-1)

    def kept_bytes(self, cost: EncoderCost) -> float:
        """Return the bytes of activations kept by the busiest rank."""
        items = int(self._items(True).max(initial=0))
        return float(cost.kept_bytes @ (-(-items // self.items_per_pass), items))

    def largest(self, bytes_of: BytesOfWork, *, is_kept: bool) -> float:
        """Return bytes of the largest kept or other pass over all ranks, or 0 without any."""
        items = min(int(self._items(is_kept).max(initial=0)), self.items_per_pass)
        return float(bytes_of(np.array([[1, items]]))[0]) if items else 0.0

    def exchange_ms(self, exchange: ShardedExchange, *, is_kept: bool) -> np.ndarray:
        """Return `ShardedExchange.passes_ms` summed over kept or other passes. [..., 3]"""
        # Time by the items of a pass: a rank runs full passes and one with the remainder.
        sizes = np.arange(1 + min(self.items_per_pass, self.items.max(initial=0)))
        of_pass = exchange.passes_ms(np.stack([np.ones_like(sizes), sizes], axis=-1))
        of_pass[0] = 0
        full, remainder = np.divmod(self._items(is_kept), self.items_per_pass)
        summed_ms: np.ndarray = of_pass[-1] * full[..., None] + of_pass[remainder]
        return summed_ms

    def in_lockstep(self, block: np.ndarray) -> "EqualPasses":
        """Return passes with every rank as busy as the busiest of its `block`, int64 [...]."""
        busiest = np.zeros(int(block.max(initial=-1)) + 1, np.int64)
        np.maximum.at(busiest, block, self.items)
        return replace(self, items=busiest[block])

    def _items(self, is_kept: bool) -> np.ndarray:
        kept = np.minimum(self.items, self.kept_items)
        return kept if is_kept else self.items - kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WholePasses:
    """Passes of whole samples."""

    passes: SamplePasses
    place: np.ndarray  # number of every rank as in `passes.rank`, int64 [...]

    def work(self, *, is_kept: bool) -> np.ndarray:
        """Return the number of kept or other passes, of their items and squares. [..., 3]"""
        return self._sums(self._select(is_kept), self._work(is_kept))

    def kept_bytes(self, cost: EncoderCost) -> np.ndarray:
        """Return the bytes of activations kept by every rank. [...]"""
        kept: np.ndarray = self.work(is_kept=True) @ cost.kept_bytes
        return kept

    def largest(self, bytes_of: BytesOfWork, *, is_kept: bool) -> np.ndarray:
        """Return bytes of every rank's largest kept or other pass, or 0 without any. [...]"""
        largest = np.zeros(int(self.place.max(initial=-1)) + 1)
        rank = self.passes.rank[self._select(is_kept)]
        np.maximum.at(largest, rank, bytes_of(self._work(is_kept)))
        return largest[self.place]

    def exchange_ms(self, exchange: ShardedExchange, *, is_kept: bool) -> np.ndarray:
        """Return `ShardedExchange.passes_ms` summed over kept or other passes. [..., 3]"""
        return self._sums(self._select(is_kept), exchange.passes_ms(self._work(is_kept)))

    def in_lockstep(self, block: np.ndarray) -> "WholePasses":
        """Return every rank's passes, pass i at the largest in its `block`, int64 [...]."""
        alone, blocks = self.passes, np.zeros(self.place.size, np.int64)
        blocks[self.place.ravel()] = block.ravel()
        number, runs = alone.number, 2 * blocks[alone.rank] + alone.is_kept
        numbers = int(number.max(initial=0)) + 1
        # Passes of one block, number and kept or not run together.
        keys, at = np.unique(runs * numbers + number, return_inverse=True)
        items, squares = np.zeros((2, len(keys)), np.int64)
        np.maximum.at(items, at, alone.items)
        np.maximum.at(squares, at, alone.squares)
        run = keys // numbers
        none = np.zeros_like(run)
        passes = SamplePasses(
            rank=run // 2, first=none, stop=none, items=items, squares=squares, is_kept=run % 2 == 1
        )
        return WholePasses(passes=passes, place=block)

    def _select(self, is_kept: bool) -> np.ndarray:
        return self.passes.is_kept == is_kept

    def _work(self, is_kept: bool) -> np.ndarray:
        passes, chosen = self.passes, self._select(is_kept)
        items = passes.items[chosen]
        return np.stack([np.ones_like(items), items, passes.squares[chosen]], axis=-1)

    def _sums(self, chosen: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return per-rank sums of `values` [chosen, columns] over chosen passes. [..., columns]"""
        rank, owners = self.passes.rank[chosen], int(self.place.max(initial=-1)) + 1
        sums = [np.bincount(rank, column, owners) for column in values.T]
        return np.stack(sums, axis=-1)[self.place]


EncoderPasses = EqualPasses | WholePasses  # passes of an encoder in a step


def encoding_ms(cost: EncoderCost, passes: EncoderPasses) -> np.ndarray:
    """Return ms of forward, backward and recomputed forward per rank. [..., 3]"""
    recomputed = passes.work(is_kept=False)
    total = passes.work(is_kept=True) + recomputed
    return np.stack(
        [total @ cost.forward_ms, total @ cost.backward_ms, recomputed @ cost.again_ms], axis=-1
    )


def exposed_ms(cost: EncoderCost, passes: EncoderPasses) -> np.ndarray:
    """Return exposed weight and gradient exchange in forward and backward, in ms, for equally busy
    ranks; 0 if weights are not sharded. [..., 2]"""
    if cost.exchange is None:
        return np.zeros(2)
    kept_ms, again_ms = (passes.exchange_ms(cost.exchange, is_kept=kept) for kept in (True, False))
    forward_ms = kept_ms[..., 0] + again_ms[..., 0]
    backward_ms = kept_ms[..., 1] + cost.is_trained * again_ms[..., 2]
    return np.stack([forward_ms, backward_ms], axis=-1)
