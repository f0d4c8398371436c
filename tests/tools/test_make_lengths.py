"""Synthetic lengths: reproducible files, exact counts, limits, published statistics."""

from dataclasses import replace

import numpy as np
import pytest

from omnibal.data.lengths import Lengths, read_lengths
from omnibal.model.limits import Caps
from omnibal.packing.isf import pack_isf
from tools.make_lengths import Part, Text, draw_part, main, make_lengths

pytestmark = pytest.mark.quick

SIZES = {
    "sharegpt4v-100k": 102_025,
    "llava_zh": 157_712,
    "mix665k": 665_058,
    "dvqa": 200_000,
    "chartqa": 18_317,
    "ai2d": 12_413,
    "docvqa": 10_211,
    "geoqa+": 72_318,
    "synthdog_en": 29_765,
}
"""Samples by source in InternVL-Chat-1.2's fine-tuning data."""


@pytest.fixture(scope="module")
def internvl() -> Lengths:
    return make_lengths("internvl", 100_000, seed=1)


def source_columns(lengths: Lengths, name: str) -> dict[str, np.ndarray]:
    rows = lengths.source == lengths.source_names.index(name)
    return {"tiles": lengths.column("tiles")[rows], "tokens": lengths.tokens[rows]}


def count_samples(lengths: Lengths) -> dict[str, int]:
    """Number of samples by source."""
    counts = np.bincount(lengths.source, minlength=len(lengths.source_names)).tolist()
    return dict(zip(lengths.source_names, counts, strict=True))


@pytest.mark.parametrize("mixture", ["internvl", "tulu3-longcite"])
def test_same_arguments_give_the_same_bytes(tmp_path, mixture):
    """Prevents lengths files that differ between machines or runs."""
    contents, file = [], tmp_path / "made.parquet"
    for seed in ("5", "5", "6"):
        samples = ["--mixture", mixture, "--samples", "3000", "--seed", seed]
        with pytest.raises(SystemExit, match="0"):
            main(["-o", str(file), *samples])
        contents.append(file.read_bytes())
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("samples", [1, 5, 999, 54_321, sum(SIZES.values())])
def test_counts_scale_and_sum_up(samples):
    """Prevents rounding from adding or dropping samples, and proportions unlike the paper's."""
    lengths = make_lengths("internvl", samples, seed=0)
    counts = np.array([count_samples(lengths)[name] for name in SIZES])
    shares = np.array([*SIZES.values()]) * samples / sum(SIZES.values())
    assert len(lengths) == len(lengths.tokens) == len(lengths.loss_tokens) == samples
    assert np.abs(counts - shares).max() < 1
    assert (np.diff(lengths.source) >= 0).all()


def test_limits_of_internvl(internvl):
    """Prevents tile counts that tiling cannot produce, and samples longer than a pack."""
    text = internvl.tokens - 256 * internvl.column("tiles")
    assert set(np.unique(internvl.column("tiles"))) == {0, 1, 3, 4, 5}
    assert internvl.tokens.max() <= 4096 and text.min() >= 30
    assert internvl.loss_tokens.min() >= 1 and (internvl.loss_tokens <= text).all()
    # No dummy tiles: a text-only sample has 0 tiles.
    without = {name for name in SIZES if not source_columns(internvl, name)["tiles"].all()}
    assert without == {"mix665k"}
    mix665k = source_columns(internvl, "mix665k")
    assert np.mean(mix665k["tiles"] == 0) == pytest.approx(40 / 664, abs=1e-3)
    assert mix665k["tokens"][mix665k["tiles"] == 0].max() <= 2048


def test_samples_are_cut_at_the_mixtures_tokens():
    """Prevents rare samples longer than the mixture's token limit."""
    images = ((900, 450, 1), (1024, 1024, 1))
    part = Part(images=images, text=Text(median=3000, sigma=1, answers=0.5))
    tiles, tokens, _ = draw_part(part, 2000, 4096, np.random.default_rng(0))
    for count in (3, 5):
        assert tokens[tiles == count].max() == 4096
        assert tokens[tiles == count].min() < 4096


@pytest.mark.parametrize(
    ("name", "tiles", "tokens"),
    [
        ("ai2d", 2.49, 691),
        ("chartqa", 4.75, 1305),
        ("docvqa", 4.62, 1465),
        ("synthdog_en", 3.84, 1103),
    ],
)
def test_known_means_come_out(name, tiles, tokens):
    """Prevents source means that differ from published means."""
    made = source_columns(make_lengths("internvl", 300_000, seed=2), name)
    assert made["tiles"].mean() == pytest.approx(tiles, abs=0.06)
    assert made["tokens"].mean() == pytest.approx(tokens, rel=0.02)


@pytest.fixture(scope="module")
def tulu3_longcite() -> Lengths:
    return make_lengths("tulu3-longcite", 941_344, seed=1)


def test_figures_of_long_and_short_texts_come_out(tulu3_longcite):
    """Prevents text statistics over 10 % off Table 3 of HBP (arXiv 2503.07680)."""
    tulu3 = source_columns(tulu3_longcite, "tulu3")["tokens"]
    tokens = np.random.default_rng(0).permutation(tulu3)[:200_000]
    short = tokens[tokens <= 4096]
    threes = short[: len(short) // 3 * 3].reshape(-1, 3)
    assert pad_ratio(threes) == pytest.approx(0.416, rel=0.1)
    assert threes.sum(axis=1).mean() == pytest.approx(2_400, rel=0.1)
    assert tokens.mean() == pytest.approx(850, rel=0.1)  # 0.8K at 32K, 0.9K at 128K
    assert dist_ratio(tokens) == pytest.approx(0.64, rel=0.1)
    descending = sorted(tokens.tolist(), reverse=True)
    for cap, published in ((32_768, 30_200), (131_072, 125_000)):
        first, batches = 0, 0
        while first < len(descending):
            first, batches = first + cap // descending[first], batches + 1
        assert sum(descending) / batches == pytest.approx(published, rel=0.1)


def test_limits_of_long_and_short_texts(tulu3_longcite):
    """Prevents tiles in texts, unpublished dataset sizes, and samples longer than a pack."""
    assert tulu3_longcite.items == {}
    counts = count_samples(tulu3_longcite)
    assert counts == {"tulu3": 939_344, "longcite": 2_000}
    short, long = (source_columns(tulu3_longcite, name)["tokens"] for name in counts)
    assert short.max() <= 32_768 and long.max() <= 131_072 and long.min() >= 8_192
    assert long.mean() == pytest.approx(70_000, rel=0.03)


def pad_ratio(batches: np.ndarray) -> float:
    """Mean padding share of batches [batches, samples], Eq. 1."""
    return float(np.mean(1 - batches.mean(axis=1) / batches.max(axis=1)))


def dist_ratio(loads: np.ndarray) -> float:
    """Eq. 2 over steps of 8 loads: mean padding to the heaviest load."""
    return pad_ratio(loads[: len(loads) // 8 * 8].reshape(-1, 8))


def test_published_figures_come_out(internvl):
    """Prevents a mixture with padding and imbalance unlike the paper's."""
    rng = np.random.default_rng(0)
    # A sample without an image counts as one tile, as in the files of the paper.
    tiles, tokens = np.maximum(internvl.column("tiles"), 1), internvl.tokens
    # Mini-batches of 4, full steps only.
    batches = rng.permutation(len(internvl))[: len(internvl) // 32 * 32].reshape(-1, 4)
    pad, longest = pad_ratio(tokens[batches]), tokens[batches].max(axis=1)
    vision, language = dist_ratio(tiles[batches].sum(axis=1)), dist_ratio(longest)
    assert [pad, vision, language] == pytest.approx([0.31, 0.34, 0.30], abs=0.012)
    packs = pack_isf(replace(internvl, items={"tiles": tiles}), Caps.of(tiles=9, tokens=4096), 0)
    assert len(internvl) / len(packs) == pytest.approx(4.6, abs=0.1)
    order = rng.permutation(len(packs))
    ratios = [dist_ratio(packs.sums(column)[order]) for column in (tiles, tokens)]
    assert ratios == pytest.approx([0.02, 0.14], abs=0.012)


def test_the_file_reads_back_and_says_that_it_is_synthetic(tmp_path, capfd):
    """Prevents an unreadable file, and synthetic lengths that are not labelled as such."""
    output = tmp_path / "lengths.parquet"
    with pytest.raises(SystemExit, match="0"):
        main(["-o", str(output), "--samples", "2000"])
    printed = capfd.readouterr().out
    assert printed.count("synthetic") == 1
    assert read_lengths([output]).sha256 == make_lengths("internvl", 2000, 0).sha256
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "synthetic" in capfd.readouterr().out
