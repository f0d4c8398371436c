"""Mixtures of sources: rows counted one by one, in the plan, its report and its check."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_cases import MODEL, example_lengths, origin_of

from omnibal.base.errors import UserError
from omnibal.cli import app
from omnibal.data.lengths import read_lengths, write_lengths
from omnibal.data.mixture import Mixture, drawn, read_mixture, samples_of_sources, shortfalls
from omnibal.job.check import check_plan, open_plan
from omnibal.job.plan import read_plan, write_plan
from omnibal.packing.packs import read_packs

AVAILABLE = np.array([100, 40, 7])
NAMES = ("web", "books", "ocr")


def mixture(**sources) -> Mixture:
    settings = {name: sources.pop(name) for name in ("samples", "most_epochs") if name in sources}
    return Mixture(sources=sources, **settings)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"web": {"epochs": 1}, "books": {"epochs": 0.5}, "ocr": {"epochs": 3}}, [100, 20, 21]),
        ({"web": {"epochs": 0}, "books": {"weight": 1}, "ocr": {"epochs": 1}}, [0, 40, 7]),
        # 147 samples by weight 1 : 1 : 1.
        ({"web": {"weight": 1}, "books": {"weight": 1}, "ocr": {"weight": 1}}, [49, 49, 49]),
        # ocr is cut to 14, and the others share what is left, 1 : 1.
        (
            {
                "samples": 100,
                "most_epochs": 2,
                "web": {"weight": 2},
                "books": {"weight": 2},
                "ocr": {"weight": 4},
            },
            [43, 43, 14],
        ),
        # First ocr, then books is cut, and only then is web all that is left.
        (
            {
                "samples": 200,
                "most_epochs": 1,
                "web": {"weight": 1},
                "books": {"weight": 3},
                "ocr": {"weight": 9},
            },
            [100, 40, 7],
        ),
        (
            {
                "samples": 90,
                "web": {"weight": 1},
                "books": {"weight": 3},
                "ocr": {"epochs": 10},
            },
            [5, 15, 70],
        ),
    ],
)
def test_shares_are_those_counted_by_hand(given, expected):
    """Prevents: another share by weight, or a cap that loses samples while others have room."""
    assert samples_of_sources(mixture(**given), NAMES, AVAILABLE).tolist() == expected


@pytest.mark.parametrize("seed", range(20))
def test_weights_with_caps_fill_what_can_be_filled(seed):
    """Prevents: a share above its cap, or one below its weight's with samples left over."""
    rng = np.random.default_rng(seed)
    available = rng.integers(1, 1000, 5)
    weight = rng.random(5) + 0.1
    samples = int(rng.integers(1, 4000))
    given = {str(each): {"weight": weight[each]} for each in range(5)}
    seen = samples_of_sources(
        mixture(samples=samples, most_epochs=1.5, **given), list(map(str, range(5))), available
    )
    most = np.floor(1.5 * available)
    assert (seen <= most).all() and seen.sum() == min(samples, most.sum())
    free = seen < most
    rate = seen / weight
    # Those with room have equally much a weight, and those that are full no more than that.
    if free.any():
        assert (np.abs(rate[free] - rate[free].max()) <= 1 / weight[free].min()).all()
        assert (rate[~free] <= rate[free].max() + 1 / weight.min()).all()


def test_rows_are_copies_of_samples_as_often_as_asked():
    """Prevents: a sample that comes too often or never, by counting rows one by one."""
    lengths = example_lengths(origin_of(MODEL), 301)  # pages has 151, strips 150
    rule = mixture(pages={"epochs": 2.4}, strips={"epochs": 0.3})
    mixed = drawn(lengths, rule, 7)
    times = Counter(mixed.sample.tolist())
    pages = [times[row] for row in range(0, 301, 2)]
    strips = [times[row] for row in range(1, 301, 2)]
    assert sorted(set(pages)) == [2, 3] and sum(pages) == round(2.4 * 151)
    assert sorted(set(strips)) == [0, 1] and sum(strips) == 45
    assert (mixed.tokens == lengths.tokens[mixed.sample]).all()
    assert mixed.repeats
    assert (drawn(lengths, rule, 7).sample == mixed.sample).all()
    assert (drawn(lengths, rule, 8).sample != mixed.sample).any()


TOML = """
most_epochs = 3
[sources.pages]
epochs = 1.5
[sources.strips]
weight = 1
"""


def planned(folder: Path, *options: str) -> Path:
    lengths = example_lengths(origin_of(MODEL))
    longer = lengths.tokens + 500 * (np.arange(len(lengths)) % 30 == 0).astype(np.int32)
    write_lengths(replace(lengths, tokens=longer), folder / "lengths.parquet")
    (folder / "mixture.toml").write_text(TOML)
    arguments = [
        "plan", "--model", "internvl-digits", "--cluster", "laptop-cpu", "--precision", "fp32",
        "--max-tiles", "40", "--max-tokens", "1000", "--micro-batches", "4", "--dp", "2",
        "--lengths", folder / "lengths.parquet", "--mixture", folder / "mixture.toml",
        "-o", folder / "plan", *options,
    ]  # fmt: skip
    app(list(map(str, arguments)), standalone_mode=False)
    return folder / "plan"


@pytest.mark.parametrize(
    "options",
    [(), ("--portion-samples", "130"), ("--packing-levels", "2", "--curriculum-steps", "1")],
)
def test_a_plan_says_what_is_seen_of_each_source(tmp_path, options):
    """Prevents: figures of a mixture that are not those of the packs, by counting each sample."""
    directory = planned(tmp_path, *options)
    seen = read_plan(directory).data.mixture
    files = open_plan(directory)
    packs, lengths = files.steps
    for place, step in enumerate(seen.by_step):
        counted = Counter()
        for pack in range(len(packs)):
            if packs.step[pack] < step:
                counted.update(lengths.source[packs.packs[pack]].tolist())
        assert [counted[0], counted[1]] == [each.seen[place] for each in seen.sources]
    assert seen.by_step[-1] == packs.steps
    assert [each.seen[-1] for each in seen.sources] == [225, 150]
    assert [each.samples for each in seen.sources] == [150, 150]
    said = f"by step {packs.steps:,}: pages 225 samples (1.50 epochs), strips 150 samples (1.00"
    assert any(line.startswith(said) for line in check_plan(directory))
    app(["report", str(directory), "-o", str(tmp_path / "page.html")], standalone_mode=False)
    assert "Times that a source&#39;s samples" in (tmp_path / "page.html").read_text()


def test_steps_that_are_taken_over_stay_a_mixture(tmp_path):
    """Prevents: a plan for other ranks that no longer says what is seen of each source."""
    directory = planned(tmp_path, "--portion-samples", "130")
    options = ("--model", "internvl-digits", "--cluster", "laptop-cpu", "--precision", "fp32")
    out = tmp_path / "one"
    app(["plan", *options, "--steps-of", str(directory), "-o", str(out)], standalone_mode=False)
    assert read_plan(out).parallel.data == 1
    assert read_plan(out).data.mixture == read_plan(directory).data.mixture
    assert any(line.startswith("by step") for line in check_plan(out))


def test_edited_figures_are_refused(tmp_path):
    """Prevents: a plan.json that says something else of a mixture than is trained."""
    directory = planned(tmp_path)
    plan = read_plan(directory)
    mixture = plan.data.mixture
    first = mixture.sources[0].model_copy(update={"seen": (0, *mixture.sources[0].seen[1:])})
    wrong = mixture.model_copy(update={"sources": (first, mixture.sources[1])})
    data = plan.data.model_copy(update={"mixture": wrong})
    write_plan(plan.model_copy(update={"data": data}), directory)
    with pytest.raises(UserError, match=r"data\.mixture says that \[0, .* seen by step"):
        check_plan(directory)


def test_repeated_rows_are_read_as_they_were_written(tmp_path):
    """Prevents: lengths of a mixture that are refused as damaged, or lose which sample is which."""
    mixed = drawn(
        example_lengths(origin_of(MODEL)), mixture(pages={"epochs": 2}, strips={"epochs": 1}), 0
    )
    write_lengths(mixed, tmp_path / "a.parquet")
    again = read_lengths([tmp_path / "a.parquet"])
    assert again.repeats and (again.sample == mixed.sample).all()
    assert again.sha256 == mixed.sha256


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
    """Prevents: a rule that is read as another one, without a word."""
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_mixture(tmp_path / "m.toml")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"web": {"weight": 1}}, "no rule for books, ocr"),
        (
            {name: {"weight": 1} for name in (*NAMES, "boks")},
            "a rule for boks; it must name every source",
        ),
        ({name: {"epochs": 0} for name in NAMES}, "has no sample"),
        ({"samples": 10, **{name: {"epochs": 1} for name in NAMES}}, "10, and .* have 147"),
        ({"samples": 200, **{name: {"epochs": 1} for name in NAMES}}, "200, and .* have 147"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(given, message):
    """Prevents: a source that is forgotten, and a total that nothing comes to."""
    with pytest.raises(UserError, match=message):
        samples_of_sources(mixture(**given), NAMES, AVAILABLE)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({name: {"weight": weight} for name, weight in zip(NAMES, (0.2, 9, 1), strict=True)}, []),
        (
            {"samples": 100, "most_epochs": 2, **{name: {"weight": 1} for name in NAMES}},
            ["most_epochs = 2 limits ocr, whatever the weights are"],
        ),
        (
            {"samples": 1000, "most_epochs": 2, **{name: {"weight": 1} for name in NAMES}},
            ["limits web, books and ocr,", "has 294 samples in place of 1,000"],
        ),
        (
            {"web": {"weight": 1}, "books": {"epochs": 0}, "ocr": {"epochs": 0.05}},
            ["no sample of ocr is seen"],
        ),
    ],
)
def test_what_a_mixture_cannot_be_is_said(given, expected):
    """Prevents: fewer samples than were asked for, or a source that is never seen, without a word;
    with shares counted by hand."""
    said = shortfalls(mixture(**given), NAMES, AVAILABLE)
    assert len(said) == len(expected)
    for sentence, part in zip(said, expected, strict=True):
        assert part in sentence


def test_packs_of_a_mixture_are_of_its_samples(tmp_path, capsys):
    """Prevents: `omnibal pack` that packs every sample once, whatever the mixture says."""
    planned(tmp_path)
    capsys.readouterr()
    files = "lengths.parquet", "--mixture", "mixture.toml", "-o", "packs.parquet"
    given = [str(tmp_path / one) if "." in one else one for one in files]
    limits = ["--max-tiles", "40", "--max-tokens", "1000", "--dp", "2", "--json"]
    app(["pack", *given, *limits], standalone_mode=False)
    assert len(read_packs(tmp_path / "packs.parquet").packs.samples) == 225 + 150


def test_a_limit_is_rounded_once():
    """Prevents: a sample that is lost to 0.29 x 100 = 28.999..., or a note that does not know of
    it."""
    given = mixture(
        samples=1000,
        most_epochs=0.29,
        web={"weight": 1},
        books={"epochs": 0},
        ocr={"epochs": 0},
    )
    assert samples_of_sources(given, NAMES, AVAILABLE).tolist() == [29, 0, 0]
    assert "limits web" in shortfalls(given, NAMES, AVAILABLE)[0]
