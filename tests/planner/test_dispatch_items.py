"""Shares of items encoded by a group's ranks, against loops over every item."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from omnibal.packing.items import ItemRuns, share_items, shares_of_ranks

pytestmark = pytest.mark.quick

Case = tuple[dict[str, np.ndarray], np.ndarray, int, int, dict[str, float]]


def random_case(rng: np.random.Generator, *, most_packs: int = 12, most_items: int = 9) -> Case:
    """Return packs of one to three encoders; some packs lack items, some pipelines packs."""
    packs, pipelines, ranks = rng.integers(0, most_packs), rng.integers(1, 4), rng.integers(1, 4)
    names = ("vision", "audio", "lidar")[: rng.integers(1, 4)]
    items = {name: rng.integers(0, most_items, packs) * (rng.random(packs) < 0.7) for name in names}
    item_ms = {name: float(rng.choice([0.3, 1.0, 1.7, 4.0])) for name in names}
    return items, rng.integers(0, pipelines, packs), int(pipelines), int(ranks), item_ms


def share_case(case: Case) -> dict[str, ItemRuns]:
    items, pipeline_of_pack, pipelines, ranks_of_pipeline, item_ms = case
    return share_items(
        items,
        pipeline_of_pack,
        pipelines=pipelines,
        ranks_of_pipeline=ranks_of_pipeline,
        item_ms=item_ms,
    )


def loads_of(found: dict[str, ItemRuns], ranks: int, item_ms: dict[str, float]) -> np.ndarray:
    loads = [item_ms[n] * np.bincount(one.rank, one.count, ranks) for n, one in found.items()]
    return np.sum([np.zeros(ranks), *loads], axis=0)


def min_busiest_ms(counts: list[int], item_ms: list[float], ranks: int) -> float:
    """Return the busiest rank's time of the best assignment, by trying all."""
    states = {(0.0,) * ranks}
    for count, ms in zip(counts, item_ms, strict=True):
        for _ in range(count):
            states = {
                tuple(sorted((*state[:rank], round(state[rank] + ms, 9), *state[rank + 1 :])))
                for state in states
                for rank in range(ranks)
            }
    return min(max(state) for state in states)


@pytest.mark.parametrize(("cases", "most"), [(100, (12, 9)), (20, (40, 30))])
def test_every_item_is_encoded_once_in_few_runs_near_home(cases: int, most: tuple) -> None:
    """Prevents a tile encoded by no rank or two, unsorted or scattered runs, and needless sends."""
    for seed in range(cases):
        case = random_case(np.random.default_rng(seed), most_packs=most[0], most_items=most[1])
        items, pipeline_of_pack, pipelines, ranks_of_pipeline, _ = case
        found = share_case(case)
        assert list(found) == list(items)
        for name, runs in found.items():
            columns = runs.pack, runs.first, runs.count, runs.rank
            assert {column.dtype for column in columns} == {np.dtype(np.int64)}
            assert (runs.count >= 1).all()
            encoded = Counter(
                (int(pack), number)
                for pack, first, count in zip(runs.pack, runs.first, runs.count, strict=True)
                for number in range(first, first + count)
            )
            held = ((pack, number) for pack, n in enumerate(items[name]) for number in range(n))
            assert encoded == Counter(held)
            keys = list(zip(runs.rank, runs.pack, runs.first, strict=True))
            assert keys == sorted(keys)
            assert all(0 <= rank < pipelines * ranks_of_pipeline for rank in runs.rank)
            # A run ends with its pack, its rank's share, or its pipeline's part.
            with_items = int((items[name] > 0).sum())
            assert len(runs) <= with_items + 2 * pipelines * ranks_of_pipeline
            # The fewest possible items cross pipelines.
            away = runs.rank // ranks_of_pipeline
            crossing = runs.count[pipeline_of_pack[runs.pack] != away].sum()
            here = np.bincount(pipeline_of_pack, items[name], pipelines)
            shares = np.bincount(away, runs.count, pipelines)
            assert crossing == np.maximum(here - shares, 0).sum()


@pytest.mark.parametrize("seed", range(40))
def test_the_busiest_rank_is_within_an_item_of_the_best(seed: int) -> None:
    """Prevents waiting for one rank although other ranks have less work."""
    rng = np.random.default_rng([1, seed])
    case = random_case(rng, most_packs=4, most_items=4)
    items, _, pipelines, ranks_of_pipeline, item_ms = case
    ranks = pipelines * ranks_of_pipeline
    busiest_ms = loads_of(share_case(case), ranks, item_ms).max()
    names = sorted(items, key=lambda name: -item_ms[name])
    counts = [int(items[name].sum()) for name in names]
    best_ms = min_busiest_ms(counts, [item_ms[name] for name in names], ranks)
    if len(items) < 3:
        assert busiest_ms <= best_ms + min(item_ms.values()) + 1e-6
    if len(items) == 1:
        assert busiest_ms == pytest.approx(best_ms)
    assert busiest_ms <= best_ms + max(item_ms.values()) + 1e-6


def test_short_items_go_where_few_long_ones_are() -> None:
    """Prevents counting items of all encoders as equal; compares with all counts per rank."""
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


def test_a_rank_more_goes_to_the_pipeline_that_needs_it() -> None:
    """Prevents an extra item on a pipeline that has none of its own left."""
    items = {"vision": np.array([4, 6])}
    found = share_case((items, np.array([0, 1]), 2, 4, {"vision": 1.0}))["vision"]
    np.testing.assert_array_equal(np.bincount(found.rank, found.count), [1, 1, 1, 1, 2, 2, 1, 1])
    assert set(zip(found.pack, found.rank // 4, strict=True)) == {(0, 0), (1, 1)}


@pytest.mark.parametrize("packs", [0, 3])
def test_nothing_to_encode(packs: int) -> None:
    """Prevents a crash in a step of text only, or a group without packs."""
    none = np.zeros(packs, np.int64)
    found = share_case((dict.fromkeys("ab", none), none, 2, 2, {"a": 1.0, "b": 2.0}))
    assert [len(runs) for runs in found.values()] == [0, 0]
    assert share_case(({}, none, 2, 2, {})) == {}


def test_one_rank_encodes_everything_in_order() -> None:
    """Prevents splitting a pack's items when there is only one rank."""
    found = share_case(({"vision": np.array([2, 0, 5])}, np.zeros(3, int), 1, 1, {"vision": 3.0}))
    runs = found["vision"]
    columns = [each.tolist() for each in (runs.pack, runs.first, runs.count, runs.rank)]
    assert columns == [[0, 2], [0, 0], [2, 5], [0, 0]]


@pytest.mark.parametrize("audio_ms", [0.0, 1e-12, 1e9])
def test_times_of_any_size_are_shared(audio_ms: float) -> None:
    """Prevents lost items, or all on one rank, if an encoder costs next to nothing."""
    items = {"vision": np.array([70]), "audio": np.array([33])}
    found = share_case((items, np.zeros(1, int), 1, 4, {"vision": 2.0, "audio": audio_ms}))
    counts = {name: np.bincount(runs.rank, runs.count, 4) for name, runs in found.items()}
    assert counts["vision"].sum() == 70 and counts["audio"].sum() == 33
    if audio_ms != 1e-12:
        assert counts["audio"].max() == 9
    assert counts["vision"].max() <= 24


@pytest.mark.parametrize("seed", range(10))
def test_many_groups_at_once_are_shared_as_one_by_one(seed: int) -> None:
    """Prevents predicting other shares than training uses."""
    rng = np.random.default_rng([4, seed])
    groups, pipelines, ranks_of_pipeline = 6, int(rng.integers(1, 4)), int(rng.integers(1, 5))
    item_ms = {"vision": 1.0, "audio": float(rng.choice([0.4, 2.3]))}
    steps, held = [], {name: np.zeros((groups, pipelines), np.int64) for name in item_ms}
    for group, count in enumerate(rng.integers(0, 9, groups)):
        of, items = rng.integers(0, pipelines, count), {}
        for name in item_ms:
            items[name] = rng.integers(0, 8, count)
            held[name][group] = np.bincount(of, items[name], pipelines)
        steps.append((items, of))
    together = shares_of_ranks(held, ranks_of_pipeline=ranks_of_pipeline, item_ms=item_ms)
    for group, (items, pipeline_of_pack) in enumerate(steps):
        alone = share_case((items, pipeline_of_pack, pipelines, ranks_of_pipeline, item_ms))
        for name, runs in alone.items():
            counts = np.bincount(runs.rank, runs.count, pipelines * ranks_of_pipeline)
            np.testing.assert_array_equal(counts, together[name][group])


def test_the_largest_job_is_shared_evenly() -> None:
    """Prevents uneven loads at 2,560 ranks and two encoders."""
    rng = np.random.default_rng(0)
    packs = 20_000
    items = {"vision": rng.integers(0, 7, packs), "audio": rng.integers(0, 5, packs)}
    assert sum(int(counts.sum()) for counts in items.values()) > 95_000
    case = (items, np.sort(rng.integers(0, 80, packs)), 80, 32, {"vision": 5.0, "audio": 8.0})
    loads = loads_of(share_case(case), 2560, case[-1])
    assert loads.max() - loads.mean() <= 5.0
