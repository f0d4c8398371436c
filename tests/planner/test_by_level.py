"""Packing by level: every sample once, within its level's caps, long packs filled first-fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from length_cases import make_lengths
from packing_cases import fewest_packs

from omnibal.base.errors import UserError
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.packing.by_level import fill_packs, levels_of_packs, levels_of_samples, pack_by_level
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import Packs

pytestmark = pytest.mark.quick


def level(tokens: int, context: int = 1, tiles: int = 1_000) -> Level:
    return Level(caps=Caps.of(tiles=tiles, tokens=tokens), context=context)


LEVELS = (level(100, tiles=4), level(300, 2, tiles=8), level(900, 4, tiles=20))


def pack(lengths, *, seed=0, method=PackingMethod.BALANCED, levels=LEVELS, may_fill=None):
    return pack_by_level(
        lengths, levels, method, np.random.SeedSequence([seed, 0]), may_fill=may_fill
    )


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 900)), min_size=1, max_size=80),
    method=st.sampled_from(PackingMethod),
    fills=st.booleans(),
)
def test_every_sample_is_packed_once_within_its_level(sizes, method, fills):
    """Prevents lost or repeated samples, packs above caps, and levels set by filling samples."""
    lengths = make_lengths(sizes)
    may_fill = None if fills else np.zeros((3, len(sizes)), bool)
    packs = pack(lengths, method=method, may_fill=may_fill)
    assert sorted(packs.samples.tolist()) == list(range(len(sizes)))
    own = levels_of_samples(lengths, LEVELS)
    for number, found in enumerate(levels_of_packs(packs, lengths, LEVELS).tolist()):
        samples = packs[number]
        assert own[samples].max() == found
        assert lengths.tokens[samples].sum() <= LEVELS[found].caps["tokens"]
        assert lengths.column("tiles")[samples].sum() <= LEVELS[found].caps["tiles"]
        assert fills or len(set(own[samples].tolist())) == 1


def test_a_sample_longer_than_all_levels_is_refused():
    """Prevents truncating or dropping an overlong sample silently."""
    with pytest.raises(UserError, match="1 of 2 samples exceed the caps of 20 tiles and 900"):
        pack(make_lengths([(1, 50), (1, 901)]))


def first_fits(packs, caps, queues, sizes, allowed):
    """Return first-fit packs by HBP's GreedyFill: loop over packs, shorter levels, samples."""
    queues = [list(queue) for queue in queues]
    filled = []
    for members in packs:
        members = list(members)
        for queue in reversed(queues):
            for sample in list(queue):
                total = sizes[:, members].sum(axis=1) + sizes[:, sample]
                if allowed[sample] and (total <= caps).all():
                    members.append(sample)
                    queue.remove(sample)
        filled.append(members)
    return filled, [sorted(queue) for queue in queues]


def test_filling_is_first_fit():
    """Prevents unused space that a queued sample fits, and samples that may not fill."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        sizes = np.stack([rng.integers(0, 4, 60), rng.integers(1, 120, 60)])
        own, *queues = np.split(rng.permutation(60), [6, 20])
        given = np.array([12, 420]), queues, sizes, rng.random(60) < 0.8
        parts = np.split(own, [2, 5])
        filled, left = fill_packs(Packs.from_lists(parts), *given)
        wanted, rest = first_fits(parts, *given)
        assert [filled[number].tolist() for number in range(3)] == wanted
        assert [sorted(queue) for queue in left] == rest


def test_levels_are_packed_into_the_fewest_packs():
    """Prevents more packs per level than its samples need."""
    rng = np.random.default_rng(1)
    for _ in range(12):
        tokens = rng.integers(40, 280, 7)
        lengths = make_lengths([(0, size) for size in tokens.tolist()])
        levels = (level(100), level(300, 2))
        packs = pack(lengths, levels=levels, may_fill=np.zeros((2, 7), bool))
        short = tokens <= 100
        wanted = [
            fewest_packs(tokens[None, own], np.array([cap])) if own.any() else 0
            for own, cap in ((short, 100), (~short, 300))
        ]
        of_packs = levels_of_packs(packs, lengths, levels)
        found = np.bincount(of_packs, minlength=2).tolist()
        assert found == wanted


def test_packs_are_a_function_of_the_seed():
    """Prevents irreproducible plans, and epochs with equal packs."""
    rng = np.random.default_rng(2)
    lengths = make_lengths([(0, size) for size in rng.integers(5, 900, 200).tolist()])
    assert pack(lengths).samples.tolist() == pack(lengths).samples.tolist()
    assert pack(lengths).samples.tolist() != pack(lengths, seed=1).samples.tolist()


def test_filling_puts_short_samples_into_long_packs():
    """Prevents unused space in long packs while short samples need extra packs."""
    lengths = make_lengths([(0, 700)] * 6 + [(0, 20)] * 60)
    filled, kept = pack(lengths), pack(lengths, may_fill=np.zeros((3, 66), bool))
    assert len(filled) == 6
    assert len(kept) == 6 + 12
    assert np.diff(filled.offsets).tolist() == [11] * 6
