"""Full steps: as many packs as fill whole steps, for trainers whose steps all have equally many.

Where packs are trained as they are given, the lightest ones are split until they fill a step. Where
the trainer packs by next fit, parts of a pack would come together again: there all samples are
dealt to so many packs more, which are smaller. What fills no step all the same is left out.
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
"""Share of packs that may come together with the next one before any trade places."""


def size_of_step(packs: int, packs_per_step: int, ranks: int) -> int:
    """Packs of every step of so many packs: what a step should have, or, where there are fewer, as
    many as ranks have equally many of; 0 where there are fewer than ranks."""
    return min(packs_per_step, packs // ranks * ranks)


def whole_steps(packs: ScheduledPacks, packs_per_step: int, ranks: int) -> ScheduledPacks:
    """Leave out what no step of equally many packs has: what is over of every epoch.

    Args:
        packs: of which every step but an epoch's last has `packs_per_step`.
        packs_per_step: of all ranks together, a multiple of `ranks`.
        ranks: data-parallel ones; their packs of a step differ by one at most.
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
    """Split the lightest packs until the packs fill whole steps; as they are where these have too
    few samples for that.

    Args:
        load: gives the load of every pack; the heaviest of the lightest are split, in equal halves.
    """
    over = len(packs) % packs_per_step
    if not over:
        return packs
    lightest_first = np.argsort(load(packs), kind="stable")
    samples = np.cumsum(np.diff(packs.offsets)[lightest_first])
    extra = packs_per_step - over
    # One step of the lightest, or two of more of them where one would have too few samples.
    sizes = np.arange(over, len(packs) + 1, packs_per_step)
    enough = sizes[samples[sizes - 1] >= sizes + extra]
    if not len(enough):
        return packs
    chosen, kept = np.split(lightest_first, enough[:1])
    return Packs.join([packs.take(np.sort(kept)), _split(packs.take(chosen), extra, load)])


def _split(packs: Packs, times: int, load: Callable[[Packs], np.ndarray]) -> Packs:
    """Split the heaviest pack of two samples or more in halves, so many times."""
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
    """Two parts of a pack of about equal weight, with its samples in their order."""
    held, first = [0.0, 0.0], set[int]()
    for sample in sorted(pack, key=weight.__getitem__, reverse=True):
        part = int(held[0] > held[1])
        held[part] += weight[sample]
        if part == 0:
            first.add(sample)
    return [each for each in pack if each in first], [each for each in pack if each not in first]


def level_to_fill(
    packs: Packs, packs_per_step: int, tokens: np.ndarray, max_tokens: int, seed: Seed
) -> Packs:
    """Deal all samples anew to as many packs as fill whole steps, level in tokens, if next fit
    keeps these apart; packs as they are otherwise, and where they are good as they are."""
    wanted = -(-len(packs) // packs_per_step) * packs_per_step
    if wanted > len(tokens) or (wanted == len(packs) and _are_apart(packs, tokens)):
        return packs
    rng, sizes = np.random.default_rng(seed), tokens.astype(np.int64)[None]
    dealt = deal_level(sizes, wanted, np.array([max_tokens]), Leading.LARGER, rng)
    fits = len(dealt) == wanted and dealt.sums(tokens).max() <= max_tokens
    return dealt if fits and _are_apart(dealt, tokens) else packs


def _are_apart(packs: Packs, tokens: np.ndarray) -> bool:
    """Whether next fit would make nearly all of these packs as they are, in random order."""
    held = packs.sums(tokens)
    first = np.sort(np.maximum.reduceat(tokens[packs.samples], packs.offsets[:-1]))
    room = (held.max() - held)[held < held.max()]
    joined = np.searchsorted(first, room, side="right").sum() / len(packs)
    return float(joined) <= _MOST_MERGING * len(packs)
