"""The `balanced` packing: patterns of sizes, dealt out at random, then evened out to the cap.

1. Samples are grouped into types of similar size, and column generation finds the patterns of types
   that need the fewest packs (`omnibal.data.patterns`). This costs the same for any number of
   samples.
   Of the patterns that are as good, those are used that resemble the mean of all packs: packs are
   then mixtures, alike in length, and no step is of one kind of sample.
2. Every pattern is used a whole number of times, with samples drawn at random from its types.
3. A pattern fits on average, a single pack perhaps not. Samples of equal tiles may trade places, so
   in every round each pack offers one sample of a tile count, and the largest offer goes where the
   rest is smallest. No other exchange of the offers has a smaller maximum, and after a few rounds
   packs differ by a few tokens, which also makes them easy to match into steps.
4. What is left over, about half a pack per type, is packed one pack at a time, each the most
   valuable set of samples that fits, by exact sizes and the values of the patterns' dual solution.
"""

from collections.abc import Iterator

import numpy as np
from scipy import sparse

from omnibal.data.fit import Seed, check_samples_fit
from omnibal.data.isf import cut_groups
from omnibal.data.lengths import Lengths
from omnibal.data.packs import Packs
from omnibal.data.patterns import (
    Grid,
    Items,
    Mix,
    SizeTypes,
    first_guesses,
    generate_mix,
    group_sizes,
    mixed_alike,
    most_copies,
)
from omnibal.plan import Caps

_MAX_TYPES = 176
_MIN_SAMPLES_PER_TYPE = 12
"""Mean; with fewer there is little to draw at random, and epochs would be packed alike."""
_MAX_ROUNDS = 100
"""Of column generation; it ends by itself in fewer."""
_TOLERANCE = 2e-4
_SPARE_SHARE = 4096
"""Patterns leave this part of the token cap free, so that evening out has room."""
_RANDOM_SAMPLES = 20_000
"""Drawn to see what random packs look like."""
_MIN_EVENING_ROUNDS = 5
_MAX_EVENING_ROUNDS = 15
_REST_CELLS = 1 << 14
_SIZE_VALUE = 1e-3
"""Value of a pack's full capacity besides the dual values, which may be 0 for a whole dimension."""
_VALUE_NOISE = 0.01
"""Relative; among sets that are about as good, each epoch takes another."""


def pack_balanced(lengths: Lengths, caps: Caps, seed: Seed) -> Packs:
    """Pack all samples into about as few packs as can be.

    Raises:
        UserError: a sample is larger than a cap.
    """
    check_samples_fit(lengths, caps)
    rng = np.random.default_rng(seed)
    tiles, tokens = lengths.tiles.astype(np.int64), lengths.tokens.astype(np.int64)
    types = group_sizes(tiles, tokens, min(_MAX_TYPES, len(lengths) // _MIN_SAMPLES_PER_TYPE))
    spare_tokens = caps.max_tokens // _SPARE_SHARE
    reduced = Caps(max_tiles=caps.max_tiles, max_tokens=caps.max_tokens - spare_tokens)
    mix = _mix_types(types, (tiles, tokens), reduced, rng)
    dealt, left = _deal(types, mix, rng)
    even = _even_out(dealt, tiles, tokens, caps.max_tokens, rng)
    kept, taken_out = _take_out_excess(even, tokens, caps.max_tokens)
    left = np.concatenate([left, taken_out])
    size_values = tiles[left] / caps.max_tiles + tokens[left] / caps.max_tokens
    values = _sample_values(types, mix)[left] + _SIZE_VALUE * size_values
    values *= 1 + _VALUE_NOISE * rng.random(len(left))
    rest = [left[chosen] for chosen in _fill_one_by_one(values, tiles[left], tokens[left], caps)]
    return Packs.join([kept, Packs.from_lists(rest)])


def _mix_types(
    types: SizeTypes, sizes: tuple[np.ndarray, np.ndarray], caps: Caps, rng: np.random.Generator
) -> Mix:
    """Patterns for types taken at their mean sizes.

    A pattern's mean tokens stay within the token cap, so the packs made from it do on average.
    """
    grid = Grid.of(min(caps.max_tiles, int(types.tiles @ types.counts)), caps.max_tokens)
    tiles = -(-types.tiles // grid.tile_unit)
    tokens = np.rint(types.mean_tokens / grid.token_unit).astype(np.int64)
    items = Items(
        grid=grid,
        tiles=np.minimum(tiles, grid.tiles),
        tokens=np.clip(tokens, 1, grid.tokens),
        cover=sparse.eye_array(len(types), format="csr"),
        row=np.arange(len(types)),
    )

    def trim(patterns: np.ndarray) -> np.ndarray:
        return _without_excess(patterns, types.mean_tokens, caps.max_tokens)

    mix = generate_mix(
        items,
        types.counts.astype(np.float64),
        trim(np.diag(most_copies(items))).astype(np.float64),
        first_guesses(types.tiles, types.mean_tokens, caps),
        trim,
        max_rounds=_MAX_ROUNDS,
        max_new_columns=len(types),
        tolerance=_TOLERANCE,
    )
    _, kind = np.unique(types.tiles, return_inverse=True)
    random = trim(_random_patterns(types, *sizes, caps, rng)).astype(np.float64)
    return mixed_alike(mix, types.counts.astype(np.float64), random, kind)


def _random_patterns(
    types: SizeTypes, tiles: np.ndarray, tokens: np.ndarray, caps: Caps, rng: np.random.Generator
) -> np.ndarray:
    """Types of samples that fill packs in random order, int64 [packs, types]."""
    type_of = np.empty(len(tiles), np.int64)
    type_of[types.members] = np.repeat(np.arange(len(types)), types.counts)
    drawn = rng.permutation(len(tiles))[:_RANDOM_SAMPLES]
    # A sample may exceed the reduced token cap, and is then alone.
    bounds = cut_groups(tiles[drawn], np.minimum(tokens[drawn], caps.max_tokens), caps)
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
    dealt = Packs(samples=sample[filled], offsets=_offsets(held[held > 0]))
    return dealt, np.concatenate(left)


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)])


def _even_out(
    packs: Packs, tiles: np.ndarray, tokens: np.ndarray, max_tokens: int, rng: np.random.Generator
) -> Packs:
    """Exchange samples of equal tiles between packs until hardly any pack exceeds the cap."""
    if not len(packs):
        return packs
    sample = packs.samples.copy()
    pack_of_slot = np.repeat(np.arange(len(packs)), np.diff(packs.offsets))
    pack_tokens = packs.sums(tokens)
    offers = [
        _Offers.of(np.flatnonzero(tiles[sample] == count), pack_of_slot)
        for count in np.unique(tiles[sample])
    ]
    for number in range(_MAX_EVENING_ROUNDS):
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
        if number + 1 >= _MIN_EVENING_ROUNDS and pack_tokens.max() <= max_tokens:
            break
    return Packs(samples=sample, offsets=packs.offsets)


class _Offers:
    """Slots of one tile count, from which each pack that has any offers one at random."""

    def __init__(self, slots: np.ndarray, first: np.ndarray, packs: np.ndarray):
        self.packs = packs
        self._slots = slots
        self._first = first
        self._counts = np.diff(first, append=len(slots))

    @classmethod
    def of(cls, slots: np.ndarray, pack_of_slot: np.ndarray) -> "_Offers":
        packs = pack_of_slot[slots]
        first = np.flatnonzero(np.diff(packs, prepend=-1))
        return cls(slots, first, packs[first])

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """A slot of each of `packs`."""
        return self._slots[self._first + rng.integers(self._counts)]


def _ascending(values: np.ndarray) -> np.ndarray:
    """Order from small to large; equal values keep theirs, on any processor."""
    return np.sort(values << 32 | np.arange(len(values))) & 0xFFFFFFFF


def _take_out_excess(packs: Packs, tokens: np.ndarray, max_tokens: int) -> tuple[Packs, np.ndarray]:
    """Take samples out of the packs that exceed the cap; of one pack, the smallest that helps."""
    taken_out: list[np.ndarray] = []
    while len(packs) and (excess := packs.sums(tokens) - max_tokens).max() > 0:
        sizes = np.diff(packs.offsets)
        pack_of_slot = np.repeat(np.arange(len(packs)), sizes)
        slots = np.flatnonzero(excess[pack_of_slot] > 0)
        given = tokens[packs.samples[slots]]
        # One that is too small to help comes after all others, the largest of those first.
        rank = np.where(given >= excess[pack_of_slot[slots]], given, 2**31 - given)
        order = np.lexsort((rank, pack_of_slot[slots]))
        first = np.diff(pack_of_slot[slots][order], prepend=-1) > 0
        chosen = slots[order[first]]
        taken_out.append(packs.samples[chosen])
        held = sizes - np.bincount(pack_of_slot[chosen], minlength=len(packs))
        packs = Packs(samples=np.delete(packs.samples, chosen), offsets=_offsets(held[held > 0]))
    return packs, np.concatenate([*taken_out, np.zeros(0, np.int64)])


def _sample_values(types: SizeTypes, mix: Mix) -> np.ndarray:
    """Dual value of every sample's type. [samples]"""
    values = np.empty(len(types.members))
    values[types.members] = np.repeat(mix.values, types.counts)
    return values


def _fill_one_by_one(
    values: np.ndarray, tiles: np.ndarray, tokens: np.ndarray, caps: Caps
) -> Iterator[np.ndarray]:
    """Packs [samples] of indices into the arguments, each as valuable as what is left allows."""
    grid = Grid.of(min(caps.max_tiles, int(tiles.sum())), caps.max_tokens, _REST_CELLS)
    tile_units = np.minimum(-(-tiles // grid.tile_unit), grid.tiles)
    token_units = np.minimum(-(-tokens // grid.token_unit), grid.tokens)
    # Samples of equal units and about equal value are copies of one item.
    order = np.lexsort((-values, token_units, tile_units))
    sizes = tile_units[order] << 32 | token_units[order]
    starts = np.flatnonzero(np.diff(sizes, prepend=-1))
    queues = np.split(order, starts[1:]) if len(order) else []
    while queues:
        bundles = [(index, n) for index, queue in enumerate(queues) for n in _doubling(len(queue))]
        item = np.array([index for index, _ in bundles])
        copies = np.array([n for _, n in bundles])
        head = np.array([queue[0] for queue in queues])[item]
        taken = _best_bundles(
            copies * values[head], copies * tile_units[head], copies * token_units[head], grid
        )
        counts = np.bincount(item[taken], weights=copies[taken], minlength=len(queues)).astype(int)
        yield np.concatenate([queue[:n] for queue, n in zip(queues, counts, strict=True)])
        queues = [queue[n:] for queue, n in zip(queues, counts, strict=True) if n < len(queue)]


def _doubling(count: int) -> list[int]:
    """Bundles 1, 2, 4, ... and a rest, whose subsets give every number up to `count`.

    Example:
        >>> _doubling(10)
        [1, 2, 4, 3]
    """
    bundles: list[int] = []
    while count > 0:
        bundles.append(min(1 << len(bundles), count))
        count -= bundles[-1]
    return bundles


def _best_bundles(
    values: np.ndarray, tiles: np.ndarray, tokens: np.ndarray, grid: Grid
) -> list[int]:
    """The most valuable set of bundles that fits the grid, as indices; each is taken once."""
    table = np.zeros((grid.tiles + 1, grid.tokens + 1), np.float32)
    fits = np.flatnonzero((tiles <= grid.tiles) & (tokens <= grid.tokens))
    taken = np.zeros((len(fits), *table.shape), bool)
    for row, bundle in enumerate(fits):
        v, t = tiles[bundle], tokens[bundle]
        below = table[v:, t:]
        with_it = table[: len(below), : below.shape[1]] + np.float32(values[bundle])
        np.greater(with_it, below, out=taken[row, v:, t:])
        np.maximum(below, with_it, out=below)
    chosen = []
    tiles_left, tokens_left = grid.tiles, grid.tokens
    for row in range(len(fits) - 1, -1, -1):
        if taken[row, tiles_left, tokens_left]:
            chosen.append(int(fits[row]))
            tiles_left -= tiles[fits[row]]
            tokens_left -= tokens[fits[row]]
    return chosen
