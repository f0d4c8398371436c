"""Full steps, for trainers that require equally many packs in every step.

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

_MAX_MERGED_SHARE = 0.02  # max share of packs that may merge with the next pack before swaps


def size_of_step(packs: int, packs_per_step: int, ranks: int) -> int:
    """Return packs of a full step, equal on all ranks: fewer in a short run, 0 if below `ranks`."""
    return min(packs_per_step, packs // ranks * ranks)


def whole_steps(packs: ScheduledPacks, packs_per_step: int, ranks: int) -> ScheduledPacks:
    """Return the schedule without packs that fill no step. Raise if an epoch fills none.

    On entry every step except an epoch's last has `packs_per_step` packs, a multiple of `ranks`,
    and ranks' counts differ by at most 1.
    """
    fewest = int(np.bincount(packs.epoch).min())
    size = size_of_step(fewest, packs_per_step, ranks)
    if not size:
        raise UserError(
            f"an epoch has {fewest:,} packs for {ranks:,} data-parallel ranks; every rank needs "
            "one in every step: give more samples, fewer ranks, or a lower --max-tokens"
        )
    is_whole = np.bincount(packs.step) >= size
    kept = np.flatnonzero(is_whole[packs.step] & (packs.slot < size // ranks))
    left = packs.take(kept)
    return replace(left, step=np.unique(left.step, return_inverse=True)[1])


def split_to_fill(packs: Packs, packs_per_step: int, load: Callable[[Packs], np.ndarray]) -> Packs:
    """Return packs that fill all steps: the lightest step's are halved, heaviest first.

    Returns the packs unchanged if there are too few samples. `load` returns the load of packs.
    """
    over = len(packs) % packs_per_step
    if not over:
        return packs
    lightest_first = np.argsort(load(packs), kind="stable")
    samples = np.cumsum(np.diff(packs.offsets)[lightest_first])
    extra = packs_per_step - over
    # Packs of the lightest step, or of more steps if these have fewer samples than packs needed.
    sizes = np.arange(over, len(packs) + 1, packs_per_step)
    enough = sizes[samples[sizes - 1] >= sizes + extra]
    if not len(enough):
        return packs
    chosen, kept = np.split(lightest_first, enough[:1])
    return Packs.join([packs.take(np.sort(kept)), _split_heaviest(packs.take(chosen), extra, load)])


def _split_heaviest(packs: Packs, times: int, load: Callable[[Packs], np.ndarray]) -> Packs:
    """Return packs after `times` splits of the heaviest pack with several samples into halves."""
    alone = load(Packs(samples=packs.samples, offsets=np.arange(len(packs.samples) + 1)))
    weight = dict(zip(packs.samples.tolist(), alone.tolist(), strict=True))  # of every sample
    lists = [packs[pack].tolist() for pack in range(len(packs))]
    single = [pack for pack in lists if len(pack) == 1]
    heap = [(-sum(map(weight.__getitem__, pack)), pack) for pack in lists if len(pack) > 1]
    heapq.heapify(heap)
    for _ in range(times):
        _, heaviest = heapq.heappop(heap)
        # Longest processing time first on two halves, which keep the samples' order.
        halves, loads = (set[int](), set[int]()), [0.0, 0.0]
        for sample in sorted(heaviest, key=weight.__getitem__, reverse=True):
            lighter = int(loads[0] > loads[1])
            loads[lighter] += weight[sample]
            halves[lighter].add(sample)
        for members in halves:
            half = [sample for sample in heaviest if sample in members]
            if len(half) == 1:
                single.append(half)
            else:
                heapq.heappush(heap, (-sum(map(weight.__getitem__, half)), half))
    return Packs.from_lists([*(pack for _, pack in heap), *single])


def level_to_fill(
    packs: Packs, packs_per_step: int, tokens: np.ndarray, max_tokens: int, seed: Seed
) -> Packs:
    """Deal samples to packs of similar tokens that fill all steps, for a trainer's next fit.

    Returns the packs unchanged if they do already, samples are too few, or new packs would merge.
    """
    wanted = -(-len(packs) // packs_per_step) * packs_per_step
    if wanted > len(tokens) or (wanted == len(packs) and _stay_apart(packs, tokens)):
        return packs
    rng, sizes = np.random.default_rng(seed), tokens.astype(np.int64)[None]
    dealt = deal_level(sizes, wanted, np.array([max_tokens]), Leading.LARGER, rng)
    fits = len(dealt) == wanted and dealt.sums(tokens).max() <= max_tokens
    return dealt if fits and _stay_apart(dealt, tokens) else packs


def _stay_apart(packs: Packs, tokens: np.ndarray) -> bool:
    """Return whether next fit preserves nearly all of these packs in random order."""
    used = packs.sums(tokens)
    # The trainer's pack length is the largest pack. Packs start with their largest sample.
    first = np.sort(np.maximum.reduceat(tokens[packs.samples], packs.offsets[:-1]))
    room = (used.max() - used)[used < used.max()]
    # Expected number of packs that the next pack's first sample joins.
    merges = np.searchsorted(first, room, side="right").sum() / len(packs)
    return float(merges) <= _MAX_MERGED_SHARE * len(packs)
