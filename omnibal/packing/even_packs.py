"""Packs of equal sums, for many samples per pack; the sums of sizes set the number of packs.

Longest processing time first (Graham, SIAM Journal on Applied Mathematics 17, 1969), then
exchanges of samples with equal items. All packs are mixtures of the same lengths.
"""

import heapq
from collections.abc import Callable
from enum import StrEnum
from operator import add, itemgetter

import numpy as np

from omnibal.packing.fit import size_keys
from omnibal.packing.packs import Packs

_MIN_EXCHANGE_ROUNDS = 5  # of exchanges
_MAX_EXCHANGE_ROUNDS = 15  # while a pack exceeds its cap
_MAX_EXCHANGED_KINDS = 256  # max kinds exchanged; with more (image tokens), most kinds are rare

# Sort key of a pack: load, sum of its shares of the caps, shares, pack.
_Load = tuple[float, float, tuple[float, ...], int]


class Leading(StrEnum):
    """Quantity that samples are dealt by, before exchanges equalize the tokens."""

    ITEMS = "items"  # equal items in all packs; best if all caps are nearly reached
    LARGER = "larger"  # larger of the item and token shares; best with a few giant samples


def deal_level(
    sizes: np.ndarray, packs: int, caps: np.ndarray, leading: Leading, rng: np.random.Generator
) -> Packs:
    """Deal samples to `packs` packs with similar sums of all features; a few may exceed a cap.

    Sizes are int64 [features, samples]. Packs without samples are dropped.
    """
    samples = sizes.shape[1]
    shares = sizes / caps[:, None]
    shuffled = rng.permutation(samples)
    *items, tokens = range(len(caps))
    if leading is Leading.ITEMS:
        # Texts have no items. Dealt last, by tokens, they fill up packs of few tokens.
        has_items = np.any(sizes[:-1] > 0, axis=0)[shuffled]
        parts = [(shuffled[has_items], items), (shuffled[~has_items], [tokens])]
    else:
        parts = [(shuffled, [*items, tokens])]
    pack_of = np.empty(samples, np.int64)
    heap: list[_Load] = [(0.0, 0.0, (0.0,) * len(caps), pack) for pack in range(packs)]
    for part, features in parts:
        if not len(part):
            continue
        # The load of a pack is its max share of these features.
        part_shares = shares.take(part, axis=1)
        longest_first = np.lexsort((-part_shares.sum(axis=0), -part_shares[features].max(axis=0)))
        load = _load_key(features, len(shares))
        heap = [(load(used), total, used, pack) for _, total, used, pack in heap]
        heapq.heapify(heap)
        packs_in_turn = []
        for size in zip(*part_shares[:, longest_first].tolist(), strict=True):
            _, _, used, pack = heap[0]
            used = tuple(map(add, used, size))
            heapq.heapreplace(heap, (load(used), sum(used), used, pack))
            packs_in_turn.append(pack)
        pack_of[part[longest_first]] = packs_in_turn
    by_pack = np.argsort(pack_of, kind="stable")
    counts = np.bincount(pack_of, minlength=packs)
    dealt = Packs.from_counts(by_pack, counts[counts > 0])
    # Only samples of equal items are exchanged, so items stay equal.
    return even_out_tokens(dealt, size_keys(sizes[:-1]), sizes[-1], int(caps[-1]), rng)


def _load_key(features: list[int], all_features: int) -> Callable[[tuple[float, ...]], float]:
    # Called once per sample, so a built-in if possible.
    if len(features) == all_features:
        return max
    if len(features) == 1:
        return itemgetter(features[0])
    return lambda used: max(used[feature] for feature in features)


def even_out_tokens(
    packs: Packs, kind: np.ndarray, tokens: np.ndarray, max_tokens: int, rng: np.random.Generator
) -> Packs:
    """Return packs after exchanges within a `kind`, int64 [samples], that even out their tokens.

    In each round every pack offers a random sample of a kind. The largest offer goes to the pack
    with the smallest remainder, which minimizes the maximum. Rounds end once no pack exceeds the
    token cap; the last, `_MAX_EXCHANGE_ROUNDS`, may leave some above it.
    """
    if not len(packs):
        return packs
    sample = packs.samples.copy()
    pack_of_slot = packs.pack_of_sample
    pack_tokens = packs.sums(tokens)
    by_kind = np.argsort(kind[sample], kind="stable")
    borders = np.flatnonzero(np.diff(kind[sample][by_kind])) + 1
    slots_of_kinds = np.split(by_kind, borders)
    if len(slots_of_kinds) > _MAX_EXCHANGED_KINDS:
        slots_of_kinds = sorted(slots_of_kinds, key=len, reverse=True)[:_MAX_EXCHANGED_KINDS]
    offers = [_Offers(slots, pack_of_slot) for slots in slots_of_kinds]
    for number in range(_MAX_EXCHANGE_ROUNDS):
        for offer in offers:
            slot, pack = offer.draw(rng), offer.packs
            offered = tokens[sample[slot]]
            remainder = pack_tokens[pack] - offered
            smallest_first, largest_first = _argsort(remainder), _argsort(offered)[::-1]
            sample[slot[smallest_first]] = sample[slot[largest_first]]
            pack_tokens[pack[smallest_first]] = remainder[smallest_first] + offered[largest_first]
        if number + 1 >= _MIN_EXCHANGE_ROUNDS and pack_tokens.max() <= max_tokens:
            break
    return Packs(samples=sample, offsets=packs.offsets)


class _Offers:
    """Slots of a kind of samples: each pack with any offers a random slot."""

    def __init__(self, slots: np.ndarray, pack_of_slot: np.ndarray):
        packs = pack_of_slot[slots]
        self._slots, self._first = slots, np.flatnonzero(np.diff(packs, prepend=-1))
        self.packs, self._counts = packs[self._first], np.diff(self._first, append=len(slots))

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return self._slots[self._first + rng.integers(self._counts)]


def _argsort(values: np.ndarray) -> np.ndarray:
    """Return the stable ascending order of `values`, below 2**31."""
    # The index in the low 32 bits breaks ties, so numpy's fastest sort is as good as a stable one.
    return np.sort(values << 32 | np.arange(len(values))) & 0xFFFFFFFF
