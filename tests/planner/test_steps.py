"""Steps: complete, gapless, balanced, unbiased, redrawn per epoch, and independent of ranks."""

from dataclasses import replace
from functools import partial
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from length_cases import lengths_of, make_lengths

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.targets import PackRules
from omnibal.packing.balance_metrics import rank_sums, straggler_factor
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.rows import match_packs
from omnibal.packing.steps import Steps, deal_steps, draw_steps, pack_epochs, size_load

pytestmark = pytest.mark.quick

LEVELS = (Level(caps=Caps.of(tiles=9, tokens=512)),)


def single_sample_packs(tokens: np.ndarray) -> tuple[Packs, Lengths]:
    lengths = lengths_of(tiles=np.arange(len(tokens)) % 4, tokens=tokens)
    return Packs.from_lists([[i] for i in range(len(tokens))]), lengths


def some_lengths(seed: int, count: int = 100) -> Lengths:
    return single_sample_packs(np.random.default_rng(seed).integers(50, 300, count))[1]


def schedule(tokens: np.ndarray, dp: int, micro_batches: int, seed: int = 0) -> ScheduledPacks:
    """Match and deal single-sample packs by tokens."""
    packs, lengths = single_sample_packs(tokens)
    load = packs.sums(lengths.tokens).astype(float)
    step = match_packs(packs.sums(lengths.column("tiles")), load, dp * micro_batches, dp, seed)
    steps = Steps.from_packs(packs, step, np.zeros(len(packs), np.int32))
    return deal_steps(steps, lengths, lambda packs: packs.sums(lengths.tokens) * 1.0, dp, LEVELS)


def draw(lengths: Lengths, dp: int = 2, micro_batches: int = 3, **changes) -> ScheduledPacks:
    load = partial(size_load, lengths=lengths)
    sizes = {"packs_per_step": dp * micro_batches, "packs_per_row": dp}
    steps = draw_steps(lengths, PackSettings(**({"epochs": 2} | changes)), LEVELS, load, **sizes)
    return deal_steps(steps, lengths, load, dp, LEVELS)


@given(count=st.integers(1, 60), dp=st.integers(1, 5), micro_batches=st.integers(1, 5))
def test_places_are_complete_and_gapless(count, dp, micro_batches):
    """Prevents lost packs, doubled slots, uneven steps or ranks, and sums of another row."""
    tokens = np.arange(10, count + 10)
    if count < dp:
        with pytest.raises(UserError, match=f"{count} packs for {dp} data-parallel ranks"):
            schedule(tokens, dp, micro_batches)
        return
    scheduled = schedule(tokens, dp, micro_batches)
    samples = scheduled.packs.samples
    assert sorted(samples.tolist()) == list(range(count))
    assert scheduled.tokens.tolist() == tokens[samples].tolist()
    assert scheduled.column("tiles").tolist() == (samples % 4).tolist()
    sizes = np.bincount(scheduled.step)
    full = dp * micro_batches
    assert np.count_nonzero(sizes != full) <= 1
    assert sizes.max() < 1.5 * full or count < full
    assert sizes.min() >= 0.5 * full or count < full
    places = list(zip(scheduled.step, scheduled.dp_rank, scheduled.slot, strict=True))
    assert places == sorted(set(places))
    for step in range(scheduled.steps):
        counts = np.bincount(scheduled.dp_rank[scheduled.step == step], minlength=dp)
        assert counts.max() - counts.min() <= (sizes[step] % dp > 0)
        for rank in range(dp):
            here = (scheduled.step == step) & (scheduled.dp_rank == rank)
            assert scheduled.slot[here].tolist() == list(range(counts[rank]))


def test_dealing_is_near_the_best_possible():
    """Prevents ranks that wait although a better deal of the same packs exists."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        tokens = rng.integers(50, 500, 6)
        scheduled = schedule(tokens, dp=2, micro_batches=3)
        worst = rank_sums(scheduled, scheduled.tokens, 2).max()
        best = min(max(sum(p[:3]), sum(p[3:])) for p in permutations(tokens.tolist()))
        assert worst <= best * 1.2


@pytest.mark.parametrize(("micro_batches", "most"), [(1, 1.015), (8, 1.003)])
def test_matching_removes_the_straggler(micro_batches, most):
    """Prevents an ignored load: ranks of shuffled packs differ by more than 10 %."""
    tokens = np.random.default_rng(2).integers(50, 500, 8 * 8 * 40)
    scheduled = schedule(tokens, 8, micro_batches)
    shuffled = np.random.default_rng(3).permutation(tokens).reshape(-1, 8, micro_batches).sum(2)
    assert straggler_factor(shuffled) > 1.1
    assert straggler_factor(rank_sums(scheduled, scheduled.tokens, 8)) < most


def test_ranks_of_a_step_hold_equal_tiles():
    """Prevents steps matched by time alone: their vision stages would still wait."""
    scheduled = schedule(np.random.default_rng(2).integers(50, 500, 8 * 400), 8, 1)
    tiles = rank_sums(scheduled, scheduled.column("tiles"), 8)
    # At the borders of the 4 tile counts, and in the step of the lightest packs.
    assert np.count_nonzero(np.ptp(tiles, axis=1)) <= 4


def test_light_packs_fill_and_drain_the_pipeline():
    """Prevents heavy packs at either end of a rank's order, when all other stages wait."""
    scheduled = schedule(np.random.default_rng(3).integers(50, 500, 18), dp=1, micro_batches=9)
    for rows in (scheduled.tokens[:9], scheduled.tokens[9:]):
        peak = int(rows.argmax())
        assert (np.diff(rows[: peak + 1]) >= 0).all()
        assert (np.diff(rows[peak:]) <= 0).all()
        assert max(rows[0], rows[-1]) <= np.sort(rows)[1]


def test_load_does_not_follow_the_step_number():
    """Prevents an order by load, which would bias training: correlations of step number and load
    spread around 0 as in random orders, with deviation 1 / sqrt(steps - 1)."""
    tokens = np.random.default_rng(4).integers(50, 500, 4000)
    scores = []
    for seed in range(40):
        scheduled = schedule(tokens, 2, 4, seed)
        loads = rank_sums(scheduled, scheduled.tokens, 2).sum(axis=1)
        correlation = np.corrcoef(np.arange(len(loads)), loads)[0, 1]
        scores.append(correlation * np.sqrt(len(loads) - 1))
    assert abs(np.mean(scores)) < 4 / np.sqrt(40)
    assert 0.6 < np.std(scores) < 1.5


def test_packs_of_a_step_are_of_all_kinds():
    """Prevents steps with one kind of sample, which train worse: rows must be random."""
    tokens = np.random.default_rng(4).integers(50, 500, 8000)
    scheduled = schedule(tokens, 2, 16)
    rows = np.sort(scheduled.tokens.reshape(-1, 32), axis=1).reshape(-1, 16, 2).mean(axis=2)
    # Over all steps, the lightest and heaviest of 16 rows match 16 random rows.
    drawn = np.sort(np.random.default_rng(5).choice(tokens, (len(rows), 16)), axis=1)
    for place in (0, 7, 15):
        assert rows[:, place].mean() == pytest.approx(drawn[:, place].mean(), rel=0.15)


def test_neighbouring_steps_are_not_alike():
    """Prevents consecutive windows in sorted order."""
    tokens = np.random.default_rng(4).integers(50, 500, 40_000)
    scheduled = schedule(tokens, 2, 4)
    loads = rank_sums(scheduled, scheduled.tokens, 2).sum(axis=1)
    assert abs(np.corrcoef(loads[1:], loads[:-1])[0, 1]) < 4 / np.sqrt(len(loads))


def test_sources_are_spread_evenly_over_the_epoch():
    """Prevents a source that comes early or late: between tenths of an epoch, its samples vary no
    more than in random steps (their variance times 10, over 40 seeds)."""
    rng = np.random.default_rng(5)
    source = rng.choice(3, 6000, p=[0.6, 0.3, 0.1])
    # Sources differ in length, so steps differ in their mix of sources.
    tokens = rng.integers(40, 120, 6000) + 90 * source
    lengths = lengths_of(tiles=source, tokens=tokens)
    packs = pack_samples(lengths, Caps.of(tiles=9, tokens=512), PackingMethod.BALANCED, 0)
    of_pack = np.stack([packs.sums(source == code) for code in range(3)], axis=1)
    tiles, load = packs.sums(lengths.column("tiles")), size_load(packs, lengths)
    ratios = []
    for seed in range(40):
        step = match_packs(tiles, load, 12, 4, seed)
        counts = np.zeros((step.max() + 1, 3))
        np.add.at(counts, step, of_pack)
        counts = counts[: len(counts) // 10 * 10]
        parts = counts.reshape(10, -1, 3).sum(axis=1)
        ratios.append(parts.var(axis=0, ddof=1) / (len(counts) / 10 * counts.var(axis=0, ddof=1)))
    # The mean of a variance ratio with 9 degrees of freedom over 40 draws: 1 +- 4 * 0.075.
    assert (np.abs(np.mean(ratios, axis=0) - 1) < 0.3).all()


def test_epochs_are_joined_and_drawn_anew():
    """Prevents epochs that repeat one packing, and step numbers that restart."""
    lengths = some_lengths(5)
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


def test_an_epoch_follows_the_seed_alone():
    """Prevents equal runs that differ, and first epochs that depend on the number of epochs."""
    lengths = some_lengths(6)
    one, two, again, other = (
        draw(lengths, **each) for each in ({"epochs": 1}, {}, {}, {"seed": 1})
    )
    assert one.packs.samples.tolist() == two.packs.samples[:100].tolist()
    assert two.sha256 == again.sha256 != other.sha256


def test_packs_that_are_there_are_as_good_as_new():
    """Prevents different steps if a job reuses packs."""
    lengths = some_lengths(6)
    isf = PackSettings(packing=PackingMethod.ISF, seed=3, epochs=2)

    def steps(packed: list[Packs] | None = None) -> Steps:
        load = partial(size_load, lengths=lengths)
        return draw_steps(lengths, isf, LEVELS, load, packed, packs_per_step=6, packs_per_row=2)

    kept = steps(pack_epochs(lengths, isf, LEVELS))
    assert kept.sha256 == steps().sha256
    assert steps(pack_epochs(lengths, replace(isf, seed=4), LEVELS)).sha256 != kept.sha256


@pytest.mark.parametrize("full_steps", [False, True])
def test_steps_have_the_samples_asked_for(full_steps):
    """Prevents text steps with many times the samples of image steps."""
    rng, caps = np.random.default_rng(0), Caps.of(tiles=40, tokens=1_000)
    samples = [
        (40, 900) if rng.random() < 0.7 else (0, int(rng.integers(20, 90))) for _ in range(4_000)
    ]
    lengths, levels = make_lengths(samples), (Level(caps=caps),)
    load = partial(size_load, lengths=lengths)
    settings = PackSettings(packing=PackingMethod.ISF)
    packs = pack_epochs(lengths, settings, levels)
    per_pack = len(lengths) / len(packs[0])

    def samples_of_steps(asked: int | None, packs_per_step: int = 32) -> np.ndarray:
        steps = draw_steps(
            lengths,
            replace(settings, samples_per_step=asked),
            levels,
            load,
            packs,
            packs_per_step=packs_per_step,
            packs_per_row=4,
            rules=PackRules(full_steps=full_steps),
        )
        assert sorted(steps.packs.samples.tolist()) == list(range(len(lengths)))
        return np.bincount(steps.step, weights=np.diff(steps.packs.offsets))

    def share_outside(found: np.ndarray, asked: float) -> float:
        return float(np.mean(np.abs(found / asked - 1) > 0.15))

    asked = round(32 * per_pack)
    even = samples_of_steps(asked)
    assert share_outside(even, asked) <= 0.1 < share_outside(samples_of_steps(None), asked)
    if not full_steps:
        assert even.mean() == pytest.approx(asked, rel=0.02)
        more = samples_of_steps(round(1.4 * asked))
        assert more.mean() == pytest.approx(1.4 * asked, rel=0.02)


def test_full_last_steps_are_not_always_of_the_lightest():
    """Prevents the lightest packs from always forming the last step if all steps are full."""
    rng = np.random.default_rng(3)
    load, items = rng.uniform(1, 2, 24), np.zeros(24, np.int64)
    for rest_last in (True, False):
        found = [match_packs(items, load, 4, 2, seed, rest_last=rest_last) for seed in range(40)]
        assert {int(steps[load.argmin()]) for steps in found} == set(range(6))
    # Left-over packs that fill no step form the last step.
    steps = match_packs(items[:22], load[:22], 4, 2, 0, rest_last=True)
    assert np.bincount(steps).tolist() == [4] * 5 + [2]
