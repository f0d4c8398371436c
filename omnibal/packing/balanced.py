"""The `balanced` packing: as few packs as possible, each a mixture of all lengths if possible.

How few packs are possible depends on the data in two ways, and so does what is done:

1. Packs of many samples: the sums of sizes decide, and samples are dealt level to that many packs
   (`omnibal.packing.even_packs`).
2. All else: the patterns of sizes that need the fewest packs, by column generation
   (`omnibal.packing.patterns`).
   - Samples are grouped into types of similar size. The cost depends on the number of types alone.
   - Of the patterns that are as good, those are used that resemble the mean of all packs: packs
     are then mixtures, alike in length, and no step is of one kind of sample.
   - Every pattern is used a whole number of times, with samples drawn at random from its types.
   - A pattern fits on average, a single pack perhaps not, until packs have traded samples of equal
     items (`level.even_out`). They then differ by a few tokens, which makes them easy to match into
     steps.
   - What is left over, about half a pack a type, is packed on exact sizes (`omnibal.packing.rest`).

Types are too coarse where packs hold two or three samples. There best fit alone
(`omnibal.packing.best_fit`) may need fewer packs. Limits of two kinds of items and more leave a
grid of few units for each: there patterns of some hundred distinct sizes are found by exact sizes
(`omnibal.packing.few_sizes`). Both are taken where they are fewer, although their packs are no
mixtures.
"""

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.even_packs import Leading, deal_level, even_out
from omnibal.packing.few_sizes import pack_few_sizes
from omnibal.packing.fit import Seed, check_samples_fit, in_common_units, size_keys
from omnibal.packing.isf import cut_groups, pack_isf
from omnibal.packing.pack_bound import packs_of_sums
from omnibal.packing.packs import Packs
from omnibal.packing.patterns import (
    Grid,
    Items,
    Mix,
    SizeTypes,
    first_guesses,
    generate_mix,
    group_sizes,
    item_levels,
    mixed_alike,
    most_copies,
    no_more_items,
)
from omnibal.packing.rest import Rest

_MANY_SAMPLES_PER_PACK = 12  # from which on packs are dealt by length first
_LEVEL_EXTRA = 0.001
"""Share of packs that level packs may take more than the sums of sizes need."""
_UNMIXED_SAVING = 0.002
"""Share of packs that packs which are no mixtures must save."""
_MAX_TRIED = 50_000
"""Most samples that other methods are tried on before they are run on all samples."""
_ISF_CLOSE = 0.005
"""Share of packs by which ISF may need more on some samples, and be tried on all of them."""
MAX_TYPES = 176  # of sizes that samples are told apart by
_FINE_TYPES, _SAMPLES_PER_FINE_TYPE = 500, 1000
"""Most finer types, which take ten seconds, and samples that each must stand for, as half a pack a
type is left over. They save 1 % of packs where tiles say nothing about tokens."""
_MIN_SAMPLES_PER_TYPE = 12
"""Least mean number of samples per type; with fewer, every epoch would get the same packs."""
_MAX_ROUNDS = 100
"""Most rounds of column generation, which converges in fewer."""
_TOLERANCE = 2e-4  # relative gap at which column generation ends
_SPARE_SHARE = 4096
"""Patterns of types leave this part of the token cap free, so that evening out has room."""
_RANDOM_SAMPLES = 20_000
"""Samples drawn to see what random packs look like."""
_SEVERAL_KINDS = 3
"""Features of samples that take two kinds of items."""
_FEW_SIZES = 200
"""Most distinct sizes whose patterns are searched by exact sizes: seconds of work."""
_GOOD_ENOUGH = 0.005
"""Share of packs above what is needed at least that is not worth finer types."""


def pack_balanced(
    lengths: Lengths, caps: Caps, seed: Seed, *, most_types: int | None = None
) -> Packs:
    """Pack all samples into about as few packs as can be, and never more than `pack_isf` does.

    The time goes by the types that sizes are grouped into: a third of the usual ones take a tenth
    of it, for 0.1 % more packs. Of many samples whose packs are far from what their sums need,
    finer types are tried too, but where `most_types` says how many there may be.
    """
    check_samples_fit(lengths, caps)
    rng = np.random.default_rng(seed)
    sizes, units = in_common_units(lengths, caps)
    least = packs_of_sums(sizes, units)
    if len(lengths) >= _MANY_SAMPLES_PER_PACK * least:
        level = _pack_level(sizes, units, least, rng)
        if level is not None:
            return level
    packs = _pack_by_patterns(sizes, units, rng, most_types or MAX_TYPES)
    finer = min(len(lengths) // _SAMPLES_PER_FINE_TYPE, _FINE_TYPES)
    is_far = len(packs) - least > _GOOD_ENOUGH * len(packs)
    if most_types is None and finer > MAX_TYPES and is_far:
        packs = min(packs, _pack_by_patterns(sizes, units, rng, finer), key=len)
    if len(packs) - least > _UNMIXED_SAVING * len(packs):
        packs = _best_fit_where_fewer(packs, sizes, units, rng)
    if len(packs) > least and _may_need_fewer(lengths, caps, len(packs), rng):
        rival = pack_isf(lengths, caps, seed)
        packs = rival if len(rival) < len(packs) else packs
    if (
        len(packs) > least
        and len(units) >= _SEVERAL_KINDS
        and len(np.unique(size_keys(sizes))) <= _FEW_SIZES
    ):
        packs = pack_few_sizes(sizes, units, packs, rng)
    return packs


def _may_need_fewer(lengths: Lengths, caps: Caps, packs: int, rng: np.random.Generator) -> bool:
    """Whether ISF comes close to a number of packs, tried on at most `_MAX_TRIED` samples."""
    if len(lengths) <= _MAX_TRIED:
        return True
    some = rng.permutation(len(lengths))[:_MAX_TRIED]
    tried = pack_isf(lengths.take(some), caps, 0)
    return len(tried) / len(some) < (1 + _ISF_CLOSE) * packs / len(lengths)


def _pack_level(
    sizes: np.ndarray, caps: np.ndarray, least: int, rng: np.random.Generator
) -> Packs | None:
    """Level packs, as many as the sums of sizes need or hardly more; None where some overflow."""
    for count in (least, int(np.ceil(least * (1 + _LEVEL_EXTRA)))):
        for leading in Leading:
            packs = deal_level(sizes, count, caps, leading, rng)
            if all(packs.sums(row).max() <= cap for row, cap in zip(sizes, caps, strict=True)):
                return packs
    return None


def _best_fit_where_fewer(
    packs: Packs, sizes: np.ndarray, caps: np.ndarray, rng: np.random.Generator
) -> Packs:
    """Packs by best fit if they are enough fewer, tried first on at most `_MAX_TRIED` samples."""
    needed = (1 - _UNMIXED_SAVING) * len(packs)
    rest, samples = Rest(sizes, caps), sizes.shape[1]
    if samples > _MAX_TRIED:
        some = rng.permutation(samples)[:_MAX_TRIED]
        if len(rest.take(some).best_fit(rng)) / len(some) >= needed / samples:
            return packs
    fitted = rest.best_fit(rng)
    return Packs.from_lists(fitted) if len(fitted) < needed else packs


def _pack_by_patterns(
    sizes: np.ndarray, caps: np.ndarray, rng: np.random.Generator, most_types: int
) -> Packs:
    """Pack samples by patterns, and what the patterns leave over by `omnibal.packing.rest`."""
    tokens, max_tokens = sizes[-1], int(caps[-1])
    leveled = np.vstack([item_levels(sizes[:-1]), tokens])
    types = group_sizes(leveled, min(most_types, len(tokens) // _MIN_SAMPLES_PER_TYPE))
    reduced = caps.copy()
    first, last = types.members[types.bounds[:-1]], types.members[types.bounds[1:] - 1]
    if (tokens[first] < tokens[last]).any():  # samples of one type differ in tokens
        reduced[-1] -= max_tokens // _SPARE_SHARE
    mix = _mix_types(types, leveled, reduced, rng)
    dealt, left = _deal(types, mix, rng)
    even = even_out(dealt, size_keys(leveled[:-1]), tokens, max_tokens, rng)
    kept, taken_out = _take_out_excess(even, tokens, max_tokens)
    left = np.concatenate([left, taken_out])
    values = np.empty(len(types.members))  # dual value of every sample's type
    values[types.members] = np.repeat(mix.values, types.counts)
    rest = Rest(sizes.take(left, axis=1), caps).pack(values[left], rng)
    return Packs.join([kept, Packs.from_lists([left[pack] for pack in rest])])


def _mix_types(
    types: SizeTypes, sizes: np.ndarray, caps: np.ndarray, rng: np.random.Generator
) -> Mix:
    """Patterns for types taken at their mean sizes.

    A pattern's mean tokens stay within the token cap, so the packs made from it do on average.
    """
    grid = Grid.of(no_more_items(caps, sizes.sum(axis=1)))
    items = Items.with_own_rows(grid, types.items, types.mean_tokens)

    def trim(patterns: np.ndarray) -> np.ndarray:
        return _without_excess(patterns, types.mean_tokens, int(caps[-1]))

    mix = generate_mix(
        items,
        types.counts.astype(np.float64),
        trim(np.diag(most_copies(items.sizes, grid))).astype(np.float64),
        first_guesses(np.vstack([types.items, types.mean_tokens]), caps),
        trim,
        max_rounds=_MAX_ROUNDS,
        max_new_columns=len(types),
        tolerance=_TOLERANCE,
    )
    _, kind = np.unique(size_keys(types.items), return_inverse=True)
    random = trim(_random_patterns(types, sizes, caps, rng)).astype(np.float64)
    return mixed_alike(mix, types.counts.astype(np.float64), random, kind)


def _random_patterns(
    types: SizeTypes, sizes: np.ndarray, caps: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Types of samples that fill packs in random order, int64 [packs, types]."""
    type_of = np.empty(len(types.members), np.int64)
    type_of[types.members] = np.repeat(np.arange(len(types)), types.counts)
    drawn = rng.permutation(len(type_of))[:_RANDOM_SAMPLES]
    # A sample may exceed the reduced token cap, and is then alone.
    bounds = cut_groups(np.minimum(sizes.take(drawn, axis=1), caps[:, None]), caps)
    pack = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    cells = np.bincount(pack * len(types) + type_of[drawn], minlength=(pack[-1] + 1) * len(types))
    return cells.reshape(-1, len(types))


def _without_excess(patterns: np.ndarray, tokens: np.ndarray, max_tokens: int) -> np.ndarray:
    """Patterns [patterns, types] without samples where rounding to the grid let in too many.

    The smallest samples go first, and one always stays.
    """
    patterns = patterns.copy()
    for type_ in np.argsort(tokens, kind="stable"):
        excess = patterns @ tokens - max_tokens
        if (excess <= 0).all():
            break
        spared = patterns.sum(axis=1) == patterns[:, type_]
        wanted = np.ceil(excess / tokens[type_]).astype(np.int64)
        patterns[:, type_] -= np.clip(wanted, 0, patterns[:, type_] - spared)
    return patterns


def _deal(types: SizeTypes, mix: Mix, rng: np.random.Generator) -> tuple[Packs, np.ndarray]:
    """Use every pattern as often as its whole part says; also gives the samples that are left."""
    times = np.floor(mix.times + 1e-9).astype(np.int64)
    patterns = mix.columns.astype(np.int64)
    samples_of_pattern = [np.repeat(np.arange(len(types)), pattern) for pattern in patterns]
    slots = [np.tile(held, n) for held, n in zip(samples_of_pattern, times, strict=True)]
    slot_type = np.concatenate(slots).astype(np.int16)
    sizes = np.repeat(patterns.sum(axis=1), times)
    wanted = np.bincount(slot_type, minlength=len(types))
    by_type = np.argsort(slot_type, kind="stable")
    first = np.concatenate([[0], np.cumsum(wanted)])
    sample = np.full(len(slot_type), -1)
    left = []
    for type_ in range(len(types)):
        members = rng.permutation(types.members[types.bounds[type_] : types.bounds[type_ + 1]])
        used = min(wanted[type_], len(members))
        sample[by_type[first[type_] : first[type_] + used]] = members[:used]
        left.append(members[used:])
    # Patterns may cover more samples than there are.
    filled = sample >= 0
    held = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[filled], minlength=len(sizes))
    return Packs.from_counts(sample[filled], held[held > 0]), np.concatenate(left)


def _take_out_excess(packs: Packs, tokens: np.ndarray, max_tokens: int) -> tuple[Packs, np.ndarray]:
    """Take samples out of the packs that exceed the cap; of one pack, the smallest that helps."""
    taken_out: list[np.ndarray] = []
    while len(packs) and (excess := packs.sums(tokens) - max_tokens).max() > 0:
        sizes = np.diff(packs.offsets)
        pack_of_slot = packs.pack_of_sample
        slots = np.flatnonzero(excess[pack_of_slot] > 0)
        given = tokens[packs.samples[slots]]
        # One that is too small to help comes after all others, the largest of those first.
        rank = np.where(given >= excess[pack_of_slot[slots]], given, 2**31 - given)
        order = np.lexsort((rank, pack_of_slot[slots]))
        first = np.diff(pack_of_slot[slots][order], prepend=-1) > 0
        chosen = slots[order[first]]
        taken_out.append(packs.samples[chosen])
        held = sizes - np.bincount(pack_of_slot[chosen], minlength=len(packs))
        packs = Packs.from_counts(np.delete(packs.samples, chosen), held[held > 0])
    return packs, np.concatenate([*taken_out, np.zeros(0, np.int64)])
