"""Packing: nothing lost, caps kept, the paper's filter rule, and one clear refusal."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.data.bound import naive_lower_bound
from omnibal.data.fit import check_samples_fit
from omnibal.data.isf import pack_isf
from omnibal.data.lengths import Lengths, read_lengths
from omnibal.errors import UserError
from omnibal.plan import Caps

REAL_LENGTHS = Path(__file__).parents[3] / "shared" / "data" / "lengths"
SIZES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 512)), min_size=1, max_size=200)


def make_lengths(sizes: list[tuple[int, int]]) -> Lengths:
    tiles, tokens = np.array(sizes, np.int32).reshape(-1, 2).T
    return Lengths(
        tiles=tiles,
        tokens=tokens,
        loss_tokens=tokens // 2,
        source=np.zeros(len(sizes), np.int32),
        source_names=("docs",),
        origin=None,
    )


def assert_valid(packs, lengths: Lengths, caps: Caps) -> None:
    assert sorted(packs.samples.tolist()) == list(range(len(lengths)))
    assert (np.diff(packs.offsets) > 0).all()
    assert packs.sums(lengths.tiles).max() <= caps.max_tiles
    assert packs.sums(lengths.tokens).max() <= caps.max_tokens


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 9), iterations=st.integers(0, 12))
def test_every_sample_once_within_the_caps(sizes, seed, iterations):
    """Prevents lost, doubled or overflowing samples, whatever the lengths and iterations."""
    lengths, caps = make_lengths(sizes), Caps(max_tiles=9, max_tokens=512)
    packs = pack_isf(lengths, caps, seed, iterations=iterations)
    assert_valid(packs, lengths, caps)
    assert len(packs) >= naive_lower_bound(lengths, caps)


@pytest.mark.parametrize(
    "sizes",
    [
        [(9, 512)] * 50,
        [(0, 1)] * 5000,
        [(3, 100)] * 50,
        [(9, 512)] + [(0, 1)] * 99,
        [(0, 512), (9, 1)] * 50,
    ],
    ids=["all at the caps", "tiny, no tiles", "all equal", "one giant", "opposite extremes"],
)
def test_adversarial_lengths(sizes):
    """Prevents off-by-one cuts where sums meet the caps exactly or one dimension is empty."""
    lengths, caps = make_lengths(sizes), Caps(max_tiles=9, max_tokens=512)
    assert_valid(pack_isf(lengths, caps, 0), lengths, caps)


def paper_isf(lengths: Lengths, caps: Caps, seed: int, iterations: int, q_v: int, q_t: int):
    """Algorithm 1 sample by sample, with the same shuffles."""
    rng = np.random.default_rng(seed)
    left, kept = list(range(len(lengths))), []
    for round_number in range(iterations + 1):
        if not left:
            break
        groups, group = [], []
        left = rng.permutation(left).tolist()
        for sample in left:
            group.append(sample)
            if (
                sum(lengths.tiles[group]) > caps.max_tiles
                or sum(lengths.tokens[group]) > caps.max_tokens
            ):
                groups.append(group[:-1])
                group = [sample]
        groups.append(group)
        full = [
            g
            for g in groups
            if round_number == iterations
            or sum(lengths.tiles[g]) >= q_v
            or sum(lengths.tokens[g]) >= q_t
        ]
        kept += full
        taken = {sample for g in full for sample in g}
        left = [sample for sample in left if sample not in taken]
    return kept


@pytest.mark.parametrize("thresholds", [(9, 496), (8, 450), (5, 512)])
def test_isf_equals_the_paper_written_out(thresholds):
    """Prevents the vectorised cuts and filter from drifting away from Algorithm 1."""
    rng = np.random.default_rng(3)
    sizes = rng.integers((0, 1), (6, 300), (300, 2)).tolist()
    lengths, caps = make_lengths(sizes), Caps(max_tiles=9, max_tokens=512)
    packs = pack_isf(
        lengths, caps, 7, iterations=4, tile_threshold=thresholds[0], token_threshold=thresholds[1]
    )
    expected = paper_isf(lengths, caps, 7, 4, *thresholds)
    assert [pack.tolist() for pack in (packs[i] for i in range(len(packs)))] == expected


@pytest.mark.parametrize(("max_tokens", "threshold"), [(4096, 3968), (8192, 8064), (512, 496)])
def test_default_token_threshold(max_tokens, threshold):
    """Prevents a default Q't other than the paper's Qt - 128, or too low for a small cap."""
    rng = np.random.default_rng(0)
    sizes = [(0, int(n)) for n in rng.integers(1, max_tokens // 3, 200)]
    lengths, caps = make_lengths(sizes), Caps(max_tiles=9, max_tokens=max_tokens)
    default = pack_isf(lengths, caps, 0)
    assert default.samples.tolist() == (
        pack_isf(lengths, caps, 0, token_threshold=threshold).samples.tolist()
    )
    assert default.samples.tolist() != (
        pack_isf(lengths, caps, 0, token_threshold=max_tokens).samples.tolist()
    )


def test_seed_decides_the_packs():
    """Prevents packs that change between runs, and a seed that is ignored."""
    lengths, caps = (
        make_lengths([(2, 100), (1, 60), (0, 30)] * 40),
        Caps(max_tiles=9, max_tokens=512),
    )
    first, again, other = (pack_isf(lengths, caps, seed) for seed in (5, 5, 6))
    assert first.samples.tolist() == again.samples.tolist()
    assert first.offsets.tolist() == again.offsets.tolist()
    assert first.samples.tolist() != other.samples.tolist()


def test_oversize_samples_are_refused_by_name():
    """Prevents the silent dropping of samples that fit no pack."""
    lengths = make_lengths([(1, 10)] + [(10, 20)] * 4 + [(1, 600)] * 3)
    with pytest.raises(UserError) as raised:
        pack_isf(lengths, Caps(max_tiles=9, max_tokens=512), 0)
    message = str(raised.value)
    assert "7 of 8 samples" in message
    assert "sample 1 of docs has 10 tiles and 20 tokens" in message
    assert "and 2 more" in message
    assert "--max-tiles 10 --max-tokens 600" in message
    check_samples_fit(lengths, Caps(max_tiles=10, max_tokens=600))


def test_real_lengths_need_no_more_packs_than_the_public_code():
    """Prevents a worse packing than the authors' (10,847 packs at 9 tiles and 4,096 tokens)."""
    files = sorted(REAL_LENGTHS.glob("*.json"))
    if not files:
        pytest.skip(f"the published length files are not at {REAL_LENGTHS}")
    lengths, caps = read_lengths(files), Caps(max_tiles=9, max_tokens=4096)
    packs = pack_isf(lengths, caps, 0)
    assert_valid(packs, lengths, caps)
    assert len(packs) <= 1.005 * 10_847
