"""Rows of levels: aligned blocks, one context per slot, no gaps, balanced, in random order."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from length_cases import make_lengths

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.packing.by_level import levels_of_packs
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.shares import shares_of
from omnibal.packing.steps import deal_steps, draw_steps, pack_epochs, steps_of

pytestmark = pytest.mark.quick

LEVELS = tuple(
    Level(caps=Caps.of(tiles=1_000, tokens=tokens), context=context)
    for tokens, context in ((100, 1), (300, 2), (900, 4))
)


def long_tailed(count: int, seed: int = 0) -> Lengths:
    tokens = np.random.default_rng(seed).lognormal(3.5, 1.2, count).astype(int)
    return make_lengths([(0, size) for size in np.clip(tokens, 4, 900).tolist()])


def load_of(lengths: Lengths, levels=LEVELS):
    context = np.array([each.context for each in levels])

    def load(packs: Packs) -> np.ndarray:
        work = packs.sums(lengths.tokens) + packs.sums(lengths.tokens.astype(int) ** 2) / 500
        return work / context[levels_of_packs(packs, lengths, levels)]

    return load


SETTINGS = PackSettings(packing=PackingMethod.ISF)


def schedule(lengths: Lengths, ranks: int = 4, rows: int = 3, **changes) -> ScheduledPacks:
    load = load_of(lengths)
    sizes = {"packs_per_step": rows * ranks, "packs_per_row": ranks}
    steps = draw_steps(lengths, replace(SETTINGS, **changes), LEVELS, load, **sizes)
    return deal_steps(steps, lengths, load, ranks, LEVELS)


def check_places(packs: ScheduledPacks, levels, ranks: int) -> None:
    """Check slots, ranks and contexts of context-parallel packs, by the shares of all ranks."""
    context = np.array([each.context for each in levels])[packs.level]
    assert (packs.dp_rank % context == 0).all()
    assert (packs.dp_rank + context <= ranks).all()
    shares = shares_of(packs, levels)
    rank = shares.step * ranks + shares.dp_rank
    for number in np.unique(rank):
        own = np.sort(shares.slot[rank == number])
        assert own.tolist() == list(range(len(own)))
    row = shares.step * (shares.slot.max() + 1) + shares.slot
    for number in np.unique(row):
        assert len(set(shares.context[row == number].tolist())) == 1
        here = np.sort(shares.dp_rank[row == number])
        assert here.tolist() == list(range(len(here)))


@given(
    st.integers(20, 250),
    st.integers(0, 99),
    st.integers(1, 4),
    st.sampled_from([4, 8]),
    st.sampled_from([None, 1, 12, 40, 500]),
)
def test_places_can_run(count, seed, rows, ranks, samples):
    """Prevents steps that deadlock: gaps, mixed contexts in a slot, misaligned blocks."""
    lengths = long_tailed(count, seed)
    try:
        packs = schedule(lengths, ranks, rows, samples_per_step=samples)
    except UserError:
        (packs,) = pack_epochs(lengths, SETTINGS, LEVELS)
        assert np.array([1, 2, 4])[levels_of_packs(packs, lengths, LEVELS)].sum() < ranks
        return
    check_places(packs, LEVELS, ranks)
    assert sorted(packs.packs.samples.tolist()) == list(range(count))
    slots = np.zeros(packs.steps, int)
    np.maximum.at(slots, packs.step, packs.slot + 1)
    if samples is not None:
        assert packs.steps <= max(round(count / samples), 1)
        return
    # One step takes leftover packs, including rows with too few packs for all ranks.
    assert np.count_nonzero(slots != rows) <= 1
    assert slots.max() < max(1.5 * rows, rows + len(LEVELS)) + 1
    held = np.bincount(shares_of(packs, LEVELS).step)
    assert np.count_nonzero(held != rows * ranks) <= 1


ALONE = (1, 1, 1)
"""Contexts of levels without context parallelism."""


@pytest.mark.parametrize(
    ("ranks", "contexts"),
    [
        *product([4, 8, 16], [(1, 2, 4), (1, 1, 2), (2, 2, 2), (1, 4, 4)]),
        *product([1, 2, 3, 5, 12], [ALONE]),
    ],
)
def test_steps_do_not_depend_on_ranks_or_contexts(ranks, contexts):
    """Prevents skipping or repeating samples when a run resumes with other ranks (5 do not divide a
    step's 12 packs) or other context sizes."""
    lengths = long_tailed(600)
    planned = schedule(lengths, epochs=2)
    pairs = zip(LEVELS, contexts, strict=True)
    other = tuple(level.model_copy(update={"context": context}) for level, context in pairs)
    load = load_of(lengths, other)
    again = deal_steps(steps_of(planned), lengths, load, ranks, other)
    check_places(again, other, ranks)
    assert steps_of(again).sha256 == steps_of(planned).sha256
    assert (again.sha256 == planned.sha256) == ((ranks, contexts) == (4, (1, 2, 4)))
    cursor = planned.steps // 3
    seen = [planned.packs[row] for row in np.flatnonzero(planned.step < cursor)]
    rest = [again.packs[row] for row in np.flatnonzero(again.step >= cursor)]
    assert sorted(np.concatenate(seen + rest)) == sorted([*range(600)] * 2)


def test_the_order_of_steps_says_nothing_of_length():
    """Prevents training from short to long samples: step numbers and attention work correlate no
    more than in random orders."""
    lengths = long_tailed(2_000)
    found = []
    for seed in range(30):
        packs = schedule(lengths, seed=seed)
        work = packs.packs.sums(lengths.tokens.astype(int) ** 2)
        mean = np.bincount(packs.step, weights=work) / np.bincount(packs.step)
        found.append(np.corrcoef(np.arange(len(mean)), mean.argsort().argsort())[0, 1])
    deviation = 1 / np.sqrt(packs.steps - 1)
    assert abs(np.mean(found)) < 4 * deviation / np.sqrt(30)
    assert np.max(np.abs(found)) < 4.5 * deviation


def test_packs_of_a_row_are_alike_and_steps_mix_levels():
    """Prevents ranks that wait for a row's longest pack, and steps of a single level."""
    lengths = long_tailed(6_000)
    packs = schedule(lengths)
    load = load_of(lengths)(packs.packs)
    kinds = [len(set(packs.level[packs.step == step].tolist())) for step in range(packs.steps)]
    assert np.mean(kinds) > 1.5
    row = packs.step * (packs.slot.max() + 1) + packs.slot
    rows = [load[row == number] for number in np.unique(row)]
    assert np.mean([1 - own.mean() / own.max() for own in rows]) < 0.01
    shuffled = np.random.default_rng(0).permutation(load[packs.level == 0])
    shuffled = shuffled[: len(shuffled) // 4 * 4].reshape(-1, 4)
    assert np.mean(1 - shuffled.mean(axis=1) / shuffled.max(axis=1)) > 0.04


def test_a_curriculum_begins_with_the_shortest_level():
    """Prevents long packs first, only short packs later, and a curriculum that ends early."""
    lengths = long_tailed(3_000)
    packs = schedule(lengths, curriculum_steps=20, epochs=2)
    assert packs.level[packs.step < 20].max() == 0
    later = packs.level[(packs.step >= 20) & (packs.epoch == 0)]
    assert set(later.tolist()) == {0, 1, 2}
    second = packs.step[packs.epoch == 1]
    assert packs.level[(packs.step < second.min() + 10) & (packs.epoch == 1)].max() == 2
    check_places(packs, LEVELS, 4)
    with pytest.raises(UserError, match=r"--curriculum-steps \d+ or fewer"):
        schedule(long_tailed(300), curriculum_steps=1_000)
