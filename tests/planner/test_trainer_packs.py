"""Packs as other trainers form them: next fit, one medium per pack, full steps."""

from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from length_cases import lengths_of, make_lengths
from packing_cases import REAL_LENGTHS, sequential_packs
from plan_cases import job_spec

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths, draw_samples, read_lengths
from omnibal.job.plan_data import SampleData, caps_of_tokens
from omnibal.model.config import load_model
from omnibal.model.levels import Level
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TARGETS, PackRules
from omnibal.packing.full_steps import split_to_fill
from omnibal.packing.next_fit import (
    cut_full_steps,
    find_merges,
    form_next_fit_packs,
    next_fit_packs,
    order_without_merges,
)
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod, number_media, pack_media_apart
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.trainers.export.reading_order import reading_order
from omnibal.trainers.lint.loongforge import LOONGFORGE_TRAINER

SAMPLES = 1_100
PACK_RULES = {target.packs: target.title for target in (*TARGETS.values(), LOONGFORGE_TRAINER)}
"""One trainer per distinct set of pack rules."""


def packed_one_by_one(tokens: list[int], packing_length: int) -> list[list[int]]:
    return [[tokens[row] for row in pack] for pack in sequential_packs(tokens, packing_length)]


@given(tokens=st.lists(st.integers(0, 12)), packing_length=st.integers(1, 15))
def test_next_fit_is_the_trainers(tokens, packing_length):
    """Prevents planned packs that differ from ms-swift's."""
    bounds = next_fit_packs(np.array(tokens, np.int32), packing_length).tolist()
    packs = [tokens[first:end] for first, end in pairwise(bounds)]
    assert packs == packed_one_by_one(tokens, packing_length)


SIZES = st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 3))


@given(packs=st.lists(SIZES, min_size=1, max_size=40))
def test_changed_places_keep_packs_apart(packs):
    """Prevents an order that moves a pack to another step or loses it."""
    first, rest, load = np.array(packs).T
    held, step = first + rest, np.arange(len(packs)) // 8
    order = order_without_merges(step, held, first, load.astype(float))
    assert sorted(order.tolist()) == list(range(len(packs)))
    assert (step[order] == step).all()
    before, after = find_merges(held, first), find_merges(held[order], first[order])
    assert after.sum() <= before.sum()
    if not before.any():
        assert (order == np.arange(len(packs))).all()


def test_a_pack_trades_places_with_the_most_alike():
    """Prevents changed rank loads if a pack of similar load could be swapped."""
    held = np.array([10, 4, 10, 10, 10, 10, 10, 10, 10, 10])
    first = np.array([9, 4, 5, 9, 9, 9, 5, 9, 9, 9])
    load = np.array([1, 5, 2, 9, 9, 2, 7, 9, 9, 9.0])
    assert np.flatnonzero(find_merges(held, first)).tolist() == [1]
    order = order_without_merges(np.zeros(10, int), held, first, load)
    assert not find_merges(held[order], first[order]).any()
    assert np.flatnonzero(order != np.arange(10)).tolist() == [2, 5]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=30),
    packs_per_step=st.integers(1, 8),
    seed=st.integers(0, 3),
)
def test_steps_are_filled_by_splitting(sizes, packs_per_step, seed):
    """Prevents lost samples, and split packs that mix samples of two packs."""
    counts = np.array(sizes)
    whole = Packs(samples=np.arange(counts.sum()), offsets=np.append(0, np.cumsum(counts)))
    tokens = np.random.default_rng(seed).integers(1, 99, counts.sum())
    found = split_to_fill(whole, packs_per_step, lambda packs: packs.sums(tokens).astype(float))
    assert sorted(found.samples.tolist()) == whole.samples.tolist()
    of = np.repeat(np.arange(len(whole)), counts)
    assert all(len(set(of[found[pack]])) == 1 for pack in range(len(found)))
    wanted = -(-len(whole) // packs_per_step) * packs_per_step
    assert len(found) == (wanted if counts.sum() >= wanted else len(whole))


@cache
def drawn_lengths(kind: str) -> Lengths:
    rng = np.random.default_rng(5)
    if kind == "real":
        files = [REAL_LENGTHS / "ai2d_train_12k_wh.json", REAL_LENGTHS / "docvqa_train_10k_wh.json"]
        if not files[0].exists():
            pytest.skip("needs the lengths of real data sets")
        return draw_samples(read_lengths(files), SAMPLES, 0)
    tiles = np.where(rng.random(SAMPLES) < 0.3, 0, rng.integers(1, 6, SAMPLES))
    tokens = {
        "lognormal": np.clip(rng.lognormal(4, 0.8, SAMPLES), 8, 900).astype(int),
        "heavy tails": np.minimum(20 * (rng.pareto(1.1, SAMPLES) + 1), 3000).astype(int),
        "all equal": np.full(SAMPLES, 70),
        "one huge": np.where(np.arange(SAMPLES) == 99, 5000, rng.integers(99, 600, SAMPLES)),
    }[kind]
    tiles *= kind != "all equal"
    tokens += 4 * tiles
    return lengths_of(tiles=tiles, tokens=tokens, loss_tokens=tokens // 2)


KINDS = ["real", "lognormal", "heavy tails", "all equal", "one huge"]


def deal_packs(
    lengths: Lengths, rules: PackRules, ranks: int, tokens: float, epochs=1, job=None
) -> tuple[ScheduledPacks, SampleData]:
    """Return packs under `tokens` times the longest sample, 4 per rank and step, packed by ISF."""
    job = job or job_spec(parallel=Parallel(pipeline=1, data=ranks))
    most = int(tokens * lengths.tokens.max())
    data = SampleData(
        settings=PackSettings(packing=PackingMethod.ISF, epochs=epochs),
        lengths=lengths,
        levels=(Level(caps=caps_of_tokens(lengths, ["tiles", "tokens"], most)),),
        packs_per_step=4 * ranks,
        rules=rules,
    )
    return data.schedule(job)[0], data


def assert_rules_hold(packs: ScheduledPacks, data: SampleData, ranks: int) -> None:
    lengths, rules, order = data.lengths, data.rules, reading_order(packs)
    of_epoch, left_out = np.repeat(packs.epoch, np.diff(packs.packs.offsets)), 0
    for epoch in range(data.settings.epochs):
        trained = packs.packs.samples[of_epoch == epoch].tolist()
        assert len(set(trained)) == len(trained) and set(trained) <= set(range(len(lengths)))
        left_out += len(lengths) - len(trained)
    job = job_spec(parallel=Parallel(pipeline=1, data=ranks))
    assert data.describe(packs, job).left_out == left_out
    for name in data.caps.names:
        assert packs.packs.sums(lengths.column(name)).max() <= data.caps[name]
    sizes = np.bincount(packs.step)
    assert set(sizes) == {sizes[0]} and sizes[0] % ranks == 0
    assert sizes[0] == data.packs_per_step or len(sizes) == data.settings.epochs
    assert (order.dp_rank == np.arange(len(packs)) % ranks).all()
    if rules.one_medium:
        medium = number_media(lengths)
        assert all(len(set(medium[order.packs[pack]])) == 1 for pack in range(len(packs)))
    tokens = lengths.tokens[order.packs.samples].tolist()
    planned = [tokens[first:end] for first, end in pairwise(order.packs.offsets.tolist())]
    if rules.next_fit:
        assert planned == packed_one_by_one(tokens, max(map(sum, planned)))
    else:
        # Samples are left out only if no pack can be split.
        assert not left_out or left_out < data.packs_per_step


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_packs_are_those_that_the_trainer_forms(kind, ranks):
    """Prevents packs, steps or ranks that differ between trainer and plan."""
    for rules in PACK_RULES:
        for tokens in (1, 3.3):
            packs, data = deal_packs(drawn_lengths(kind), rules, ranks, tokens)
            assert_rules_hold(packs, data, ranks)
            if rules == TARGETS["ms-swift"].packs and tokens > 1:
                # No samples are left out, unless all are equal.
                lost = SAMPLES - len(packs.packs.samples)
                assert lost <= (0.05 * SAMPLES if kind == "all equal" else 0)


@pytest.mark.parametrize("values", [[7], [7, 9, 14], [5, 40], [1, 2, 3, 69]])
@pytest.mark.parametrize("samples", [3, 9, 64, 601])
def test_a_lower_packing_length_fills_the_last_step(values, samples):
    """Prevents losing much of a step if samples have one or few lengths."""
    tokens, ranks = np.random.default_rng(3).choice(values, samples).astype(np.int32), 2
    for per_step, most in product((2, 6, 32), (70, 77)):
        trained = {}
        for length in range(tokens.max(), most + 1):
            sizes = [len(pack) for pack in packed_one_by_one(tokens.tolist(), length)]
            steps, size = len(sizes) // per_step, per_step
            if not steps:
                steps, size = 1, len(sizes) // ranks * ranks
            trained[length] = steps, sum(sizes[: steps * size])
        bounds = cut_full_steps(tokens, most, per_step, ranks)
        packs = len(bounds) - 1
        whole = packs // per_step * per_step or packs // ranks * ranks
        next_fits = packed_one_by_one(tokens.tolist(), np.add.reduceat(tokens, bounds[:-1]).max())
        assert [len(pack) for pack in next_fits] == np.diff(bounds).tolist()
        before = len(packed_one_by_one(tokens.tolist(), most)) // per_step
        best = max(count for steps, count in trained.values() if steps <= before + 1)
        lost = best - bounds[whole]
        assert lost <= (0 if len(values) == 1 else 0.02 * samples)


def test_epochs_are_formed_one_after_another():
    """Prevents packs across two epochs, and an epoch that begins within a step."""
    rules = TARGETS["ms-swift"].packs
    packs, data = deal_packs(drawn_lengths("lognormal"), rules, 2, 4, epochs=3)
    assert_rules_hold(packs, data, 2)
    assert len(set(np.diff(np.flatnonzero(np.diff(packs.epoch, prepend=-1))))) == 1
    with pytest.raises(UserError, match="give --epochs 1"):
        deal_packs(drawn_lengths("all equal"), rules, 2, 4, epochs=3)


def next_fits(tokens: list[list[int]], packs_per_step: int) -> ScheduledPacks:
    """Return next-fit packs of two equal epochs on one rank, from the tokens of packs."""
    half = len(tokens) // 2
    counts = [*map(len, tokens)]
    lengths = make_lengths([(0, each) for pack in tokens for each in pack])
    listed = Packs(samples=np.arange(sum(counts)), offsets=np.cumsum([0, *counts]))
    epoch, in_epoch = np.divmod(np.arange(2 * half), half)
    step, slot = np.divmod(in_epoch, packs_per_step)
    step += epoch * -(-half // packs_per_step)
    packs = ScheduledPacks.from_packs(listed, lengths, step, 0, slot, epoch)
    return form_next_fit_packs(packs, lengths, packs.tokens.astype(float), 1, packs_per_step)


def test_two_epochs_that_come_together_are_refused():
    """Prevents a pack across two epochs, trained as part of the first."""
    apart = next_fits([[6], [5, 1], [4, 2], [6]], packs_per_step=2)
    assert np.diff(apart.packs.offsets).tolist() == [1, 2, 2, 1]
    assert apart.step.tolist() == [0, 0, 1, 1] and apart.epoch.tolist() == [0, 0, 1, 1]
    with pytest.raises(UserError, match="samples of two epochs into one pack"):
        next_fits([[6], [3], [3], [6]], packs_per_step=2)
    with pytest.raises(UserError, match="an epoch has 3 packs, not a multiple of 2 per step"):
        next_fits([[6], [6], [6], [6], [6], [6]], packs_per_step=2)


def test_ranks_in_lockstep_keep_like_packs():
    """Prevents an order that undoes the dealing of packs to expert-parallel ranks."""
    model = load_model("internvl-digits-moe")
    job = job_spec(model=model, parallel=Parallel(pipeline=1, data=8, expert=4))
    uneven = {}
    for rules in (TARGETS["ms-swift"].packs, PackRules(tokens_alone=True)):
        packs, data = deal_packs(drawn_lengths("lognormal"), rules, 8, 4, job=job)
        if rules.next_fit:
            assert_rules_hold(packs, data, 8)
        load = job.load_ms(packs.packs, data.lengths)
        by_slot = np.zeros((packs.steps, int(packs.slot.max()) + 1, 2, 4))
        by_slot[packs.step, packs.slot, packs.dp_rank // 4, packs.dp_rank % 4] = load
        uneven[rules.next_fit] = by_slot.max(axis=3).sum() / by_slot.mean(axis=3).sum()
    assert uneven[True] <= 1.02 * uneven[False]


def test_caps_of_items_never_limit_packs_of_tokens():
    """Prevents an item cap that rejects a pack within the token cap."""
    lengths = drawn_lengths("lognormal")
    for tokens in (950, 3000, 10**6):
        most = caps_of_tokens(lengths, ["tiles", "tokens"], tokens)["tiles"]
        # Most tiles per token first: all samples that fit, plus part of the next.
        densest = np.argsort(-lengths.column("tiles") / lengths.tokens)
        held = np.cumsum(lengths.tokens[densest])
        tiles = np.cumsum(lengths.column("tiles")[densest])
        fit = int(np.searchsorted(held, tokens, side="right"))
        assert tiles[fit - 1] <= most <= tiles[min(fit, SAMPLES - 1)]


def test_media_are_told_apart():
    """Prevents packs that mix text with images, or images with recordings."""
    lengths = make_lengths([(0, 5), (2, 5), (0, 6), (3, 9)])
    assert number_media(lengths).tolist() == [0, 1, 0, 1]
    both = lengths_of(tiles=[0, 2, 0, 1], clips=[0, 0, 1, 1], tokens=[1] * 4)
    assert len(set(number_media(both).tolist())) == 4
    packs = pack_media_apart(lengths, lambda given: Packs.from_lists([range(len(given))]))
    assert [sorted(packs[pack].tolist()) for pack in range(len(packs))] == [[0, 2], [1, 3]]
