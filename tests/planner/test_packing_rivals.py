"""Rules of other systems: nothing lost, the caps they promise, and each equal to its plain text."""

from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length_cases import make_lengths

from benchmarks.packing_rivals import (
    RIVALS,
    Rival,
    first_fit_decreasing,
    fixed_count,
    knapsack,
    length_grouped,
    online_buffers,
    samples_per_micro_batch,
    sequential,
    vision_sorted,
)
from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.packs import Packs

CAPS = Caps.of(tiles=9, tokens=64)
SIZES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 64)), min_size=1, max_size=60)
SMALL_SIZES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=60)
SEEDS = st.integers(0, 9)
every_rival = pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)


def as_lists(packs: Packs) -> list[list[int]]:
    return [packs[i].tolist() for i in range(len(packs))]


def token_lists(packs: Packs, lengths: Lengths) -> list[list[int]]:
    """Tokens of each pack's samples, whichever of equally long samples they are."""
    return sorted(lengths.tokens[packs[i]].tolist() for i in range(len(packs)))


def shuffled(lengths: Lengths, seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(len(lengths)).tolist()


def fits(pack: list[int], lengths: Lengths) -> bool:
    return bool(
        lengths.column("tiles")[pack].sum() <= CAPS["tiles"]
        and lengths.tokens[pack].sum() <= CAPS["tokens"]
    )


@every_rival
@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, seed=SEEDS)
def test_every_sample_once_within_the_promised_caps(rival: Rival, sizes, seed):
    """Prevents a comparison with a rule that loses samples or wins by breaking a cap unsaid."""
    lengths = make_lengths(sizes)
    packs = rival.rule(lengths, CAPS, seed)
    assert sorted(packs.samples.tolist()) == list(range(len(lengths)))
    assert (np.diff(packs.offsets) > 0).all()
    if rival.keeps_tile_cap:
        assert packs.sums(lengths.column("tiles")).max() <= CAPS["tiles"]
    if rival.keeps_token_cap:
        assert packs.sums(lengths.tokens).max() <= CAPS["tokens"]


@every_rival
def test_caps_said_to_be_broken_are(rival: Rival):
    """Prevents a rule that is said to break a cap but does not, as it would be excused wrongly."""
    rng = np.random.default_rng(0)
    lengths = make_lengths(rng.integers((0, 1), (10, 65), (500, 2)).tolist())
    packs = rival.rule(lengths, CAPS, 0)
    assert rival.keeps_tile_cap == (packs.sums(lengths.column("tiles")).max() <= CAPS["tiles"])
    assert rival.keeps_token_cap == (packs.sums(lengths.tokens).max() <= CAPS["tokens"])


@every_rival
def test_seed_decides_the_packs(rival: Rival):
    """Prevents figures that change between runs, and a seed that is ignored."""
    lengths = make_lengths([(2, 30), (1, 20), (0, 7), (3, 11)] * 40)
    first, again, other = (rival.rule(lengths, CAPS, seed) for seed in (5, 5, 6))
    assert as_lists(first) == as_lists(again)
    assert as_lists(first) != as_lists(other)


@every_rival
@pytest.mark.parametrize(("size", "attribute"), [((10, 5), "tile"), ((1, 65), "token")])
def test_samples_larger_than_a_kept_cap_are_refused(rival: Rival, size, attribute):
    """Prevents an endless loop or a broken cap, and refusals by rules that ignore the cap."""
    lengths = make_lengths([(1, 5), size])
    keeps = {"tile": rival.keeps_tile_cap, "token": rival.keeps_token_cap}[attribute]
    if keeps:
        with pytest.raises(UserError, match="1 of 2 samples exceed the caps"):
            rival.rule(lengths, CAPS, 0)
    else:
        assert len(rival.rule(lengths, CAPS, 0).samples) == 2


@settings(max_examples=40, deadline=None)
@given(sizes=SMALL_SIZES, seed=SEEDS)
def test_fixed_count_is_fixed(sizes, seed):
    """Prevents micro-batches of uneven count, or a count far from what the caps hold."""
    lengths = make_lengths(sizes)
    count = samples_per_micro_batch(lengths, CAPS)
    bound = max(
        ceil(sum(tiles for tiles, _ in sizes) / CAPS["tiles"]),
        ceil(sum(tokens for _, tokens in sizes) / CAPS["tokens"]),
    )
    assert abs(count - len(sizes) / bound) <= 0.5
    order = shuffled(lengths, seed)
    expected = [order[i : i + count] for i in range(0, len(order), count)]
    assert as_lists(fixed_count(lengths, CAPS, seed)) == expected


@settings(max_examples=40, deadline=None)
@given(sizes=SMALL_SIZES, seed=SEEDS)
def test_sequential_equals_plain_text(sizes, seed):
    """Prevents a pack that is closed too early or that a later sample still enters."""
    lengths = make_lengths(sizes)
    expected: list[list[int]] = [[]]
    for sample in shuffled(lengths, seed):
        if fits([*expected[-1], sample], lengths):
            expected[-1].append(sample)
        else:
            expected.append([sample])
    assert as_lists(sequential(lengths, CAPS, seed)) == expected


@settings(max_examples=60, deadline=None)
@given(sizes=SMALL_SIZES, seed=SEEDS)
def test_first_fit_decreasing_equals_plain_text(sizes, seed):
    """Prevents a tree of rooms that finds a pack that fits, but not the first one."""
    lengths = make_lengths(sizes)
    expected: list[list[int]] = []
    for size in sorted((tokens for _, tokens in sizes), reverse=True):
        for pack in expected:
            if sum(pack) + size <= CAPS["tokens"]:
                pack.append(size)
                break
        else:
            expected.append([size])
    packs = first_fit_decreasing(lengths, CAPS, seed)
    assert token_lists(packs, lengths) == sorted(expected)


def test_first_fit_decreasing_trains_in_random_order():
    """Prevents steps of like packs, longest samples first, that the system does not have."""
    lengths = make_lengths([(1, tokens) for tokens in range(1, 65)])
    packs = first_fit_decreasing(lengths, CAPS, 0)
    longest = np.maximum.reduceat(lengths.tokens[packs.samples], packs.offsets[:-1])
    assert sorted(longest.tolist(), reverse=True) != longest.tolist()


@settings(max_examples=60, deadline=None)
@given(sizes=SMALL_SIZES, seed=SEEDS, window_samples=st.sampled_from([1, 7, 25, 2000]))
def test_knapsack_equals_plain_text(sizes, seed, window_samples):
    """Prevents the search by tile count from choosing another sample than a scan of all would."""
    lengths = make_lengths(sizes)
    stream, expected = shuffled(lengths, seed), []
    for start in range(0, len(stream), window_samples):
        left = sorted(stream[start : start + window_samples], key=lambda i: sizes[i][1])
        while left:
            pack: list[int] = []
            while fitting := [i for i in left if fits([*pack, i], lengths)]:
                pack.append(fitting[-1])
                left.remove(fitting[-1])
            expected.append(pack)
    packs = knapsack(lengths, CAPS, seed, window_samples=window_samples)
    assert as_lists(packs) == expected


@settings(max_examples=60, deadline=None)
@given(sizes=SMALL_SIZES, seed=SEEDS, buffers=st.sampled_from([1, 3, 20]))
def test_online_buffers_equals_plain_text(sizes, seed, buffers):
    """Prevents sums, order or limit of the open packs from going astray."""
    lengths = make_lengths(sizes)
    emitted: list[list[int]] = []
    opened: list[list[int]] = []
    for sample in shuffled(lengths, seed):
        fitting = [pack for pack in opened if fits([*pack, sample], lengths)]
        target = fitting[0] if fitting else []
        # Filled or new, the pack takes the last place among those of as many tiles.
        opened = [pack for pack in opened if pack is not target]
        opened.append([*target, sample])
        opened.sort(key=lambda pack: lengths.column("tiles")[pack].sum(), reverse=True)
        full = [
            pack
            for pack in opened
            if lengths.column("tiles")[pack].sum() == CAPS["tiles"]
            or lengths.tokens[pack].sum() == CAPS["tokens"]
        ]
        emitted += full
        opened = [pack for pack in opened if pack not in full]
        while len(opened) > buffers:
            emitted.append(opened.pop(0))
    packs = online_buffers(lengths, CAPS, seed, buffers=buffers)
    assert as_lists(packs) == emitted + opened


@pytest.mark.parametrize(
    ("samples", "per_mega_batch"), [(1, 1), (8, 4), (40, 8), (796, 196), (1700, 200)]
)
def test_length_grouped_equals_plain_text(samples, per_mega_batch):
    """Prevents mega-batches of another size, unsorted ones, and a longest sample not first."""
    tokens = np.random.default_rng(samples).permutation(samples) + 1
    lengths, caps = make_lengths([(1, n) for n in tokens]), Caps.of(tiles=4, tokens=10**6)
    stream = shuffled(lengths, 3)
    groups = [
        sorted(stream[i : i + per_mega_batch], key=lambda sample: -tokens[sample])
        for i in range(0, samples, per_mega_batch)
    ]
    longest = next(group for group in groups if tokens[group[0]] == samples)
    groups[0][0], longest[0] = longest[0], groups[0][0]
    order = [sample for group in groups for sample in group]
    expected = [order[i : i + 4] for i in range(0, samples, 4)]
    assert as_lists(length_grouped(lengths, caps, 3)) == expected


@settings(max_examples=60, deadline=None)
@given(sizes=SMALL_SIZES, seed=SEEDS)
def test_vision_sorted_equals_plain_text(sizes, seed):
    """Prevents packs of other samples than the rule's, and packs out of order."""
    lengths = make_lengths(sizes)
    expected: list[list[int]] = []
    for size in sorted((tokens for _, tokens in sizes), reverse=True):
        emptiest = min(expected, key=sum, default=None)
        if emptiest is not None and sum(emptiest) + size <= CAPS["tokens"]:
            emptiest.append(size)
        else:
            expected.append([size])
    packs = vision_sorted(lengths, CAPS, seed)
    assert token_lists(packs, lengths) == sorted(expected)
    assert (np.diff(packs.sums(lengths.column("tiles"))) >= 0).all()
