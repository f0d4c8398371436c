"""Whole samples dealt to an encoding group's ranks, and their passes, beside brute force."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from length_cases import lengths_of

from omnibal.data.native_resolution import Segments, sizes_of
from omnibal.dispatch.load_bounds import load_bound
from omnibal.dispatch.sample_items import SampleItems
from omnibal.dispatch.sample_passes import passes_of_samples
from omnibal.dispatch.whole_samples import DealtSamples, deal_group, deal_samples, weights_of
from omnibal.model.data_parallel_encoders import SampleTimes
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.steps.item_shares import bounds_of_items
from omnibal.steps.shares import shares_of

pytestmark = pytest.mark.quick


def busiest_of(weight: np.ndarray, rank: np.ndarray, ranks: int) -> float:
    return float(np.bincount(rank, weight, ranks).max())


def image_weights(rng: np.random.Generator, count: int) -> np.ndarray:
    """Times of images whose areas are log-normal, in whole units."""
    cells = np.clip(np.exp(rng.normal(6, 1, count)), 16, 16_384).astype(np.int64)
    return cells * 1_000 + cells**2 // 10


@pytest.mark.parametrize(("pipelines", "of_pipeline"), [(1, 2), (1, 3), (2, 1), (3, 1), (2, 2)])
def test_the_busiest_rank_is_near_the_best_of_all_assignments(
    pipelines: int, of_pipeline: int
) -> None:
    """Prevents: ranks that wait for one with a long image beside others, although another dealing
    has it alone."""
    ranks, above = pipelines * of_pipeline, []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(1, 9 if ranks < 4 else 7))
        weight, pipeline = image_weights(rng, count), rng.integers(0, pipelines, count)
        rank = deal_group(weight, pipeline, pipelines, of_pipeline)
        assert rank.min() >= 0 and rank.max() < ranks
        best = min(busiest_of(weight, np.array(each), ranks)
                   for each in product(range(ranks), repeat=count))  # fmt: skip
        above.append(busiest_of(weight, rank, ranks) / best)
        assert load_bound(weight, ranks) <= best
    assert max(above) <= 1.04
    assert np.mean(above) <= 1.004


@pytest.mark.parametrize("skew", [False, True])
def test_many_samples_come_near_the_bound_and_stay_at_home(skew: bool) -> None:
    """Prevents: a step that is a percent longer than it must be, and samples that are sent to other
    pipelines though their own has room."""
    rng = np.random.default_rng(0)
    for pipelines, of_pipeline, each in ((1, 8, 8), (4, 4, 8), (8, 8, 6)):
        ranks = pipelines * of_pipeline
        weight = image_weights(rng, ranks * each)
        pipeline = rng.integers(0, pipelines, len(weight))
        pipeline *= ~(skew & (rng.random(len(weight)) < 0.4))
        rank = deal_group(weight, pipeline, pipelines, of_pipeline)
        bound = load_bound(weight, ranks)
        assert bound <= busiest_of(weight, rank, ranks) <= bound * 1.002
        held = np.bincount(pipeline, weight, pipelines)
        at_home = np.minimum(held, of_pipeline * bound).sum() / held.sum()
        is_home = rank // of_pipeline == pipeline
        assert weight[is_home].sum() / weight.sum() >= at_home - 0.12


def test_samples_of_equal_pipelines_all_stay() -> None:
    """Prevents: features sent between pipelines for nothing."""
    weight = np.repeat([5, 4, 3, 3, 3], 4)
    pipeline = np.tile(np.arange(4), 5)
    rank = deal_group(weight, pipeline, 4, 2)
    assert (rank // 2 == pipeline).all()
    assert np.bincount(rank, weight).max() == 9


TIMES = SampleTimes(item_ms=0.02, square_ms=1e-5)


def dealt_case(
    rng: np.random.Generator, groups: int, pipelines: int, of_pipeline: int
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], DealtSamples]:
    count = int(rng.integers(0, 40))
    items = rng.integers(1, 900, count)
    pipeline = np.sort(rng.integers(0, groups * pipelines, count))
    squares = items**2 // rng.integers(1, 4, count)
    dealt = deal_samples(
        pipeline, items, squares, weights_of(TIMES.ms(items, squares), 1e-6),
        pipelines=pipelines, ranks_of_pipeline=of_pipeline,
    )  # fmt: skip
    return (pipeline, items, squares), dealt


@pytest.mark.parametrize("seed", range(20))
def test_groups_deal_their_own_samples_as_each_would_alone(seed: int) -> None:
    """Prevents: a planner that deals all steps at once otherwise than the trainer deals one."""
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
    """Prevents: a pass that is left out or holds more than it may, one with kept samples and
    others, and samples that are kept beyond what there is memory for on a rank."""
    rng = np.random.default_rng(seed)
    of_pipeline = int(rng.integers(1, 4))
    _, dealt = dealt_case(rng, 2, 2, of_pipeline)
    a_pass, kept = int(rng.integers(1, 1_500)), int(rng.integers(0, 3_000))
    expected = []
    for rank in dict.fromkeys(dealt.rank.tolist()):
        passes: list[list[int]] = []
        before, was_kept = 0, True
        for place in np.flatnonzero(dealt.rank == rank).tolist():
            before += int(dealt.items[place])
            is_kept = before <= kept
            held = dealt.items[passes[-1]].sum() if passes else a_pass
            if not passes or is_kept != was_kept or held + dealt.items[place] > a_pass:
                passes.append([])
                expected.append((rank, is_kept, passes[-1]))
            passes[-1].append(place)
            was_kept = is_kept
    found = passes_of_samples(dealt, a_pass, kept)
    assert len(found) == len(expected)
    numbers: dict[tuple[int, bool], int] = {}
    for each, (rank, is_kept, places) in enumerate(expected):
        assert (found.rank[each], found.is_kept[each]) == (rank, is_kept)
        assert list(range(found.first[each], found.stop[each])) == places
        assert found.items[each] == dealt.items[places].sum()
        assert found.squares[each] == dealt.squares[places].sum()
        numbers[rank, is_kept] = numbers.get((rank, is_kept), -1) + 1
        assert found.number[each] == numbers[rank, is_kept]


def split(cells: int, rng: np.random.Generator) -> list[int]:
    """Images of so many cells together."""
    cuts = np.sort(rng.choice(cells - 1, min(3, cells - 1), replace=False)) + 1 if cells > 1 else []
    parts = np.diff([0, *cuts, cells])
    return [int(part) for part in parts if part]


@pytest.mark.parametrize("context", [1, 2, 4])
def test_ranks_that_share_a_pack_have_their_images_of_it(context: int) -> None:
    """Prevents: data-parallel encoders that deal other images of a shared pack to a pipeline than
    those whose features it sends on."""
    rng = np.random.default_rng(context)
    cells = rng.integers(0, 200, 60) * (rng.random(60) < 0.7)
    images = [split(int(each), rng) for each in cells]
    sizes = sizes_of([[Segments(1, n) for n in own] for own in images])
    lengths = lengths_of(image_tokens=cells, squared_image_tokens=cells**2, tokens=cells + 9)
    lengths = replace(lengths, image_sizes=sizes)
    lists = np.split(np.arange(60), [20, 21, 45])
    packs = ScheduledPacks.of(
        Packs.from_lists([part.tolist() for part in lists]),
        lengths,
        np.array([0, 0, 1, 1]),
        np.array([0, 4, 0, 4]),
    )
    levels = [Level(caps=Caps.of(tokens=10_000), context=context)]
    shares = shares_of(packs, levels)
    found = SampleItems.of(packs, lengths, levels, "image_tokens")
    assert len(found.rows) == len(shares) == 4 * context
    bounds = bounds_of_items(packs.packs, lengths, levels[0], "image_tokens")
    for pack, samples in enumerate(lists):
        for part in range(context):
            (row,) = np.flatnonzero((shares.pack == pack) & (shares.part == part))
            expected, start = [], 0
            for sample in samples.tolist():
                own = []
                for image in images[sample]:
                    if bounds[pack, part] <= start < bounds[pack, part + 1]:
                        own.append(image)
                    start += image
                if own:
                    expected.append((sum(own), sum(image**2 for image in own)))
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
