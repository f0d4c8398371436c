"""Steps: complete, gapless, balanced, and drawn anew every epoch."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.data.lengths import Lengths
from omnibal.data.metrics import rank_sums
from omnibal.data.packing import PackingMethod
from omnibal.data.packs import Packs, ScheduledPacks
from omnibal.data.steps import DataRequest, draw_packs, schedule_packs, size_load
from omnibal.plan import Caps


def single_sample_packs(tokens: np.ndarray) -> tuple[Packs, Lengths]:
    count = len(tokens)
    lengths = Lengths(
        tiles=np.arange(count, dtype=np.int32) % 4,
        tokens=tokens.astype(np.int32),
        loss_tokens=np.zeros(count, np.int32),
        source=np.zeros(count, np.int32),
        source_names=("docs",),
        origin=None,
    )
    return Packs.from_lists([[i] for i in range(count)]), lengths


def schedule(packs: Packs, lengths: Lengths, dp: int, micro_batches: int, **changes):
    settings = {"epoch": 0, "first_step": 0, "seed": 0, "load": packs.sums(lengths.tokens)}
    return schedule_packs(
        packs, lengths, dp=dp, micro_batches=micro_batches, **(settings | changes)
    )


def draw(lengths: Lengths, **changes) -> ScheduledPacks:
    settings = {
        "caps": Caps(max_tiles=9, max_tokens=512),
        "method": PackingMethod.ISF,
        "seed": 0,
        "epochs": 2,
        "dp": 2,
        "micro_batches": 3,
    }
    return draw_packs(
        lengths, DataRequest(**(settings | changes)), lambda packs: size_load(packs, lengths)
    )


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 60), dp=st.integers(1, 5), micro_batches=st.integers(1, 5))
def test_places_are_complete_and_gapless(count, dp, micro_batches):
    """Prevents lost packs, doubled slots, and a last step that loads one rank with all of it."""
    packs, lengths = single_sample_packs(np.arange(1, count + 1))
    scheduled = schedule(packs, lengths, dp, micro_batches)
    assert sorted(scheduled.packs.samples.tolist()) == list(range(count))
    assert scheduled.steps == -(-count // (dp * micro_batches))
    places = list(zip(scheduled.step, scheduled.dp_rank, scheduled.slot, strict=True))
    assert places == sorted(set(places))
    for step in range(scheduled.steps):
        counts = np.bincount(scheduled.dp_rank[scheduled.step == step], minlength=dp)
        assert counts.max() - counts.min() <= (1 if step == scheduled.steps - 1 else 0)
        for rank in range(dp):
            here = (scheduled.step == step) & (scheduled.dp_rank == rank)
            assert scheduled.slot[here].tolist() == list(range(counts[rank]))


def test_columns_are_the_packs_own_sums():
    """Prevents tiles or tokens that belong to another row after sorting."""
    packs, lengths = single_sample_packs(np.arange(10, 47))
    scheduled = schedule(packs, lengths, dp=2, micro_batches=4, epoch=3, first_step=11)
    first = scheduled.packs.samples
    assert scheduled.tokens.tolist() == lengths.tokens[first].tolist()
    assert scheduled.tiles.tolist() == lengths.tiles[first].tolist()
    assert set(scheduled.epoch) == {3}
    assert scheduled.step.min() == 11


def test_balance_is_near_the_best_possible():
    """Prevents ranks that wait for each other although a better deal of the same packs exists."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        packs, lengths = single_sample_packs(rng.integers(50, 500, 6))
        scheduled = schedule(packs, lengths, dp=2, micro_batches=3)
        worst = rank_sums(scheduled, scheduled.tokens, 2).max()
        best = min(
            max(lengths.tokens[list(p[:3])].sum(), lengths.tokens[list(p[3:])].sum())
            for p in permutations(range(6))
        )
        assert worst <= best * 1.2


def test_balancing_beats_the_shuffled_order():
    """Prevents a load vector that is ignored: random ranks differ by several percent."""
    packs, lengths = single_sample_packs(np.random.default_rng(2).integers(50, 500, 8 * 8 * 40))

    def straggler_factor(load):
        sums = rank_sums(
            scheduled := schedule(packs, lengths, 8, 8, load=load), scheduled.tokens, 8
        )
        return (sums.max(axis=1) / sums.mean(axis=1)).mean()

    assert straggler_factor(lengths.tokens) < 1.02
    assert straggler_factor(np.ones(len(packs))) > 1.1


def test_light_packs_fill_and_drain_the_pipeline():
    """Prevents heavy packs at either end of a rank's order, where every other stage waits."""
    packs, lengths = single_sample_packs(np.random.default_rng(3).integers(50, 500, 14))
    rows = schedule(packs, lengths, dp=1, micro_batches=9).tokens
    for step in (rows[:9], rows[9:]):
        peak = int(step.argmax())
        assert (np.diff(step[: peak + 1]) >= 0).all()
        assert (np.diff(step[peak:]) <= 0).all()
        assert max(step[0], step[-1]) <= np.sort(step)[1]


def test_heavy_packs_do_not_cluster_in_time():
    """Prevents an order that is sorted by load, which would bias training."""
    packs, lengths = single_sample_packs(np.random.default_rng(4).integers(50, 500, 4000))
    scheduled = schedule(packs, lengths, dp=2, micro_batches=2)
    # 4 / sqrt(n): beyond chance.
    assert abs(np.corrcoef(scheduled.step, scheduled.tokens)[0, 1]) < 4 / np.sqrt(4000)


def test_epochs_are_joined_and_drawn_anew():
    """Prevents epochs that repeat one packing, and step numbers that start again."""
    _, lengths = single_sample_packs(np.random.default_rng(5).integers(50, 300, 100))
    scheduled = draw(lengths)
    assert np.unique(scheduled.step).tolist() == list(range(scheduled.steps))
    members = []
    for epoch in (0, 1):
        rows = np.flatnonzero(scheduled.epoch == epoch)
        packs = {frozenset(scheduled.packs[row].tolist()) for row in rows}
        assert sorted(sample for pack in packs for sample in pack) == list(range(100))
        members.append(packs)
    assert len(members[0] & members[1]) < 0.5 * len(members[0])
    assert scheduled.step[scheduled.epoch == 0].max() < scheduled.step[scheduled.epoch == 1].min()


def test_an_epoch_does_not_depend_on_how_many_follow():
    """Prevents a longer training run from changing the data of its first epoch."""
    _, lengths = single_sample_packs(np.random.default_rng(6).integers(50, 300, 100))
    one, two = draw(lengths, epochs=1), draw(lengths, epochs=2)
    assert one.packs.samples.tolist() == two.packs.samples[:100].tolist()


@pytest.mark.parametrize(("change", "same"), [({}, True), ({"seed": 1}, False)])
def test_hash_follows_the_seed(change, same):
    """Prevents schedules that differ between two equal runs, and a seed that is ignored."""
    _, lengths = single_sample_packs(np.random.default_rng(7).integers(50, 300, 100))
    assert (draw(lengths).sha256 == draw(lengths, **change).sha256) is same
