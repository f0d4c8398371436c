"""Level packing for many samples per pack, with the number of packs set by the sums of sizes.

Samples are dealt longest first (Graham, SIAM Journal on Applied Mathematics 17, 1969), then
exchanges even out the rest. All packs are mixtures of the same lengths.
"""

import heapq
from collections.abc import Callable
from enum import StrEnum
from operator import add, itemgetter

import numpy as np

from omnibal.packing.fit import size_keys
from omnibal.packing.packs import Packs

_MIN_ROUNDS = 5  # of exchanges
_MAX_ROUNDS = 15  # while a pack exceeds its cap
_MOST_KINDS = 256
"""Max kinds of samples that are exchanged; with more, as with image tokens, most kinds are rare."""

_Load = tuple[float, float, tuple[float, ...], int]
"""Sort key of a pack: load, sum of its shares of the caps, shares, pack."""


class Leading(StrEnum):
    """Quantity that samples are dealt by; exchanges then level the tokens."""

    ITEMS = "items"
    """Items are exactly level. Best if all caps are nearly reached."""
    LARGER = "larger"
    """Larger of the item and token shares. Best with a few giant samples."""


def deal_level(
    sizes: np.ndarray, packs: int, caps: np.ndarray, leading: Leading, rng: np.random.Generator
) -> Packs:
    """Deal samples to `packs` non-empty packs, level in all features. A few may exceed a cap."""
    samples = sizes.shape[1]
    shares = sizes / caps[:, None]
    shuffled = rng.permutation(samples)
    *items, tokens = range(len(caps))
    if leading is Leading.ITEMS:
        # Texts have no items, and are dealt by tokens last.
        has_items = np.any(sizes[:-1] > 0, axis=0)[shuffled]
        parts = [(shuffled[has_items], items), (shuffled[~has_items], [tokens])]
    else:
        parts = [(shuffled, [*items, tokens])]
    pack_of = np.empty(samples, np.int64)
    heap: list[_Load] = [(0.0, 0.0, (0.0,) * len(caps), pack) for pack in range(packs)]
    for part, features in parts:
        if not len(part):
            continue
        # Longest first, to the least loaded pack by its max share of these features.
        own = shares.take(part, axis=1)
        longest_first = np.lexsort((-own.sum(axis=0), -own[features].max(axis=0)))
        load = _largest_of(features, len(shares))
        heap = [(load(held), total, held, pack) for _, total, held, pack in heap]
        heapq.heapify(heap)
        taken_by = []
        for size in zip(*own[:, longest_first].tolist(), strict=True):
            _, _, held, pack = heap[0]
            held = tuple(map(add, held, size))
            heapq.heapreplace(heap, (load(held), sum(held), held, pack))
            taken_by.append(pack)
        pack_of[part[longest_first]] = taken_by
    by_pack = np.argsort(pack_of, kind="stable")
    counts = np.bincount(pack_of, minlength=packs)
    dealt = Packs.from_counts(by_pack, counts[counts > 0])
    # Only samples of equal items are exchanged, so items stay level.
    return even_out(dealt, size_keys(sizes[:-1]), sizes[-1], int(caps[-1]), rng)


def _largest_of(features: list[int], of: int) -> Callable[[tuple[float, ...]], float]:
    if len(features) == of:
        return max
    if len(features) == 1:
        return itemgetter(features[0])
    return lambda held: max(held[feature] for feature in features)


def even_out(
    packs: Packs, kind: np.ndarray, tokens: np.ndarray, max_tokens: int, rng: np.random.Generator
) -> Packs:
    """Exchange samples of equal kind, int64 [samples], until hardly any pack exceeds the token cap.

    In each round every pack offers a sample of a kind. The largest offer goes to the pack with the
    smallest remainder, which minimizes the maximum. Only the 256 most frequent kinds are exchanged.
    """
    if not len(packs):
        return packs
    sample = packs.samples.copy()
    pack_of_slot = packs.pack_of_sample
    pack_tokens = packs.sums(tokens)
    by_kind = np.argsort(kind[sample], kind="stable")
    borders = np.flatnonzero(np.diff(kind[sample][by_kind])) + 1
    slots_of_kinds = np.split(by_kind, borders)
    if len(slots_of_kinds) > _MOST_KINDS:
        slots_of_kinds = sorted(slots_of_kinds, key=len, reverse=True)[:_MOST_KINDS]
    offers = [_Offers(slots, pack_of_slot) for slots in slots_of_kinds]
    for number in range(_MAX_ROUNDS):
        for offer in offers:
            slot, pack = offer.draw(rng), offer.packs
            given = tokens[sample[slot]]
            rest = pack_tokens[pack] - given
            smallest_rest_first, largest_given_first = _ascending(rest), _ascending(given)[::-1]
            source, target = slot[largest_given_first], slot[smallest_rest_first]
            sample[target] = sample[source]
            pack_tokens[pack[smallest_rest_first]] = (
                rest[smallest_rest_first] + given[largest_given_first]
            )
        if number + 1 >= _MIN_ROUNDS and pack_tokens.max() <= max_tokens:
            break
    return Packs(samples=sample, offsets=packs.offsets)


class _Offers:
    """Slots of a kind. Each pack with any offers a random slot."""

    def __init__(self, slots: np.ndarray, pack_of_slot: np.ndarray):
        packs = pack_of_slot[slots]
        self._slots, self._first = slots, np.flatnonzero(np.diff(packs, prepend=-1))
        self.packs, self._counts = packs[self._first], np.diff(self._first, append=len(slots))

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return self._slots[self._first + rng.integers(self._counts)]


def _ascending(values: np.ndarray) -> np.ndarray:
    """Stable ascending order, equal on any processor."""
    return np.sort(values << 32 | np.arange(len(values))) & 0xFFFFFFFF
