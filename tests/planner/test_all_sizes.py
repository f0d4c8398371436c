"""Column generation over all sizes and diving, against brute force, a plain solver and bounds."""

from itertools import product

import numpy as np
import pytest
from length_cases import make_lengths
from scipy import sparse
from scipy.optimize import linprog

from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.packing.all_sizes import SizeMix, Sizes
from omnibal.packing.best_pack import BestPack
from omnibal.packing.dive import pack_by_diving
from omnibal.packing.master import Master
from omnibal.packing.pack_bound import naive_lower_bound, packs_lower_bound
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.packing.packs import Packs
from omnibal.packing.patterns import Grid, knapsack_table
from omnibal.steps.pack_settings import PackSettings
from omnibal.steps.steps import pack_epochs

CAPS = Caps.of(tiles=30, tokens=1000)
COARSE, EXACT = 400, 1 << 17
"""Cells of a table for the caps: units of 80 tokens, and of one."""


def alone(samples: int) -> Packs:
    return Packs(samples=np.arange(samples), offsets=np.arange(samples + 1))


def all_patterns(tiles, tokens, counts) -> np.ndarray:
    """Every pack that fits the caps, [patterns, sizes]."""
    patterns = np.array(list(product(*(range(count + 1) for count in counts))))
    fits = (patterns @ tiles <= CAPS["tiles"]) & (patterns @ tokens <= CAPS["tokens"])
    return patterns[fits & (patterns.sum(axis=1) > 0)]


def some_kinds(rng):
    """A few sizes and how many samples there are of each; some are smaller than a coarse unit."""
    kinds = int(rng.integers(2, 7))
    tiles = rng.integers(0, 16, kinds)
    tokens = np.where(rng.random(kinds) < 0.3, rng.integers(1, 70, kinds),
                      rng.integers(70, 600, kinds))  # fmt: skip
    keys = np.unique(tiles << 32 | tokens)
    return keys >> 32, keys & 0xFFFFFFFF, rng.integers(1, 4, len(keys))


@pytest.mark.parametrize("cells", [COARSE, EXACT])
def test_best_packs_equal_all_packs(cells):
    """Prevents a bound below what a pack can be worth, and patterns that fit no pack."""
    rng = np.random.default_rng(cells)
    for _ in range(150):
        tiles, tokens, counts = some_kinds(rng)
        values = rng.random(len(tiles)) * (0.2 + tokens / 1000) * (rng.random(len(tiles)) < 0.9)
        best = BestPack(np.stack([tiles, tokens]), CAPS.values, cells)
        priced = best.price(values, counts)
        fitting = all_patterns(tiles, tokens, counts)
        truth = (fitting @ values).max()
        enough = truth * rng.uniform(0.7, 1.1)
        most, found = best.most(priced, enough)
        assert priced.most >= truth - 1e-9
        fillers = priced.filler_price > 0
        assert most >= truth - 1e-9
        if not fillers:
            assert most <= max(truth, enough) + 1e-9
        rows = {row.tobytes() for row in fitting.astype(np.int64)}
        assert all(row.tobytes() in rows for row in found)
        assert (found @ values > enough).all()
        patterns = best.patterns(priced, most=100)
        assert {row.tobytes() for row in patterns} <= rows
        held = (patterns > 0).any(axis=0)
        assert held[counts > 0].all()


def test_search_that_is_cut_short_still_bounds(monkeypatch):
    """Prevents a bound that takes packs not looked at for worth nothing."""
    monkeypatch.setattr("omnibal.packing.best_pack._MAX_SEARCHED", 10)
    rng = np.random.default_rng(3)
    for _ in range(60):
        tiles, tokens, counts = some_kinds(rng)
        values = rng.random(len(tiles))
        best = BestPack(np.stack([tiles, tokens]), CAPS.values, COARSE)
        truth = (all_patterns(tiles, tokens, counts) @ values).max()
        assert best.most(best.price(values, counts), 0.5 * truth)[0] >= truth - 1e-9


def test_packs_of_what_the_grid_rounds_to_nothing():
    """Prevents a bound above the truth, or none, where tiny samples alone fill packs."""
    caps = Caps.of(tiles=512, tokens=65_536)
    texts = np.array([63] * (5 * 994) + [62] * (5 * 47))
    tiles = np.zeros(len(texts), np.int64)
    best = BestPack(np.array([[0, 0], [62, 63]]), caps.values, 1 << 18)
    priced = best.price(np.array([62, 63]) / 65_536, np.array([235, 4970]))
    assert best.most(priced, 0.5)[0] == pytest.approx(1)
    tiles[0] = 512
    for found in (None, 6):
        lengths = make_lengths(list(zip(tiles.tolist(), texts.tolist(), strict=True)))
        assert packs_lower_bound(lengths, caps, found=found) == 5
    one_more = make_lengths([(0, 63)] * 5200 + [(512, 1)])
    assert packs_lower_bound(one_more, caps) == 5


def test_table_of_limited_copies_equals_all_choices():
    """Prevents a table that takes a sample more often than it is there."""
    rng = np.random.default_rng(4)
    grid = Grid.of(CAPS.values, 1 << 17)
    for _ in range(40):
        tiles, tokens, counts = some_kinds(rng)
        values = rng.random(len(tiles))
        table = knapsack_table(values, np.stack([tiles, tokens]), grid, counts)
        fitting = all_patterns(tiles, tokens, counts)
        for room in rng.integers((0, 0), (31, 1001), (5, 2)):
            fits = (fitting @ tiles <= room[0]) & (fitting @ tokens <= room[1])
            best = (fitting[fits] @ values).max(initial=0)
            assert table[tuple(room)] == pytest.approx(best)


def test_master_goes_on_as_if_solved_anew():
    """Prevents a solution that forgets columns, a changed demand or what was traded."""
    rng = np.random.default_rng(5)
    rows = 8
    exchanges = np.array([(0, 3), (3, 6), (1, 2)])
    trade = np.zeros((3, rows))
    trade[np.arange(3), exchanges[:, 0]], trade[np.arange(3), exchanges[:, 1]] = 1, -1
    demand = rng.integers(1, 9, rows)
    columns = np.eye(rows)
    master = Master(demand, exchanges)
    master.add(sparse.csr_array(columns))
    for step in range(12):
        if step % 3 == 2:
            demand = rng.integers(0, 9, rows)
            master.change_demand(demand)
        new = rng.integers(0, 3, (4, rows)).astype(float)
        columns = np.concatenate([columns, new])
        master.add(sparse.csr_array(new))
        cover = master.solve()
        plain = linprog(
            np.concatenate([np.zeros(3), np.ones(len(columns))]),
            A_ub=-np.concatenate([trade, columns]).T, b_ub=-demand,
        )  # fmt: skip
        assert cover.packs == pytest.approx(plain.fun) == pytest.approx(cover.times.sum())
        assert cover.values @ demand == pytest.approx(cover.packs)
        supplied = columns.T @ cover.times + trade.T @ cover.traded
        assert (supplied >= demand - 1e-9).all()


@pytest.mark.parametrize("cells", [COARSE, EXACT])
def test_bound_equals_the_covering_by_all_patterns(cells):
    """Prevents a bound above the truth, and one that rounding to a grid makes loose."""
    rng = np.random.default_rng(6)
    as_tight = 0
    for _ in range(60):
        tiles, tokens, counts = some_kinds(rng)
        of_sample = rng.permutation(np.repeat(np.arange(len(tiles)), counts))
        sizes = Sizes.of(np.stack([tiles, tokens])[:, of_sample])
        patterns = all_patterns(tiles, tokens, counts)
        truth = linprog(np.ones(len(patterns)), A_ub=-patterns.T, b_ub=-counts).fun
        mix = SizeMix(sizes, CAPS.values, alone(len(of_sample)), cells)
        bound = mix.bound(max_rounds=50, wanted=len(of_sample))
        assert bound <= truth + 1e-6
        as_tight += np.ceil(bound - 1e-6) == np.ceil(truth - 1e-6)
    assert as_tight >= (50 if cells == COARSE else 58)


def near_thirds(samples: int, caps: Caps, seed: int = 0):
    """Sizes around a third of a pack, where which three go together decides."""
    rng = np.random.default_rng(seed)
    tokens = caps["tokens"] * (1 / 3 + rng.normal(0, 1 / 60, samples))
    tiles = caps["tiles"] * (1 / 3 + rng.normal(0, 1 / 30, samples))
    return make_lengths(
        list(zip(tiles.astype(int).tolist(), tokens.astype(int).tolist(), strict=True))
    )


@pytest.mark.parametrize("seed", range(3))
def test_threes_of_near_thirds_are_found(seed):
    """Prevents a tenth of packs too many where a pack holds three samples of no equal sizes."""
    caps = Caps.of(tiles=512, tokens=131_072)
    lengths = near_thirds(150, caps, seed)
    packs = pack_samples(lengths, caps, PackingMethod.BALANCED, seed)
    hasty = pack_samples(lengths, caps, PackingMethod.BALANCED, seed, thorough=False)
    assert sorted(packs.samples.tolist()) == list(range(150))
    assert packs.sums(lengths.column("tiles")).max() <= 512
    assert packs.sums(lengths.tokens).max() <= 131_072
    bound = packs_lower_bound(lengths, caps, found=len(packs))
    assert bound <= len(packs) <= bound + 1 < len(hasty)


def test_diving_finds_packs_cut_apart():
    """Prevents packs lost where the optimum is known and leaves no room."""
    rng = np.random.default_rng(8)
    for held in (2, 3, 5):
        packs = 30
        cuts = np.sort(rng.integers(1, 4096, (packs, held - 1)), axis=1)
        tokens = np.diff(cuts, axis=1, prepend=0, append=4096).ravel()
        tiles = rng.integers(0, 9 // held + 1, len(tokens))
        keep = rng.permutation(np.flatnonzero(tokens > 0))
        caps = Caps.of(tiles=9, tokens=4096)
        found = pack_by_diving(np.stack([tiles, tokens])[:, keep], caps.values, alone(len(keep)), 0)
        assert sorted(found.samples.tolist()) == list(range(len(keep)))
        assert found.sums(tokens[keep]).max() <= 4096 and found.sums(tiles[keep]).max() <= 9
        assert packs <= len(found) <= packs + 1


def test_good_packs_are_kept():
    """Prevents half a minute spent, or mixtures given up, for nothing."""
    tokens = np.array([600, 400] * 20)
    packs = Packs(samples=np.arange(40), offsets=np.arange(0, 41, 2))
    assert pack_by_diving(np.stack([0 * tokens, tokens]), CAPS.values, packs, 0) is packs
    loose = alone(40)
    assert pack_by_diving(np.stack([0 * tokens, tokens]), CAPS.values, loose, 20) is loose


def test_many_epochs_are_not_searched(monkeypatch):
    """Prevents a plan of a hundred epochs from taking an hour for a few packs each."""
    monkeypatch.setattr("omnibal.steps.steps._THOROUGH_WORK", 2 * 60**2)
    caps = Caps.of(tiles=64, tokens=16_384)
    lengths = near_thirds(60, caps)

    def packs(epochs: int) -> int:
        return len(pack_epochs(lengths, PackSettings(epochs=epochs), [Level(caps=caps)])[0])

    assert naive_lower_bound(lengths, caps) <= packs(2) < packs(3)


def test_nothing_left_ends_the_dive():
    """Prevents an error where the packs that are made at once take all samples that are left."""
    for held in (2, 4):
        sizes = np.full(20 * held, CAPS["tokens"] // held)
        found = pack_by_diving(np.stack([0 * sizes, sizes]), CAPS.values, alone(len(sizes)), 0)
        assert sorted(found.samples.tolist()) == list(range(len(sizes)))
        assert len(found) == 20


def test_lengths_in_common_units_need_no_more_than_their_sums():
    """Prevents room below a multiple, which no sample can use, from loosening the bound."""
    rng = np.random.default_rng(10)
    caps = Caps.of(tiles=100, tokens=32_700)
    tokens = 256 * rng.integers(1, 60, 2000)
    lengths = make_lengths([(1, count) for count in tokens.tolist()])
    needed = -(-int(tokens.sum()) // (32_700 // 256 * 256))
    assert naive_lower_bound(lengths, caps) == packs_lower_bound(lengths, caps) == needed


def test_a_master_that_takes_too_long_gives_up(monkeypatch):
    """Prevents a bound or a dive of thousands of sizes from taking the afternoon."""
    monkeypatch.setattr("omnibal.packing.master._ITERATIONS_TIMES_ROWS", 100)
    rng = np.random.default_rng(11)
    tokens = rng.integers(200, 600, 120)
    tiles = rng.integers(0, 16, 120)
    packs = alone(120)
    assert pack_by_diving(np.stack([tiles, tokens]), CAPS.values, packs, 0) is packs
    lengths = make_lengths(list(zip(tiles.tolist(), tokens.tolist(), strict=True)))
    assert packs_lower_bound(lengths, CAPS) >= naive_lower_bound(lengths, CAPS)


def test_all_solutions_of_a_master_have_one_limit(monkeypatch):
    """Prevents a bound of many solutions, each within its limit, from taking the afternoon."""
    monkeypatch.setattr("omnibal.packing.master._ITERATIONS_TIMES_ROWS", 4000)
    rng = np.random.default_rng(12)
    master = Master(rng.integers(1, 9, 40))
    master.add(sparse.eye_array(40, format="csr"))
    solutions = 0
    while solutions < 100 and master.solve() is not None:
        solutions += 1
        master.change_demand(rng.integers(1, 9, 40))
        master.add(sparse.random_array((40, 40), density=0.2, format="csr", rng=rng))
    assert 1 < solutions < 100
