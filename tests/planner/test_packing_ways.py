"""Packing heuristics behind `balanced`, each against a plain restatement or a bound."""

from itertools import combinations

import numpy as np
import pytest
from length_cases import make_lengths
from packing_cases import assert_valid

from omnibal.model.limits import Caps
from omnibal.packing.best_fit import pack_first_fit, pack_nearest
from omnibal.packing.even_packs import Leading, deal_level
from omnibal.packing.fill import fill_by_pairs, fill_one_by_one
from omnibal.packing.isf import pack_isf
from omnibal.packing.pack_bound import naive_lower_bound, packs_lower_bound
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.packing.packs import Packs
from omnibal.packing.patterns import group_similar_sizes
from tools.make_lengths import make_lengths as make_mixture

LARGE = Caps.of(tiles=128, tokens=32_768)


def pack_checked(lengths, caps, seed=0):
    packs = pack_samples(lengths, caps, PackingMethod.BALANCED, seed)
    assert_valid(packs, lengths, caps)
    return packs


def mixture(samples: int, caps: Caps, multiple: int = 1):
    drawn = make_mixture("internvl", samples, seed=3)
    tokens = np.minimum(-(-drawn.tokens // multiple) * multiple, caps["tokens"])
    tiles = np.minimum(drawn.column("tiles"), caps["tiles"])
    return make_lengths(list(zip(tiles.tolist(), tokens.tolist(), strict=True)))


@pytest.mark.parametrize(
    ("size", "max_tiles", "a_pack"),
    [((1, 2048), 2, 2), ((1, 1024), 4, 4), ((2, 1024), 9, 4), ((0, 1365), 9, 3), ((3, 10), 9, 3)],
)
def test_exact_fits_are_found(size, max_tiles, a_pack):
    """Prevents unused space if sizes fill a cap exactly."""
    for samples in (8, 1000, 4001):
        lengths = make_lengths([size] * samples)
        packs = pack_checked(lengths, Caps.of(tiles=max_tiles, tokens=4096))
        assert len(packs) == -(-samples // a_pack)


def test_rounded_lengths_fill_the_cap():
    """Prevents waste if all lengths are multiples of a divisor of the cap."""
    caps = Caps.of(tiles=9, tokens=4096)
    lengths = mixture(3000, caps, multiple=256)
    assert len(pack_checked(lengths, caps)) <= 1.002 * packs_lower_bound(lengths, caps)


@pytest.mark.parametrize("samples", [30, 400, 5000])
@pytest.mark.parametrize(("max_tiles", "max_tokens"), [(128, 32_768), (512, 131_072)])
def test_large_caps_need_what_the_sums_need(max_tiles, max_tokens, samples):
    """Prevents poor packings with a hundred samples per pack."""
    caps = Caps.of(tiles=max_tiles, tokens=max_tokens)
    lengths = mixture(samples, caps)
    packs = pack_checked(lengths, caps)
    assert len(packs) == naive_lower_bound(lengths, caps) <= len(pack_isf(lengths, caps, 0))


def test_one_giant_costs_one_pack():
    """Prevents one sample at the caps from spoiling all other packs."""
    rng = np.random.default_rng(0)
    small = [(int(v), int(t)) for v, t in rng.integers((0, 1), (2, 60), (3000, 2))]
    caps = Caps.of(tiles=40, tokens=4096)
    without = len(pack_checked(make_lengths(small), caps))
    lengths = make_lengths([(40, 4096), *small])
    assert len(pack_checked(lengths, caps)) <= without + 1 == naive_lower_bound(lengths, caps)


@pytest.mark.parametrize("samples", [60, 1000])
def test_partners_of_one_size_are_found(samples):
    """Prevents size types from separating samples that fill a pack only together."""
    rng = np.random.default_rng(samples)
    first = rng.integers((0, 1), (10, 4096), (samples // 2, 2))
    sizes = np.concatenate([first, (9, 4096) - first])
    lengths = make_lengths(rng.permutation(sizes).tolist())
    assert len(pack_checked(lengths, Caps.of(tiles=9, tokens=4096))) == samples // 2


def test_lengths_in_common_units_need_no_more_than_their_sums():
    """Prevents a bound loosened by cap space below a multiple, which no sample can use."""
    rng = np.random.default_rng(10)
    caps = Caps.of(tiles=100, tokens=32_700)
    tokens = 256 * rng.integers(1, 60, 2000)
    lengths = make_lengths([(1, count) for count in tokens.tolist()])
    needed = -(-int(tokens.sum()) // (32_700 // 256 * 256))
    assert naive_lower_bound(lengths, caps) == packs_lower_bound(lengths, caps) == needed


def test_first_fit_equals_its_rule():
    """Prevents passing over a pack with free space, and filling beyond a cap."""
    rng = np.random.default_rng(7)
    caps = Caps.of(tiles=9, tokens=500)
    for _ in range(20):
        count = int(rng.integers(1, 60))
        sizes = np.stack([rng.integers(0, 10, count), rng.integers(1, 501, count)])
        first, expected = rng.random(count), []
        for sample in sorted(range(count), key=lambda i: -first[i]):
            for pack in expected:
                if (sizes[:, [*pack, sample]].sum(axis=1) <= caps.values).all():
                    pack.append(sample)
                    break
            else:
                expected.append([sample])
        assert pack_first_fit(sizes, first, caps.values) == expected


def test_samples_of_many_tiles_meet_samples_of_many_tokens():
    """Prevents packs full of tiles next to packs full of tokens, each half empty."""
    rng = np.random.default_rng(8)
    share = rng.random(600)
    sizes = np.stack([share * 512, np.maximum((1 - share) * 131_072, 1)], axis=1).astype(int)
    lengths, caps = make_lengths(sizes.tolist()), Caps.of(tiles=512, tokens=131_072)
    packs = pack_nearest(sizes.T, caps.values)
    assert_valid(Packs.from_lists(packs), lengths, caps)
    larger = np.maximum(*(sizes / (512, 131_072)).T)
    plain = pack_first_fit(sizes.T, larger, caps.values)
    assert len(pack_checked(lengths, caps)) <= min(len(packs), len(plain)) + 1


def test_thousands_of_small_samples_in_a_pack_are_packed():
    """Prevents lost samples or endless patterns with thousands of samples in a pack."""
    rng = np.random.default_rng(9)
    tiles = np.where(rng.random(500) < 0.05, 9, 0)
    tokens = np.where(rng.random(500) < 0.05, 65_536, rng.integers(1, 30, 500))
    lengths = make_lengths(np.stack([tiles, tokens], axis=1).tolist())
    pack_checked(lengths, Caps.of(tiles=9, tokens=65_536))


@pytest.mark.parametrize("most", [1, 7, 40, 500])
def test_types_are_split_where_tokens_spread_most(most):
    """Prevents size types too coarse for long samples, against a plain split."""
    rng = np.random.default_rng(most)
    sizes = np.stack([rng.integers(0, 5, 300), rng.lognormal(8, 1, 300).astype(np.int64)])

    def spread(group: list[int]) -> float:
        return len(group) * sizes[1, group].std() ** 1.5

    groups = [np.flatnonzero(sizes[0] == tiles).tolist() for tiles in range(5)]
    while len(groups) < most and spread(widest := max(groups, key=spread)) > 0:
        groups.remove(widest)
        mean = sizes[1, widest].mean()
        groups.append([sample for sample in widest if sizes[1, sample] <= mean])
        groups.append([sample for sample in widest if sizes[1, sample] > mean])
    types = group_similar_sizes(sizes, most)
    members = np.split(types.members, types.bounds[1:-1])
    assert {frozenset(group.tolist()) for group in members} == set(map(frozenset, groups))
    assert types.counts.tolist() == [len(group) for group in members]
    np.testing.assert_allclose(types.mean_tokens, [sizes[1, group].mean() for group in members])
    assert types.items[0].tolist() == [sizes[0, group[0]] for group in members]


def test_packs_filled_one_by_one_are_the_best_of_what_is_left():
    """Prevents using a sample twice, and missing a more valuable set."""
    rng = np.random.default_rng(6)
    for _ in range(40):
        kinds = rng.integers(1, 9, (2, 3))
        sizes = kinds[:, rng.integers(0, 3, 9)]
        values = sizes.sum(axis=0) + 0.5
        left = set(range(9))
        for pack in fill_one_by_one(sizes, values, None, np.array([12, 15])):
            sets = [s for n in range(1, len(left) + 1) for s in combinations(sorted(left), n)]
            fits = [list(s) for s in sets if (sizes[:, s].sum(axis=1) <= [12, 15]).all()]
            assert values[pack].sum() == max(values[s].sum() for s in fits)
            assert (sizes[:, pack].sum(axis=1) <= [12, 15]).all() and left.issuperset(pack)
            left -= set(pack.tolist())
        assert not left


def test_pairs_are_the_best_there_are():
    """Prevents missing the best pair that completes a pack."""
    rng = np.random.default_rng(4)
    caps = Caps.of(tiles=20, tokens=1000)
    for _ in range(30):
        sizes = np.stack([rng.integers(3, 9, 25), rng.integers(200, 500, 25)])
        values, first = rng.random(25), rng.random(25)
        opened = int(first.argmax())
        others = [i for i in range(25) if i != opened]
        sets = [[i] for i in others] + [*map(list, combinations(others, 2))]
        room = caps.values - sizes[:, opened]
        fits = [s for s in sets if (sizes[:, s].sum(axis=1) <= room).all()]
        best = max(values[s].sum() for s in fits)
        pack = next(fill_by_pairs(sizes, values, first, caps.values))
        assert pack[0] == opened
        assert values[pack[1:]].sum() == pytest.approx(best)


@pytest.mark.parametrize("leading", Leading)
def test_level_packs_hold_every_sample_once(leading):
    """Prevents samples lost or doubled when packs trade them, and uneven packs."""
    lengths = mixture(2000, LARGE)
    sizes = lengths.sizes(LARGE.names)
    packs = deal_level(sizes, 60, LARGE.values, leading, np.random.default_rng(0))
    assert sorted(packs.samples.tolist()) == list(range(2000))
    tokens = packs.sums(lengths.tokens)
    assert tokens.max() - tokens.min() < 0.01 * tokens.mean()


def test_level_packs_of_image_tokens_are_level():
    """Prevents uneven packs or lost samples if few samples have equal item counts."""
    rng = np.random.default_rng(0)
    items = rng.integers(1, 3000, 4000) * (rng.random(4000) < 0.7)
    assert len(np.unique(items)) > 1000
    sizes = np.stack([items, items + rng.integers(20, 1000, 4000)])
    packs = deal_level(sizes, 100, np.array([65_536, 65_536]), Leading.ITEMS, rng)
    assert sorted(packs.samples.tolist()) == list(range(4000))
    tokens = packs.sums(sizes[1])
    assert tokens.max() - tokens.min() < 0.02 * tokens.mean()
