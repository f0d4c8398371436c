"""Mixtures of sources: samples counted in the plan, its report and its check."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cli_cases import run
from plan_cases import MODEL, example_lengths, origin_of

from omnibal.base.errors import UserError
from omnibal.data.lengths import read_lengths, write_lengths
from omnibal.data.mixture import Mixture, mix_samples, read_mixture, samples_of_sources, shortfalls
from omnibal.job.check import check_plan, open_plan
from omnibal.job.plan import read_plan
from omnibal.packing.packs import read_packs

AVAILABLE = np.array([100, 40, 7])
NAMES = ("web", "books", "ocr")


def mixture(**sources) -> Mixture:
    settings = {name: sources.pop(name) for name in ("samples", "most_epochs") if name in sources}
    return Mixture(sources=sources, **settings)


def weights(*values: float, **others) -> dict:
    """Return mixture settings with a weight per source."""
    given = zip(NAMES, values, strict=True)
    return {**{name: {"weight": weight} for name, weight in given}, **others}


NONE = {"epochs": 0}
# In floating point 0.29 x 100 is 28.999...
ROUNDED = weights(1, 0, 0, samples=1000, most_epochs=0.29, books=NONE, ocr=NONE)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"web": {"epochs": 1}, "books": {"epochs": 0.5}, "ocr": {"epochs": 3}}, [100, 20, 21]),
        ({"web": {"epochs": 0}, "books": {"weight": 1}, "ocr": {"epochs": 1}}, [0, 40, 7]),
        # 147 samples by weight 1 : 1 : 1.
        (weights(1, 1, 1), [49, 49, 49]),
        # ocr is cut to 14, and web and books share the remainder 1 : 1.
        (weights(2, 2, 4, samples=100, most_epochs=2), [43, 43, 14]),
        # ocr is cut first, then books, and web fills the remainder.
        (weights(1, 3, 9, samples=200, most_epochs=1), [100, 40, 7]),
        (weights(1, 3, 0, samples=90, ocr={"epochs": 10}), [5, 15, 70]),
        (ROUNDED, [29, 0, 0]),
    ],
)
def test_shares_are_those_counted_by_hand(given, expected):
    """Prevents wrong shares by weight, or a cap that loses samples other sources could give."""
    assert samples_of_sources(mixture(**given), NAMES, AVAILABLE).tolist() == expected


@pytest.mark.parametrize("seed", range(20))
def test_weights_with_caps_fill_what_can_be_filled(seed):
    """Prevents a share above its cap, or below its weight while samples remain."""
    rng = np.random.default_rng(seed)
    available, names = rng.integers(1, 1000, 5), list("01234")
    weight = rng.random(5) + 0.1
    samples = int(rng.integers(1, 4000))
    given = {name: {"weight": each} for name, each in zip(names, weight, strict=True)}
    rule = mixture(samples=samples, most_epochs=1.5, **given)
    seen, most = samples_of_sources(rule, names, available), np.floor(1.5 * available)
    assert (seen <= most).all() and seen.sum() == min(samples, most.sum())
    free, rate = seen < most, seen / weight
    # Uncapped sources have equal samples per weight, capped sources no more.
    if free.any():
        assert (np.abs(rate[free] - rate[free].max()) <= 1 / weight[free].min()).all()
        assert (rate[~free] <= rate[free].max() + 1 / weight.min()).all()


def test_rows_are_copies_of_samples_as_often_as_asked(tmp_path):
    """Prevents a sample repeated too often or never, and rows that change in the file."""
    lengths = example_lengths(origin_of(MODEL), 301)  # pages has 151, strips 150
    rule = mixture(pages={"epochs": 2.4}, strips={"epochs": 0.3})
    mixed = mix_samples(lengths, rule, 7)
    times = np.bincount(mixed.sample, minlength=301)
    pages, strips = times[::2], times[1::2]
    assert set(pages) == {2, 3} and pages.sum() == round(2.4 * 151)
    assert set(strips) == {0, 1} and strips.sum() == 45
    assert (mixed.tokens == lengths.tokens[mixed.sample]).all()
    assert (mix_samples(lengths, rule, 7).sample == mixed.sample).all()
    assert (mix_samples(lengths, rule, 8).sample != mixed.sample).any()
    write_lengths(mixed, tmp_path / "a.parquet")
    again = read_lengths([tmp_path / "a.parquet"])
    assert mixed.repeats and again.repeats and (again.sample == mixed.sample).all()
    assert again.sha256 == mixed.sha256


TOML = """
most_epochs = 3
[sources.pages]
epochs = 1.5
[sources.strips]
weight = 1
"""
SETUP = "--model internvl-digits --cluster laptop-cpu --precision fp32"
LIMITS = "--max-tiles 40 --max-tokens 1000 --dp 2"
PORTIONS = "--portion-samples 130"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """Return options for lengths, a few of them long, and for a mixture."""
    folder = tmp_path_factory.mktemp("data")
    lengths = example_lengths(origin_of(MODEL))
    longer = lengths.tokens + 500 * (np.arange(len(lengths)) % 30 == 0).astype(np.int32)
    write_lengths(replace(lengths, tokens=longer), folder / "lengths.parquet")
    (folder / "mixture.toml").write_text(TOML)
    return f"{folder}/lengths.parquet --mixture {folder}/mixture.toml"


@pytest.fixture(scope="module")
def make_plan_once(data, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that plans once per options. Tests must not write to the plan."""

    @cache
    def plan(options: str) -> Path:
        directory = tmp_path_factory.mktemp("plan") / "plan"
        run(f"plan {SETUP} {LIMITS} --micro-batches 4 --lengths {data} -o {directory} {options}")
        return directory

    return plan


@pytest.mark.parametrize("options", ["", PORTIONS, "--packing-levels 2 --curriculum-steps 1"])
def test_a_plan_says_what_is_seen_of_each_source(make_plan_once, tmp_path, options):
    """Prevents mixture figures that differ from the samples counted in the packs."""
    directory = make_plan_once(options)
    seen = read_plan(directory).data.mixture
    packs, lengths = open_plan(directory).steps
    for place, step in enumerate(seen.by_step):
        counted = np.zeros(2, int)
        for pack in np.flatnonzero(packs.step < step):
            counted += np.bincount(lengths.source[packs.packs[pack]], minlength=2)
        assert counted.tolist() == [each.seen[place] for each in seen.sources]
    assert seen.by_step[-1] == packs.steps
    assert [each.seen[-1] for each in seen.sources] == [225, 150]
    assert [each.samples for each in seen.sources] == [150, 150]
    said = f"by step {packs.steps:,}: pages 225 samples (1.50 epochs), strips 150 samples (1.00"
    assert any(line.startswith(said) for line in check_plan(directory))
    run("report", directory, "-o", tmp_path / "page.html")
    assert "Epochs of a source that were trained" in (tmp_path / "page.html").read_text()


def test_steps_that_are_taken_over_stay_a_mixture(make_plan_once, tmp_path):
    """Prevents a plan that reuses steps from losing the mixture's figures."""
    directory, out = make_plan_once(PORTIONS), tmp_path / "one"
    run(f"plan {SETUP} --steps-of {directory} -o {out}")
    assert read_plan(out).parallel.data == 1
    assert read_plan(out).data.mixture == read_plan(directory).data.mixture
    assert any(line.startswith("by step") for line in check_plan(out))


def test_edited_figures_are_refused(make_plan_once, tmp_path):
    """Prevents a plan.json with other mixture figures than are trained."""
    directory = shutil.copytree(make_plan_once(""), tmp_path / "plan")
    plan = json.loads((directory / "plan.json").read_text())
    plan["data"]["mixture"]["sources"][0]["seen"][0] = 0
    (directory / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UserError, match=r"data\.mixture says that \[0, .* seen by step"):
        check_plan(directory)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sources.web]\nweight = 1\nepochs = 2", "either a weight or epochs"),
        ("[sources.web]\nweight = 0", "greater than 0"),
        ("[sources.web]\nepochs = -1", "greater than or equal to 0"),
        ("samples = 3", "sources"),
        ("[sources.web]\nshare = 1", "share"),
    ],
)
def test_a_mistaken_file_is_refused(tmp_path, text, message):
    """Prevents a mixture file misread without an error."""
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_mixture(tmp_path / "m.toml")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"web": {"weight": 1}}, "no rule for books, ocr"),
        (weights(1, 1, 1, boks={"weight": 1}), "a rule for boks; it must name every source"),
        ({name: {"epochs": 0} for name in NAMES}, "has no sample"),
        ({"samples": 10, **{name: {"epochs": 1} for name in NAMES}}, "10 samples, .* alone 147"),
        ({"samples": 200, **{name: {"epochs": 1} for name in NAMES}}, "200 samples, .* alone 147"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(given, message):
    """Prevents a forgotten source, and a total that the sources cannot reach."""
    with pytest.raises(UserError, match=message):
        samples_of_sources(mixture(**given), NAMES, AVAILABLE)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (weights(0.2, 9, 1), []),
        (
            weights(1, 1, 1, samples=100, most_epochs=2),
            ["most_epochs = 2 limits ocr, whatever the weights are"],
        ),
        (
            weights(1, 1, 1, samples=1000, most_epochs=2),
            ["limits web, books and ocr,", "samples are 294, not 1,000"],
        ),
        (weights(1, 1, 1, books=NONE, ocr={"epochs": 0.05}), ["no sample of ocr is seen"]),
        (ROUNDED, ["limits web", "samples are 29, not 1,000"]),
    ],
)
def test_what_a_mixture_cannot_be_is_said(given, expected):
    """Prevents fewer samples than requested, or an unseen source, without a note."""
    said = shortfalls(mixture(**given), NAMES, AVAILABLE)
    for sentence, part in zip(said, expected, strict=True):
        assert part in sentence


def test_packs_of_a_mixture_are_of_its_samples(data, tmp_path):
    """Prevents `omnibal pack` from ignoring the mixture and packing every sample once."""
    run(f"pack {data} {LIMITS} -o {tmp_path}/packs.parquet")
    assert len(read_packs(tmp_path / "packs.parquet").packs.samples) == 225 + 150
