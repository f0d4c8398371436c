"""Packing rules of other systems, written anew from what those systems do, to compare with.

Each rule sees one stream of all samples and uses every sample once. What a rule needs data-parallel
ranks for (dealing packs to ranks, rounding their number up) is left to the caller, and no rule
pads, cuts or drops a sample, even where its system would.
"""

from bisect import bisect_left, bisect_right, insort_right
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.fit import Seed, check_samples_fit
from omnibal.packing.isf import pack_isf
from omnibal.packing.pack_bound import naive_lower_bound
from omnibal.packing.packs import Packs


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """A packing rule; same lengths, caps and seed give the same packs."""

    name: str
    rule: Callable[[Lengths, Caps, Seed], Packs]
    """Packs in the order in which the system would train them."""
    keeps_order: bool
    """Neighbouring packs are meant to share a step; where False, the caller may shuffle them."""
    keeps_tile_cap: bool
    keeps_token_cap: bool
    source: str
    """System, and where its public code holds the rule."""


def samples_per_micro_batch(lengths: Lengths, caps: Caps) -> int:
    """Fixed count that holds as much on average as full packs would: rounded, at least 1."""
    return max(1, round(len(lengths) / naive_lower_bound(lengths, caps)))


def fixed_count(lengths: Lengths, caps: Caps, seed: Seed) -> Packs:
    """Random samples, the same number in every micro-batch but the last."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    return _cut_evenly(order, samples_per_micro_batch(lengths, caps))


def sequential(lengths: Lengths, caps: Caps, seed: Seed) -> Packs:
    """Shuffled samples in their order; the one that would break a cap opens the next pack.

    The public code knows a token cap only and starts anew with every global batch; the tile cap is
    added here, and the epoch is one batch.

    Raises:
        UserError: a sample is larger than a cap.
    """
    # Without a round of sampling and filtering, the grouping is all that is left of ISF.
    return pack_isf(lengths, caps, seed, iterations=0)


def first_fit_decreasing(lengths: Lengths, caps: Caps, seed: Seed) -> Packs:
    """Longest sample first, into the oldest pack that has room for its tokens; tiles not counted.

    Over the whole epoch, as offline packing does it; online, each worker packs one buffer of
    samples after another. The packs are trained in random order.

    Raises:
        UserError: a sample has more tokens than the cap.
    """
    _check_tokens_fit(lengths, caps)
    rng = np.random.default_rng(seed)
    order = _longest_first(lengths, rng)
    bins = _first_fit(lengths.tokens[order].tolist(), caps["tokens"])
    packs = _gather(order, np.array(bins))
    return packs.take(rng.permutation(len(packs)))


def knapsack(lengths: Lengths, caps: Caps, seed: Seed, *, window_samples: int = 2000) -> Packs:
    """Within windows of the stream, one pack after another takes the longest sample that fits.

    A sample fits when neither its tokens nor its tiles break a cap; of equally long ones the last
    in the stream is taken. The public code counts images where this counts tiles.

    Raises:
        UserError: a sample is larger than a cap.
    """
    check_samples_fit(lengths, caps)
    stream = np.random.default_rng(seed).permutation(len(lengths))
    packs: list[np.ndarray] = []
    for start in range(0, len(stream), window_samples):
        window = stream[start : start + window_samples]
        window = window[np.argsort(lengths.tokens[window], kind="stable")]
        packs += [window[ranks] for ranks in _fill_in_turn(lengths, window, caps)]
    return Packs.from_lists(packs)


def online_buffers(lengths: Lengths, caps: Caps, seed: Seed, *, buffers: int = 20) -> Packs:
    """Stream into a limited number of open packs, the ones with most tiles first.

    The open packs are kept by falling tiles, the older first among equals. A sample goes into the
    first of them that holds it under both caps, or opens one. A pack at a cap is emitted at once;
    when more than `buffers` are open, the one with most tiles is emitted, even if just opened; at
    the end all are, most tiles first. As with `allow_overflow=False`, which the public recipes
    set beside 20 buffers, no sample is split. Text-only samples get a dummy tile there, and none
    here.

    A pack with few tiles and hardly a token of room stays open to the end, so the longer the
    stream, the fewer of the open packs still take samples; there, each worker has its own stream.

    Raises:
        UserError: a sample is larger than a cap.
    """
    check_samples_fit(lengths, caps)
    tiles, tokens = lengths.column("tiles").tolist(), lengths.tokens.tolist()
    emitted: list[list[int]] = []
    opened: list[_Buffer] = []
    for sample in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        tiles_left, tokens_left = caps["tiles"] - tiles[sample], caps["tokens"] - tokens[sample]
        for position, buffer in enumerate(opened):
            if buffer.tiles <= tiles_left and buffer.tokens <= tokens_left:
                del opened[position]
                break
        else:
            buffer = _Buffer()
        buffer.samples.append(sample)
        buffer.tiles += tiles[sample]
        buffer.tokens += tokens[sample]
        if buffer.tiles == caps["tiles"] or buffer.tokens == caps["tokens"]:
            emitted.append(buffer.samples)
            continue
        insort_right(opened, buffer, key=lambda other: -other.tiles)
        if len(opened) > buffers:
            emitted.append(opened.pop(0).samples)
    return Packs.from_lists(emitted + [buffer.samples for buffer in opened])


def length_grouped(lengths: Lengths, caps: Caps, seed: Seed) -> Packs:
    """Fixed count from mega-batches sorted by falling tokens, so that neighbours are similar.

    A mega-batch is 50 micro-batches of the shuffled samples, fewer where that leaves less than
    four mega-batches. The longest sample of all changes places with the very first one, so that a
    lack of memory shows at once.
    """
    count = samples_per_micro_batch(lengths, caps)
    order = np.random.default_rng(seed).permutation(len(lengths))
    per_mega_batch = count * max(1, min(50, len(order) // (4 * count)))
    starts = range(0, len(order), per_mega_batch)
    for start in starts:
        batch = order[start : start + per_mega_batch]
        order[start : start + per_mega_batch] = batch[
            np.argsort(-lengths.tokens[batch], kind="stable")
        ]
    longest = max(starts, key=lambda start: lengths.tokens[order[start]])
    order[[0, longest]] = order[[longest, 0]]
    return _cut_evenly(order, count)


def vision_sorted(lengths: Lengths, caps: Caps, seed: Seed) -> Packs:
    """Longest sample first, into the emptiest pack by tokens; then the packs by rising tiles.

    A sample that the emptiest pack cannot hold opens a new one. The system calls this first-fit
    decreasing, but its heap of packs gives the emptiest, not the first that fits.

    Raises:
        UserError: a sample has more tokens than the cap.
    """
    _check_tokens_fit(lengths, caps)
    order = _longest_first(lengths, np.random.default_rng(seed))
    heap: list[tuple[int, int]] = []
    bins: list[int] = []
    for size in lengths.tokens[order].tolist():
        if heap and heap[0][0] + size <= caps["tokens"]:
            filled, chosen = heappop(heap)
        else:
            filled, chosen = 0, len(heap)
        heappush(heap, (filled + size, chosen))
        bins.append(chosen)
    packs = _gather(order, np.array(bins))
    return packs.take(np.argsort(packs.sums(lengths.column("tiles")), kind="stable"))


@dataclass(slots=True, eq=False)
class _Buffer:
    """An open pack."""

    tiles: int = 0
    tokens: int = 0
    samples: list[int] = field(default_factory=list)


def _check_tokens_fit(lengths: Lengths, caps: Caps) -> None:
    tiles = max(caps["tiles"], int(lengths.column("tiles").max()))
    check_samples_fit(lengths, Caps.of(tiles=tiles, tokens=caps["tokens"]))


def _longest_first(lengths: Lengths, rng: np.random.Generator) -> np.ndarray:
    """Samples by falling tokens, equally long ones in random order."""
    order = rng.permutation(len(lengths))
    return order[np.argsort(-lengths.tokens[order], kind="stable")]


def _cut_evenly(order: np.ndarray, count: int) -> Packs:
    return Packs(samples=order, offsets=np.append(np.arange(0, len(order), count), len(order)))


def _gather(order: np.ndarray, bins: np.ndarray) -> Packs:
    """Packs of the samples of `order` by their bin; bins are numbered without gaps."""
    return Packs(
        samples=order[np.argsort(bins, kind="stable")],
        offsets=np.concatenate([[0], np.cumsum(np.bincount(bins))]),
    )


def _first_fit(sizes: list[int], capacity: int) -> list[int]:
    """Index, for each size in turn, of the first bin that has room for it.

    A tree over all bins holds the largest room below each node, so that a bin is found in
    logarithmic time. Bins not yet used have full room, so they need no case of their own.
    """
    leaves = 1 << (len(sizes) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins = []
    for size in sizes:
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < size
        bins.append(node - leaves)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _fill_in_turn(lengths: Lengths, window: np.ndarray, caps: Caps) -> list[list[int]]:
    """Packs of a window, as ranks in it; `window` is sorted by rising tokens.

    The ranks that are left are kept by tile count, since samples have few different counts: the
    best of each count is found by bisection.
    """
    tiles, tokens = lengths.column("tiles")[window].tolist(), lengths.tokens[window].tolist()
    left: dict[int, list[int]] = {}
    for rank, count in enumerate(tiles):
        left.setdefault(count, []).append(rank)
    packs = []
    while left:
        pack, tiles_left, tokens_left = [], caps["tiles"], caps["tokens"]
        while (rank := _longest_fit(left, tiles_left, bisect_right(tokens, tokens_left))) >= 0:
            pack.append(rank)
            tiles_left -= tiles[rank]
            tokens_left -= tokens[rank]
            ranks = left[tiles[rank]]
            del ranks[bisect_left(ranks, rank)]
            if not ranks:
                del left[tiles[rank]]
        packs.append(pack)
    return packs


def _longest_fit(left: dict[int, list[int]], tiles_left: int, end: int) -> int:
    """Largest rank below `end` with no more than `tiles_left` tiles, -1 if there is none."""
    best = -1
    for count, ranks in left.items():
        if count <= tiles_left and (below := bisect_left(ranks, end)):
            best = max(best, ranks[below - 1])
    return best


RIVALS = (
    Rival(
        name="fixed-count",
        rule=fixed_count,
        keeps_order=False,
        keeps_tile_cap=False,
        keeps_token_cap=False,
        source="random sampler with a fixed batch size, as in any trainer",
    ),
    Rival(
        name="sequential",
        rule=sequential,
        keeps_order=False,
        keeps_tile_cap=True,
        keeps_token_cap=True,
        source="Megatron-core, DpBalancedScheduler in megatron/core/datasets/data_schedule.py",
    ),
    Rival(
        name="first-fit-decreasing",
        rule=first_fit_decreasing,
        keeps_order=False,
        keeps_tile_cap=False,
        keeps_token_cap=True,
        source="Megatron-Bridge, src/megatron/bridge/data/packing/algorithms.py",
    ),
    Rival(
        name="knapsack",
        rule=knapsack,
        keeps_order=False,
        keeps_tile_cap=True,
        keeps_token_cap=True,
        source="LoongForge, balanced_greedy_knapsack in loongforge/data/multimodal/base/packer.py",
    ),
    Rival(
        name="online-buffers",
        rule=online_buffers,
        keeps_order=False,
        keeps_tile_cap=True,
        keeps_token_cap=True,
        source="InternVL, PackedDataset in internvl_chat/internvl/train/dataset_packed.py",
    ),
    Rival(
        name="length-grouped",
        rule=length_grouped,
        keeps_order=True,
        keeps_tile_cap=False,
        keeps_token_cap=False,
        source="transformers, get_length_grouped_indices in trainer_pt_utils.py",
    ),
    Rival(
        name="vision-sorted",
        rule=vision_sorted,
        keeps_order=True,
        keeps_tile_cap=False,
        keeps_token_cap=True,
        source="NeMo Automodel, greedy_knapsack_vt_balanced in "
        "nemo_automodel/components/datasets/vlm/neat_packing_vlm.py",
    ),
)
"""Every rule with its defaults; OmniBal's own is `omnibal.packing.packing.pack_isf`."""
