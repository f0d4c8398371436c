"""Shares of items that an encoding group's ranks encode, beside walks over every item."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from omnibal.dispatch.items import ItemRuns, share_items, shares_of_ranks

pytestmark = pytest.mark.quick

Case = tuple[dict[str, np.ndarray], np.ndarray, int, int, dict[str, float]]


def random_case(rng: np.random.Generator, *, most_packs: int = 12, most_items: int = 9) -> Case:
    """Packs of one, two or three encoders, some without items, some pipelines without packs."""
    packs, pipelines, ranks = rng.integers(0, most_packs), rng.integers(1, 4), rng.integers(1, 4)
    names = ("vision", "audio", "lidar")[: rng.integers(1, 4)]
    items = {name: rng.integers(0, most_items, packs) * (rng.random(packs) < 0.7) for name in names}
    item_ms = {name: float(rng.choice([0.3, 1.0, 1.7, 4.0])) for name in names}
    return items, rng.integers(0, pipelines, packs), int(pipelines), int(ranks), item_ms


def shared(case: Case) -> dict[str, ItemRuns]:
    items, pipeline_of_pack, pipelines, ranks_of_pipeline, item_ms = case
    return share_items(
        items,
        pipeline_of_pack,
        pipelines=pipelines,
        ranks_of_pipeline=ranks_of_pipeline,
        item_ms=item_ms,
    )


def loads_of(found: dict[str, ItemRuns], ranks: int, item_ms: dict[str, float]) -> np.ndarray:
    return sum(
        item_ms[name] * np.bincount(runs.rank, runs.count, ranks) for name, runs in found.items()
    ) + np.zeros(ranks)


def least_busiest_ms(counts: list[int], item_ms: list[float], ranks: int) -> float:
    """Busiest rank's time of the best assignment, by trying all of them."""
    states = {(0.0,) * ranks}
    for count, ms in zip(counts, item_ms, strict=True):
        for _ in range(count):
            states = {
                tuple(sorted((*state[:rank], round(state[rank] + ms, 9), *state[rank + 1 :])))
                for state in states
                for rank in range(ranks)
            }
    return min(max(state) for state in states)


@pytest.mark.parametrize("seed", range(60))
def test_every_item_is_encoded_once_and_runs_are_in_order(seed: int) -> None:
    """Prevents: a tile that no rank or two ranks encode, and receivers that expect another order"""
    case = random_case(np.random.default_rng(seed))
    items, _, pipelines, ranks_of_pipeline, _ = case
    found = shared(case)
    assert list(found) == list(items)
    for name, runs in found.items():
        encoded: Counter[tuple[int, int]] = Counter()
        for pack, first, count in zip(runs.pack, runs.first, runs.count, strict=True):
            assert count >= 1
            encoded.update((int(pack), int(number)) for number in range(first, first + count))
        held = {(pack, number) for pack, n in enumerate(items[name]) for number in range(n)}
        assert set(encoded) == held
        assert set(encoded.values()) <= {1}
        keys = list(zip(runs.rank, runs.pack, runs.first, strict=True))
        assert keys == sorted(keys)
        assert all(0 <= rank < pipelines * ranks_of_pipeline for rank in runs.rank)
        assert {column.dtype for column in (runs.pack, runs.first, runs.count, runs.rank)} == {
            np.dtype(np.int64)
        }


@pytest.mark.parametrize("seed", range(40))
def test_the_busiest_rank_is_within_an_item_of_the_best(seed: int) -> None:
    """Prevents: shares that wait for one rank although others have room."""
    rng = np.random.default_rng([1, seed])
    case = random_case(rng, most_packs=4, most_items=4)
    items, _, pipelines, ranks_of_pipeline, item_ms = case
    ranks = pipelines * ranks_of_pipeline
    busiest_ms = loads_of(shared(case), ranks, item_ms).max()
    names = sorted(items, key=lambda name: -item_ms[name])
    counts = [int(items[name].sum()) for name in names]
    best_ms = least_busiest_ms(counts, [item_ms[name] for name in names], ranks)
    if len(items) < 3:
        assert busiest_ms <= best_ms + min(item_ms.values()) + 1e-6
    if len(items) == 1:
        assert busiest_ms == pytest.approx(best_ms)
    assert busiest_ms <= best_ms + max(item_ms.values()) + 1e-6


def test_short_items_go_where_few_long_ones_are() -> None:
    """Prevents: items of all encoders counted alike, however long they take; against all numbers of
    items on each of the ranks."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        counts, ranks = rng.integers(0, 13, 2), int(rng.integers(2, 4))
        long_ms, short_ms = 4.0, float(rng.choice([0.3, 1.0, 1.7]))
        found = shares_of_ranks(
            {"long": counts[:1, None], "short": counts[1:, None]},
            ranks_of_pipeline=ranks,
            item_ms={"long": long_ms, "short": short_ms},
        )
        long, short = (
            np.array([each for each in product(range(n + 1), repeat=ranks) if sum(each) == n])
            for n in counts.tolist()
        )
        best_ms = (long_ms * long[:, None] + short_ms * short).max(axis=2).min()
        busiest_ms = (long_ms * found["long"] + short_ms * found["short"]).max()
        assert found["long"].sum() == counts[0] and found["short"].sum() == counts[1]
        assert best_ms - 1e-9 <= busiest_ms <= best_ms + short_ms + 1e-6


@pytest.mark.parametrize("seed", range(40))
def test_as_few_items_cross_pipelines_as_shares_allow(seed: int) -> None:
    """Prevents: features sent between nodes although the pack's own pipeline had room."""
    case = random_case(np.random.default_rng([2, seed]))
    items, pipeline_of_pack, pipelines, ranks_of_pipeline, _ = case
    for name, runs in shared(case).items():
        home = pipeline_of_pack[runs.pack]
        away = runs.rank // ranks_of_pipeline
        crossing = int(runs.count[home != away].sum())
        held = np.bincount(pipeline_of_pack, items[name], pipelines)
        shares = np.bincount(away, runs.count, pipelines)
        assert crossing == np.maximum(held - shares, 0).sum()
        if pipelines == 1:
            assert crossing == 0


def test_a_rank_more_goes_to_the_pipeline_that_needs_it() -> None:
    """Prevents: one item more on a pipeline that has none of its own left."""
    found = share_items(
        {"vision": np.array([4, 6])},
        np.array([0, 1]),
        pipelines=2,
        ranks_of_pipeline=4,
        item_ms={"vision": 1.0},
    )["vision"]
    np.testing.assert_array_equal(np.bincount(found.rank, found.count), [1, 1, 1, 1, 2, 2, 1, 1])
    assert set(zip(found.pack, found.rank // 4, strict=True)) == {(0, 0), (1, 1)}


@pytest.mark.parametrize("seed", range(20))
def test_few_packs_are_split(seed: int) -> None:
    """Prevents: an image's tiles strewn over ranks, each of which reads the whole image."""
    case = random_case(np.random.default_rng([3, seed]), most_packs=40, most_items=30)
    items, _, pipelines, ranks_of_pipeline, _ = case
    for name, runs in shared(case).items():
        with_items = int((items[name] > 0).sum())
        # A run ends with its pack, its rank's share, or what its pipeline keeps.
        assert len(runs) <= with_items + 2 * pipelines * ranks_of_pipeline


@pytest.mark.parametrize("packs", [0, 3])
def test_nothing_to_encode(packs: int) -> None:
    """Prevents: a step of text alone, or a group without packs, that ends the run."""
    none = np.zeros(packs, np.int64)
    items = {"vision": none, "audio": none}
    found = shared((items, none, 2, 2, {"vision": 1.0, "audio": 2.0}))
    assert [len(runs) for runs in found.values()] == [0, 0]
    assert shared(({}, none, 2, 2, {})) == {}


def test_one_rank_encodes_everything_in_order() -> None:
    """Prevents: runs of one pack in pieces where nothing is shared."""
    found = shared(({"vision": np.array([2, 0, 5])}, np.zeros(3, int), 1, 1, {"vision": 3.0}))
    runs = found["vision"]
    assert runs.pack.tolist() == [0, 2]
    assert runs.first.tolist() == [0, 0]
    assert runs.count.tolist() == [2, 5]
    assert runs.rank.tolist() == [0, 0]


@pytest.mark.parametrize("audio_ms", [0.0, 1e-12, 1e9])
def test_times_of_any_size_are_shared(audio_ms: float) -> None:
    """Prevents: items lost or all on one rank where an encoder costs next to nothing."""
    case = ({"vision": np.array([70]), "audio": np.array([33])}, np.zeros(1, int), 1, 4, {
        "vision": 2.0, "audio": audio_ms,
    })  # fmt: skip
    found = shared(case)
    counts = {name: np.bincount(runs.rank, runs.count, 4) for name, runs in found.items()}
    assert counts["vision"].sum() == 70 and counts["audio"].sum() == 33
    if audio_ms != 1e-12:
        assert counts["audio"].max() == 9
    assert counts["vision"].max() <= 24


@pytest.mark.parametrize("seed", range(10))
def test_many_groups_at_once_are_shared_as_one_by_one(seed: int) -> None:
    """Prevents: a prediction of other shares than those that are trained."""
    rng = np.random.default_rng([4, seed])
    groups, pipelines, ranks_of_pipeline = 6, int(rng.integers(1, 4)), int(rng.integers(1, 5))
    item_ms = {"vision": 1.0, "audio": float(rng.choice([0.4, 2.3]))}
    packs = rng.integers(0, 9, groups)
    steps = [
        (
            {name: rng.integers(0, 8, count) for name in item_ms},
            rng.integers(0, pipelines, count),
        )
        for count in packs
    ]
    held = {
        name: np.array([np.bincount(of, items[name], pipelines) for items, of in steps], np.int64)
        for name in item_ms
    }
    together = shares_of_ranks(held, ranks_of_pipeline=ranks_of_pipeline, item_ms=item_ms)
    for group, (items, pipeline_of_pack) in enumerate(steps):
        alone = shared((items, pipeline_of_pack, pipelines, ranks_of_pipeline, item_ms))
        for name, runs in alone.items():
            counts = np.bincount(runs.rank, runs.count, pipelines * ranks_of_pipeline)
            np.testing.assert_array_equal(counts, together[name][group])


def test_the_largest_job_is_shared_evenly() -> None:
    """Prevents: items of 2,560 ranks and two encoders that fill one rank before another."""
    rng = np.random.default_rng(0)
    packs = 20_000
    items = {"vision": rng.integers(0, 7, packs), "audio": rng.integers(0, 5, packs)}
    assert sum(int(counts.sum()) for counts in items.values()) > 95_000
    case = (items, np.sort(rng.integers(0, 80, packs)), 80, 32, {"vision": 5.0, "audio": 8.0})
    loads = loads_of(shared(case), 2560, case[-1])
    assert loads.max() - loads.mean() <= 5.0
