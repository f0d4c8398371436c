"""Full steps, for trainers that require equal packs per step.

The lightest packs are split until they fill a step. If the trainer packs by next fit, which would
merge the parts, all samples are dealt to more and smaller packs instead. A remainder is dropped.
"""

import heapq
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from omnibal.base.errors import UserError
from omnibal.packing.even_packs import Leading, deal_level
from omnibal.packing.fit import Seed
from omnibal.packing.packs import Packs, ScheduledPacks

_MOST_MERGING = 0.02
"""Max share of packs that may merge with the next pack before swaps."""


def size_of_step(packs: int, packs_per_step: int, ranks: int) -> int:
    """Packs per step, equal for all ranks, fewer in a short run. 0 if fewer than ranks."""
    return min(packs_per_step, packs // ranks * ranks)


def whole_steps(packs: ScheduledPacks, packs_per_step: int, ranks: int) -> ScheduledPacks:
    """Drop the remainder of every epoch that fills no step.

    Every step except an epoch's last has `packs_per_step` packs, a multiple of `ranks`, whose
    counts differ by at most 1.
    """
    fewest = int(np.bincount(packs.epoch).min())
    size = size_of_step(fewest, packs_per_step, ranks)
    if not size:
        raise UserError(
            f"an epoch has {fewest:,} packs for {ranks:,} data-parallel ranks, each of which needs "
            "one in every step: give more samples, fewer ranks, or a lower --max-tokens"
        )
    is_whole = np.bincount(packs.step) >= size
    kept = np.flatnonzero(is_whole[packs.step] & (packs.slot < size // ranks))
    left = packs.take(kept)
    return replace(left, step=np.unique(left.step, return_inverse=True)[1])


def split_to_fill(packs: Packs, packs_per_step: int, load: Callable[[Packs], np.ndarray]) -> Packs:
    """Halve the heaviest of the lightest packs until packs fill whole steps.

    Unchanged if samples are too few. `load` returns the load of every pack.
    """
    over = len(packs) % packs_per_step
    if not over:
        return packs
    lightest_first = np.argsort(load(packs), kind="stable")
    samples = np.cumsum(np.diff(packs.offsets)[lightest_first])
    extra = packs_per_step - over
    # Use the lightest step, or more of the lightest packs if it has too few samples.
    sizes = np.arange(over, len(packs) + 1, packs_per_step)
    enough = sizes[samples[sizes - 1] >= sizes + extra]
    if not len(enough):
        return packs
    chosen, kept = np.split(lightest_first, enough[:1])
    return Packs.join([packs.take(np.sort(kept)), _split(packs.take(chosen), extra, load)])


def _split(packs: Packs, times: int, load: Callable[[Packs], np.ndarray]) -> Packs:
    """Split the heaviest pack of at least two samples in halves, repeatedly."""
    alone = load(Packs(samples=packs.samples, offsets=np.arange(len(packs.samples) + 1)))
    weight = dict(zip(packs.samples.tolist(), alone.tolist(), strict=True))
    whole = [packs[pack].tolist() for pack in range(len(packs))]
    single = [pack for pack in whole if len(pack) == 1]
    heap = [(-sum(map(weight.__getitem__, pack)), pack) for pack in whole if len(pack) > 1]
    heapq.heapify(heap)
    for _ in range(times):
        _, heaviest = heapq.heappop(heap)
        for half in _halves(heaviest, weight):
            if len(half) == 1:
                single.append(half)
            else:
                heapq.heappush(heap, (-sum(map(weight.__getitem__, half)), half))
    return Packs.from_lists([*(pack for _, pack in heap), *single])


def _halves(pack: list[int], weight: dict[int, float]) -> tuple[list[int], list[int]]:
    """Split a pack into parts of similar weight, keeping sample order."""
    held, first = [0.0, 0.0], set[int]()
    for sample in sorted(pack, key=weight.__getitem__, reverse=True):
        part = int(held[0] > held[1])
        held[part] += weight[sample]
        if part == 0:
            first.add(sample)
    second = [sample for sample in pack if sample not in first]
    return [sample for sample in pack if sample in first], second


def level_to_fill(
    packs: Packs, packs_per_step: int, tokens: np.ndarray, max_tokens: int, seed: Seed
) -> Packs:
    """Deal samples to similar packs that fill whole steps, unless next fit would merge them."""
    wanted = -(-len(packs) // packs_per_step) * packs_per_step
    if wanted > len(tokens) or (wanted == len(packs) and _are_apart(packs, tokens)):
        return packs
    rng, sizes = np.random.default_rng(seed), tokens.astype(np.int64)[None]
    dealt = deal_level(sizes, wanted, np.array([max_tokens]), Leading.LARGER, rng)
    fits = len(dealt) == wanted and dealt.sums(tokens).max() <= max_tokens
    return dealt if fits and _are_apart(dealt, tokens) else packs


def _are_apart(packs: Packs, tokens: np.ndarray) -> bool:
    """Whether next fit preserves nearly all of these packs in random order."""
    held = packs.sums(tokens)
    first = np.sort(np.maximum.reduceat(tokens[packs.samples], packs.offsets[:-1]))
    room = (held.max() - held)[held < held.max()]
    joined = np.searchsorted(first, room, side="right").sum() / len(packs)
    return float(joined) <= _MOST_MERGING * len(packs)
