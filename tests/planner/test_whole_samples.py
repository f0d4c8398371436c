"""Full samples dealt to an encoding group's ranks, and their passes, against brute force."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from length_cases import lengths_of

from omnibal.data.native_resolution import Segments, sizes_of
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.packing.balance import load_bound
from omnibal.packing.item_shares import bounds_of_items
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.shares import shares_of
from omnibal.packing.whole_samples import (
    DealtSamples,
    SampleItems,
    deal_group,
    deal_samples,
    passes_of_samples,
    weights_of,
)

pytestmark = pytest.mark.quick


def image_weights(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return times of images with log-normal areas, as integers."""
    cells = np.clip(np.exp(rng.normal(6, 1, count)), 16, 16_384).astype(np.int64)
    return cells * 1_000 + cells**2 // 10


@pytest.mark.parametrize(("pipelines", "of_pipeline"), [(1, 2), (1, 3), (2, 1), (3, 1), (2, 2)])
def test_the_busiest_rank_is_near_the_best_of_all(pipelines: int, of_pipeline: int) -> None:
    """Prevents a rank with more than its long image, while other ranks wait."""
    ranks, above = pipelines * of_pipeline, []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(1, 9 if ranks < 4 else 7))
        weight, pipeline = image_weights(rng, count), rng.integers(0, pipelines, count)
        rank = deal_group(weight, pipeline, pipelines, of_pipeline)
        assert rank.min() >= 0 and rank.max() < ranks
        every = (np.array(each) for each in product(range(ranks), repeat=count))
        best = min(np.bincount(each, weight, ranks).max() for each in every)
        above.append(np.bincount(rank, weight, ranks).max() / best)
        assert load_bound(weight, ranks) <= best
    assert max(above) <= 1.04
    assert np.mean(above) <= 1.004


@pytest.mark.parametrize("skew", [False, True])
def test_many_samples_come_near_the_bound_and_stay_at_home(skew: bool) -> None:
    """Prevents a step 1 % too long, and samples sent away although their pipeline has capacity."""
    rng = np.random.default_rng(0)
    for pipelines, of_pipeline, each in ((1, 8, 8), (4, 4, 8), (8, 8, 6)):
        ranks = pipelines * of_pipeline
        weight = image_weights(rng, ranks * each)
        pipeline = rng.integers(0, pipelines, len(weight))
        pipeline *= ~(skew & (rng.random(len(weight)) < 0.4))
        rank = deal_group(weight, pipeline, pipelines, of_pipeline)
        bound = load_bound(weight, ranks)
        assert bound <= np.bincount(rank, weight, ranks).max() <= bound * 1.002
        held = np.bincount(pipeline, weight, pipelines)
        at_home = np.minimum(held, of_pipeline * bound).sum() / held.sum()
        is_home = rank // of_pipeline == pipeline
        assert weight[is_home].sum() / weight.sum() >= at_home - 0.12


def test_samples_of_equal_pipelines_all_stay() -> None:
    """Prevents features sent between pipelines without need."""
    weight = np.repeat([5, 4, 3, 3, 3], 4)
    pipeline = np.tile(np.arange(4), 5)
    rank = deal_group(weight, pipeline, 4, 2)
    assert (rank // 2 == pipeline).all()
    assert np.bincount(rank, weight).max() == 9


def dealt_case(
    rng: np.random.Generator, groups: int, pipelines: int, of_pipeline: int
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], DealtSamples]:
    count = int(rng.integers(0, 40))
    items = rng.integers(1, 900, count)
    pipeline = np.sort(rng.integers(0, groups * pipelines, count))
    squares = items**2 // rng.integers(1, 4, count)
    dealt = deal_samples(
        pipeline, items, squares, weights_of(0.02 * items + 1e-5 * squares, 1e-6),
        pipelines=pipelines, ranks_of_pipeline=of_pipeline,
    )  # fmt: skip
    return (pipeline, items, squares), dealt


@pytest.mark.parametrize("seed", range(20))
def test_groups_deal_their_own_samples_as_each_would_alone(seed: int) -> None:
    """Prevents a planner that deals steps differently from the trainer."""
    rng = np.random.default_rng(seed)
    groups, pipelines, of_pipeline = (int(rng.integers(1, 4)) for _ in range(3))
    (pipeline, items, squares), dealt = dealt_case(rng, groups, pipelines, of_pipeline)
    assert sorted(dealt.place) == list(range(len(items)))
    np.testing.assert_array_equal(dealt.items, items[dealt.place])
    np.testing.assert_array_equal(dealt.squares, squares[dealt.place])
    keys = list(zip(dealt.rank, dealt.place, strict=True))
    assert keys == sorted(keys)
    np.testing.assert_array_equal(dealt.pipeline, pipeline[dealt.place])
    rank = np.empty(len(items), np.int64)
    rank[dealt.place] = dealt.rank
    weight = np.maximum(np.rint((0.02 * items + 1e-5 * squares) / 1e-6), 1).astype(np.int64)
    for group in range(groups):
        own = pipeline // pipelines == group
        alone = deal_group(weight[own], pipeline[own] - group * pipelines, pipelines, of_pipeline)
        np.testing.assert_array_equal(rank[own], group * pipelines * of_pipeline + alone)


@pytest.mark.parametrize("seed", range(30))
def test_passes_are_those_of_a_walk_over_samples(seed: int) -> None:
    """Prevents missing, oversized or half-kept passes, and more kept samples than memory allows."""
    rng = np.random.default_rng(seed)
    of_pipeline = int(rng.integers(1, 4))
    _, dealt = dealt_case(rng, 2, 2, of_pipeline)
    a_pass, kept = int(rng.integers(1, 1_500)), int(rng.integers(0, 3_000))
    expected: list[tuple[int, bool, list[int]]] = []
    for rank in np.unique(dealt.rank).tolist():
        before, last = 0, (rank, True, [])
        for place in np.flatnonzero(dealt.rank == rank).tolist():
            before += int(dealt.items[place])
            is_kept, together = before <= kept, [*last[2], place]
            if not last[2] or last[1] != is_kept or dealt.items[together].sum() > a_pass:
                last = rank, is_kept, []
                expected.append(last)
            last[2].append(place)
    found = passes_of_samples(dealt, a_pass, kept)
    spans = zip(found.first.tolist(), found.stop.tolist(), strict=True)
    places = [list(range(*span)) for span in spans]
    assert list(zip(found.rank, found.is_kept, places, strict=True)) == expected
    assert found.items.tolist() == [dealt.items[own].sum() for *_, own in expected]
    assert found.squares.tolist() == [dealt.squares[own].sum() for *_, own in expected]
    kinds = [(rank, is_kept) for rank, is_kept, _ in expected]
    assert found.number.tolist() == [kinds[:each].count(kind) for each, kind in enumerate(kinds)]


def split(cells: int, rng: np.random.Generator) -> list[int]:
    """Return images with `cells` cells in total."""
    cuts = np.unique(rng.integers(0, cells + 1, 3))
    return [part for part in np.diff([0, *cuts, cells]).tolist() if part]


@pytest.mark.parametrize("context", [1, 2, 4])
def test_ranks_that_share_a_pack_have_their_images_of_it(context: int) -> None:
    """Prevents features of the wrong images on a shared pack's rank."""
    rng = np.random.default_rng(context)
    cells = rng.integers(0, 200, 60) * (rng.random(60) < 0.7)
    images = [split(int(each), rng) for each in cells]
    sizes = sizes_of([[Segments(1, n) for n in own] for own in images])
    lengths = lengths_of(image_tokens=cells, squared_image_tokens=cells**2, tokens=cells + 9)
    lengths = replace(lengths, image_sizes=sizes)
    lists = np.split(np.arange(60), [20, 21, 45])
    step, rank = np.array([0, 0, 1, 1]), np.array([0, 4, 0, 4])
    packs = ScheduledPacks.from_packs(Packs.from_lists(lists), lengths, step, rank)
    levels = [Level(caps=Caps.of(tokens=10_000), context=context)]
    shares = shares_of(packs, levels)
    found = SampleItems.from_packs(packs, lengths, levels, "image_tokens")
    assert len(found.rows) == len(shares) == 4 * context
    bounds = bounds_of_items(packs.packs, lengths, levels[0], "image_tokens")
    for pack, samples in enumerate(lists):
        for part in range(context):
            (row,) = np.flatnonzero((shares.pack == pack) & (shares.part == part))
            expected, start = [], 0
            for sample in samples.tolist():
                begins = np.cumsum([start, *images[sample]])
                low, high = np.searchsorted(begins[:-1], bounds[pack, part : part + 2])
                if own := images[sample][low:high]:
                    expected.append((sum(own), sum(image**2 for image in own)))
                start = int(begins[-1])
            held = found.rows[row]
            got = zip(found.items[held].tolist(), found.squares[held].tolist(), strict=True)
            if context > 1:
                assert list(got) == expected
            else:
                assert held.tolist() == [sample for sample in samples if cells[sample]]
            assert found.of_rows[row] == sum(items for items, _ in expected)
    picked = found.take(np.array([3, 0]))
    assert picked.rows[0].tolist() == found.rows[3].tolist()
    assert picked.with_empty(2).of_rows.tolist() == [*found.of_rows[[3, 0]], 0, 0]
