"""The `balanced` packing: few packs, each a mixture of all lengths if possible.

If packs hold many samples, samples are dealt to the number of packs given by the sums of sizes
(`even_packs`). Otherwise column generation over size types finds patterns (`patterns`):

- Of equally good patterns, those closest to the mean of all packs are used, so packs are alike.
- Patterns fit on average; swaps of samples with equal items (`even_out_tokens`) make every pack
  fit. Samples left over, about half a pack per type, are packed by exact size (`rest`).
- Types are too coarse for packs of two or three samples, and the grid for caps on several kinds of
  items. Best fit (`best_fit`) or exact sizes (`few_sizes`) replace the patterns if they save
  enough packs, although their packs are not mixtures.
"""

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.even_packs import Leading, deal_level, even_out_tokens
from omnibal.packing.few_sizes import pack_few_sizes
from omnibal.packing.fit import Seed, check_samples_fit, in_common_units, size_keys
from omnibal.packing.isf import cut_groups, pack_isf
from omnibal.packing.pack_bound import packs_of_sums
from omnibal.packing.packs import Packs
from omnibal.packing.patterns import (
    CapGrid,
    Items,
    Mix,
    SizeTypes,
    count_copies,
    first_guesses,
    generate_mix,
    group_similar_sizes,
    limit_item_caps,
    mix_alike,
    round_up_items,
)
from omnibal.packing.rest import Rest

_MANY_SAMPLES_PER_PACK = 12  # min to deal packs by length first
_LEVEL_EXTRA = 0.001  # max share of packs above the sums of sizes for level packs
_UNMIXED_SAVING = 0.002  # min share of packs saved by packs that are not mixtures
_MAX_TRIED = 50_000  # samples, in trials of other methods
_ISF_CLOSE = 0.005  # max share of extra packs in a trial of ISF to run it on all samples
MAX_TYPES = 176  # of sizes
# Max finer types (ten seconds) and min samples per type: half a pack per type is left over. Saves
# 1 % of packs if tiles and tokens are uncorrelated.
_FINE_TYPES, _SAMPLES_PER_FINE_TYPE = 500, 1000
_MIN_SAMPLES_PER_TYPE = 12  # min mean samples per type; with fewer, all epochs get the same packs
_MAX_MIX_ROUNDS = 100  # of column generation, which converges in fewer
_SPARE_SHARE = 4096  # inverse share of the token cap kept free for evening out
_RANDOM_SAMPLES = 20_000  # samples drawn to estimate random packs
_SEVERAL_KINDS = 3  # features with two kinds of items
_FEW_SIZES = 200  # max distinct sizes for the exact search: seconds of work
_GOOD_ENOUGH = 0.005  # share of packs above the lower bound that is good enough to skip finer types


def pack_balanced(
    lengths: Lengths, caps: Caps, seed: Seed, *, max_types: int | None = None
) -> Packs:
    """Return a near-minimal number of packs of all samples. ISF is tried if it may need fewer.

    Args:
        max_types: size types. A third of the default takes a tenth of the time, for 0.1 % more
            packs. By default, finer types are tried too if packs are far above the lower bound.
    """
    check_samples_fit(lengths, caps)
    rng = np.random.default_rng(seed)
    sizes, units = in_common_units(lengths, caps)
    bound = packs_of_sums(sizes, units)
    if len(lengths) >= _MANY_SAMPLES_PER_PACK * bound:
        for count in (bound, int(np.ceil(bound * (1 + _LEVEL_EXTRA)))):
            for leading in Leading:
                level = deal_level(sizes, count, units, leading, rng)
                if all(level.sums(row).max() <= cap for row, cap in zip(sizes, units, strict=True)):
                    return level  # no pack overflows
    packs = _pack_by_patterns(sizes, units, rng, max_types or MAX_TYPES)
    finer = min(len(lengths) // _SAMPLES_PER_FINE_TYPE, _FINE_TYPES)
    is_far = len(packs) - bound > _GOOD_ENOUGH * len(packs)
    if max_types is None and finer > MAX_TYPES and is_far:
        packs = min(packs, _pack_by_patterns(sizes, units, rng, finer), key=len)
    if len(packs) - bound > _UNMIXED_SAVING * len(packs):
        packs = _try_best_fit(packs, sizes, units, rng)
    if len(packs) > bound and _may_isf_need_fewer(lengths, caps, len(packs), rng):
        packs = min(packs, pack_isf(lengths, caps, seed), key=len)
    if (
        len(packs) > bound
        and len(units) >= _SEVERAL_KINDS
        and len(np.unique(size_keys(sizes))) <= _FEW_SIZES
    ):
        packs = pack_few_sizes(sizes, units, packs, rng)
    return packs


def _may_isf_need_fewer(lengths: Lengths, caps: Caps, packs: int, rng: np.random.Generator) -> bool:
    """Return whether ISF comes close to `packs`, judged by at most `_MAX_TRIED` samples."""
    if len(lengths) <= _MAX_TRIED:
        return True
    some = rng.permutation(len(lengths))[:_MAX_TRIED]
    tried = pack_isf(lengths.take(some), caps, 0)
    return len(tried) / len(some) < (1 + _ISF_CLOSE) * packs / len(lengths)


def _try_best_fit(
    packs: Packs, sizes: np.ndarray, caps: np.ndarray, rng: np.random.Generator
) -> Packs:
    """Return best-fit packs if they save enough, else `packs`."""
    needed = (1 - _UNMIXED_SAVING) * len(packs)
    rest, samples = Rest(sizes, caps), sizes.shape[1]
    if samples > _MAX_TRIED:
        some = rng.permutation(samples)[:_MAX_TRIED]
        if len(rest.take(some).best_fit(rng)) / len(some) >= needed / samples:
            return packs
    fitted = rest.best_fit(rng)
    return Packs.from_lists(fitted) if len(fitted) < needed else packs


def _pack_by_patterns(
    sizes: np.ndarray, caps: np.ndarray, rng: np.random.Generator, max_types: int
) -> Packs:
    """Pack by patterns of size types, and the samples left over by exact size."""
    tokens, max_tokens = sizes[-1], int(caps[-1])
    leveled = np.vstack([round_up_items(sizes[:-1]), tokens])
    types = group_similar_sizes(leveled, min(max_types, len(tokens) // _MIN_SAMPLES_PER_TYPE))
    reduced = caps.copy()
    first, last = types.members[types.bounds[:-1]], types.members[types.bounds[1:] - 1]
    if (tokens[first] < tokens[last]).any():
        # Samples of a type differ in tokens: patterns fit on average, and swaps need free capacity.
        reduced[-1] -= max_tokens // _SPARE_SHARE
    mix = _mix_types(types, leveled, reduced, rng)
    dealt, left = _deal_patterns(types, mix, rng)
    even = even_out_tokens(dealt, size_keys(leveled[:-1]), tokens, max_tokens, rng)
    kept, taken_out = _take_out_excess(even, tokens, max_tokens)
    left = np.concatenate([left, taken_out])
    values = np.empty(len(types.members))  # dual value of every sample's type, [samples]
    values[types.members] = np.repeat(mix.values, types.counts)
    rest = Rest(sizes.take(left, axis=1), caps).pack(values[left], rng)
    return Packs.join([kept, Packs.from_lists([left[pack] for pack in rest])])


def _mix_types(
    types: SizeTypes, sizes: np.ndarray, caps: np.ndarray, rng: np.random.Generator
) -> Mix:
    """Return patterns of types at their mean sizes, mixed alike, within the caps on average."""
    grid = CapGrid.from_caps(limit_item_caps(caps, sizes.sum(axis=1)))
    items = Items.with_own_rows(grid, types.items, types.mean_tokens)

    def trim(patterns: np.ndarray) -> np.ndarray:
        """Remove the smallest samples from patterns [patterns, types] above the token cap."""
        patterns, tokens = patterns.copy(), types.mean_tokens
        for type_ in np.argsort(tokens, kind="stable"):
            excess = patterns @ tokens - int(caps[-1])
            if (excess <= 0).all():
                break
            spared = patterns.sum(axis=1) == patterns[:, type_]  # keep a pattern's last sample
            wanted = np.ceil(excess / tokens[type_]).astype(np.int64)
            patterns[:, type_] -= np.clip(wanted, 0, patterns[:, type_] - spared)
        return patterns

    mix = generate_mix(
        items,
        types.counts.astype(np.float64),
        trim(np.diag(count_copies(items.sizes, grid))).astype(np.float64),
        first_guesses(np.vstack([types.items, types.mean_tokens]), caps),
        trim,
        max_rounds=_MAX_MIX_ROUNDS,
        max_new_columns=len(types),
    )
    _, kind = np.unique(size_keys(types.items), return_inverse=True)
    # Columns of packs in random order. A sample above the reduced token cap is packed alone.
    type_of = np.empty(len(types.members), np.int64)
    type_of[types.members] = np.repeat(np.arange(len(types)), types.counts)
    drawn = rng.permutation(len(type_of))[:_RANDOM_SAMPLES]
    bounds = cut_groups(np.minimum(sizes.take(drawn, axis=1), caps[:, None]), caps)
    pack = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    cells = np.bincount(pack * len(types) + type_of[drawn], minlength=(pack[-1] + 1) * len(types))
    random = trim(cells.reshape(-1, len(types))).astype(np.float64)
    return mix_alike(mix, types.counts.astype(np.float64), random, kind)


def _deal_patterns(
    types: SizeTypes, mix: Mix, rng: np.random.Generator
) -> tuple[Packs, np.ndarray]:
    """Return packs of each pattern floor(times) times, of random samples, and the samples left."""
    times = np.floor(mix.times + 1e-9).astype(np.int64)  # 1e-9: the solver's whole numbers
    patterns = mix.columns.astype(np.int64)
    samples_of_pattern = [np.repeat(np.arange(len(types)), pattern) for pattern in patterns]
    slots = [np.tile(types_, n) for types_, n in zip(samples_of_pattern, times, strict=True)]
    slot_type = np.concatenate(slots).astype(np.int16)  # [slots of all packs]
    sizes = np.repeat(patterns.sum(axis=1), times)
    wanted = np.bincount(slot_type, minlength=len(types))
    by_type = np.argsort(slot_type, kind="stable")
    first = np.concatenate([[0], np.cumsum(wanted)])
    sample = np.full(len(slot_type), -1)  # of every slot
    left = []
    for type_ in range(len(types)):
        members = rng.permutation(types.members[types.bounds[type_] : types.bounds[type_ + 1]])
        used = min(wanted[type_], len(members))
        sample[by_type[first[type_] : first[type_] + used]] = members[:used]
        left.append(members[used:])
    # Patterns may cover more samples than there are.
    filled = sample >= 0
    counts = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[filled], minlength=len(sizes))
    return Packs.from_counts(sample[filled], counts[counts > 0]), np.concatenate(left)


def _take_out_excess(packs: Packs, tokens: np.ndarray, max_tokens: int) -> tuple[Packs, np.ndarray]:
    """Return packs without samples that exceed the token cap, and the removed samples."""
    taken_out: list[np.ndarray] = []
    while len(packs) and (excess := packs.sums(tokens) - max_tokens).max() > 0:
        sizes = np.diff(packs.offsets)
        pack_of_slot = packs.pack_of_sample
        slots = np.flatnonzero(excess[pack_of_slot] > 0)
        removed = tokens[packs.samples[slots]]
        # The smallest sample that suffices, else the largest.
        rank = np.where(removed >= excess[pack_of_slot[slots]], removed, 2**31 - removed)
        order = np.lexsort((rank, pack_of_slot[slots]))
        first = np.diff(pack_of_slot[slots][order], prepend=-1) > 0
        chosen = slots[order[first]]
        taken_out.append(packs.samples[chosen])
        counts = sizes - np.bincount(pack_of_slot[chosen], minlength=len(packs))
        packs = Packs.from_counts(np.delete(packs.samples, chosen), counts[counts > 0])
    return packs, np.concatenate([*taken_out, np.zeros(0, np.int64)])
