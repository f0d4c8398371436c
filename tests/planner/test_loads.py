"""The picture of loads against loads worked out here, pack by pack and sample by sample."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from xml.etree import ElementTree

import numpy as np
import pytest
from cli_cases import failure, run
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plan_cases import MODEL, example_lengths

from omnibal.cost.model import pack_features
from omnibal.data.lengths import Lengths, write_lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.model.config import load_cluster
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import Packs, ScheduledPacks, read_packs
from omnibal.report.drawing import svg_file
from omnibal.report.formatting import write_ascii
from omnibal.report.loads import common_practice, compare_loads, draw_loads
from omnibal.steps.pack_settings import PackSettings

pytestmark = pytest.mark.quick

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>&\"'\x00\x1b\ud800\ufffe" + "\N{SNOWMAN}" * 3
PACK = "pack --max-tiles 8 --max-tokens 512 --dp 2 --model internvl-digits --no-bound"


@dataclass(frozen=True, kw_only=True)
class Case:
    job: JobSpec
    data: SampleData
    scheduled: ScheduledPacks

    @property
    def lengths(self) -> Lengths:
        return self.data.lengths

    @property
    def sides(self) -> list[str]:
        return [*compare_loads(self.job, self.data, self.scheduled)]

    @cached_property
    def figure(self) -> Figure:
        return draw_loads(self.job, self.data, self.scheduled)

    @property
    def svg(self) -> str:
        return svg_file(self.figure)

    @property
    def dp(self) -> int:
        return self.job.parallel.data


def case(
    dp: int = 4,
    micro_batches: int = 2,
    lengths: Lengths | None = None,
    name: str = MODEL.name,
    max_tokens: int = 512,
) -> Case:
    lengths = example_lengths(count=900) if lengths is None else lengths
    cluster = load_cluster("laptop-cpu")
    job = JobSpec(
        model=MODEL.model_copy(update={"name": name}),
        cluster=cluster.model_copy(update={"name": name}) if name == HOSTILE else cluster,
        parallel=Parallel(pipeline=1, data=dp),
        precision="fp32",
    )
    data = SampleData(
        lengths=lengths,
        settings=PackSettings(packing=PackingMethod.ISF, seed=5),
        levels=(Level(caps=Caps.of(tiles=8, tokens=max_tokens)),),
        packs_per_step=dp * micro_batches,
    )
    return Case(job=job, data=data, scheduled=data.schedule(job)[0])


def micro_batch_ms(shown: Case, samples: list[int], padded: bool) -> float:
    """Forward and backward of all the model's units, added one by one."""
    tokens = [int(shown.lengths.tokens[sample]) for sample in samples]
    if padded:
        tokens = [max(tokens)] * len(tokens)
    tiles = sum(int(shown.lengths.column("tiles")[sample]) for sample in samples)
    loss_tokens = sum(int(shown.lengths.loss_tokens[sample]) for sample in samples)
    features = [1, tiles, sum(tokens), sum(count * count for count in tokens), loss_tokens]
    total = 0.0
    for unit, cost in shown.job.cost.units.items():
        tower = {"vision_layer": MODEL.vision.layers, "language_layer": MODEL.language.layers}
        for vector in (cost.forward_ms, cost.backward_ms):
            total += tower.get(unit, 1) * sum(f * c for f, c in zip(features, vector, strict=True))
    return total


def loads_after(shown: Case) -> np.ndarray:
    packs = shown.scheduled
    loads = np.zeros((int(packs.step.max()) + 1, shown.dp))
    for row in range(len(packs)):
        ms = micro_batch_ms(shown, packs.packs[row].tolist(), padded=False)
        loads[packs.step[row], packs.dp_rank[row]] += ms
    return loads


def loads_before(shown: Case) -> tuple[np.ndarray, int, float]:
    """Loads, samples of them all, and the mean share of padding; one sample after the other."""
    count = max(1, round(len(shown.lengths) / len(shown.scheduled)))
    dp, micro_batches = shown.dp, shown.data.packs_per_step // shown.dp
    order = iter(np.random.default_rng(5).permutation(len(shown.lengths)).tolist())
    steps = len(shown.lengths) // (count * dp * micro_batches)
    loads, padding = np.zeros((steps, dp)), []
    for step, rank, _ in product(range(steps), range(dp), range(micro_batches)):
        samples = [next(order) for _ in range(count)]
        loads[step, rank] += micro_batch_ms(shown, samples, padded=True)
        tokens = shown.lengths.tokens[samples]
        padding.append(1 - tokens.sum() / (len(tokens) * tokens.max()))
    return loads, steps * count * dp * micro_batches, float(np.mean(padding)) if padding else 0.0


def evenly(count: int, at_most: int) -> list[int]:
    shown = min(count, at_most)
    return [round(i * (count - 1) / max(shown - 1, 1)) for i in range(shown)]


def panels(shown: Case) -> dict[str, Axes]:
    """Axes of every side, by the side."""
    return dict(zip(shown.sides, shown.figure.axes, strict=False))


def check_bars(axes: Axes, loads: np.ndarray, steps: list[int]) -> None:
    """Every shown rank computes its load from its step's start and waits for the slowest of all."""
    ranks = evenly(loads.shape[1], 16)
    assert len(axes.containers) == 2 * len(ranks)
    for rank, computing, waiting in zip(
        ranks, axes.containers[::2], axes.containers[1::2], strict=True
    ):
        start = 0.0
        for step, bar, wait in zip(steps, computing, waiting, strict=True):
            slowest = max(loads[step])
            assert bar.get_x() == pytest.approx(start)
            assert bar.get_width() == pytest.approx(loads[step, rank])
            assert wait.get_x() == pytest.approx(start + loads[step, rank])
            assert wait.get_x() + wait.get_width() == pytest.approx(start + slowest)
            assert wait.get_hatch()
            start += slowest
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [f"rank {rank}" for rank in ranks]


@pytest.mark.parametrize(
    ("dp", "micro_batches"), [(4, 2), (1, 4), (40, 1), (3, 60)], ids=lambda value: str(value)
)
def test_bars_are_loads_and_waits(dp: int, micro_batches: int) -> None:
    """Prevents bars of other steps or ranks, panels on two scales, and a wait for shown ranks."""
    shown = case(dp=dp, micro_batches=micro_batches)
    before, after = loads_before(shown)[0], loads_after(shown)
    count = min(24, len(before), len(after))
    steps = {"before": evenly(len(before), count), "after": evenly(len(after), count)}
    drawn = panels(shown)
    check_bars(drawn["before"], before, steps["before"])
    check_bars(drawn["after"], after, steps["after"])
    assert drawn["before"].get_xlim() == drawn["after"].get_xlim()


def test_ranks_not_shown_are_still_waited_for() -> None:
    """Prevents steps that end with the slowest of the shown ranks, and a silent choice of ranks."""
    shown = case(dp=40, micro_batches=1)
    before = loads_before(shown)[0]
    assert any(before[step].argmax() not in evenly(40, 16) for step in range(len(before)))
    assert "16 of 40 ranks" in panels(shown)["before"].get_xlabel()


def expected_figures(loads: np.ndarray, samples: int) -> tuple[str, str, float, float]:
    slowest = [max(row) for row in loads]
    straggler = sum(top / (sum(row) / len(row)) for top, row in zip(slowest, loads, strict=True))
    waited = sum(top - load for top, row in zip(slowest, loads, strict=True) for load in row)
    return (
        f"{straggler / len(loads):.4f}",
        f"{100 * waited / (loads.shape[1] * sum(slowest)):.1f} %",
        sum(slowest) / len(slowest),
        sum(slowest) / samples,
    )


def test_key_figures() -> None:
    """Prevents figures over the shown steps alone, or of the other side."""
    shown = case()
    before, trained, padding = loads_before(shown)
    after = loads_after(shown)
    assert len(after) > 24
    per_sample = {}
    for side, loads, samples, pad in (
        ("before", before, trained, padding),
        ("after", after, len(shown.lengths), 0.0),
    ):
        straggler, waited, step_ms, per_sample[side] = expected_figures(loads, samples)
        written = panels(shown)[side].get_title("left")
        assert f"straggler factor {straggler}; {waited} of rank time waited" in written
        assert f"{100 * pad:.1f} % padding" in written
        per_step = re.search(r"([\d.]+) samples and ([\d.]+ m?s) per step; (.*) per", written)
        assert float(per_step[1]) == pytest.approx(samples / len(loads), rel=6e-4)
        assert milliseconds_of(per_step[2]) == pytest.approx(step_ms, rel=6e-3)
        assert milliseconds_of(per_step[3]) == pytest.approx(per_sample[side], rel=6e-3)
    share = float(re.search(r"per sample, ([\d.]+) of before", written)[1])
    assert share == pytest.approx(per_sample["after"] / per_sample["before"], rel=6e-3)


def milliseconds_of(written: str) -> float:
    value, unit = written.split()
    return float(value.replace(",", "")) * {"ms": 1, "s": 1000}[unit]


def test_distributions_rise_through_the_sorted_values() -> None:
    """Prevents distributions of shown steps only, swapped sides, and a curve that is mirrored."""
    shown = case()
    loads = {"before": loads_before(shown)[0], "after": loads_after(shown)}
    *_, straggler, load = shown.figure.axes
    for axes, values_of in (
        (straggler, lambda ms: ms.max(axis=1) / ms.mean(axis=1)),
        (load, np.ravel),
    ):
        for line in axes.lines:
            ordered = np.sort(values_of(loads[line.get_label()]))
            reached, share = line.get_xdata(), line.get_ydata() / 100
            at_most = np.searchsorted(ordered, reached * (1 + 1e-9), side="right") / len(ordered)
            below = np.searchsorted(ordered, reached * (1 - 1e-9), side="left") / len(ordered)
            assert (below - 1e-9 <= share).all()
            assert (share <= at_most + 1e-9).all()
            assert reached[-1] == pytest.approx(ordered[-1])


def test_common_practice_is_a_plain_loop() -> None:
    """Prevents padding across micro-batches, padded tiles, and a last step of fewer samples."""
    lengths = example_lengths(count=101)
    weights = np.array([3.0, 5.0, 0.25, 0.001, 0.5])
    order = np.random.default_rng(11).permutation(101)
    at, expected = 0, []
    while at + 3 * 4 * 2 <= 101:
        ranks = []
        for _ in range(4):
            load = 0.0
            for _ in range(2):
                members = order[at : at + 3]
                at += 3
                longest = int(max(lengths.tokens[i] for i in members))
                tiles = int(sum(lengths.column("tiles")[i] for i in members))
                load += 3 + 5 * tiles + 0.25 * 3 * longest + 0.001 * 3 * longest**2
                load += 0.5 * sum(int(lengths.loss_tokens[i]) for i in members)
            ranks.append(load)
        expected.append(ranks)

    def load(packs: Packs, padded: Lengths) -> np.ndarray:
        return (
            pack_features(
                packs, padded, ("fixed", "tiles", "tokens", "squared_tokens", "loss_tokens")
            )
            @ weights
        )

    given = common_practice(lengths, 3, 4, 2, 11, load)
    assert given.samples == 96
    np.testing.assert_allclose(given.compute_ms, expected)
    other = common_practice(lengths, 3, 4, 2, 12, load)
    assert not np.allclose(given.compute_ms, other.compute_ms)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_common_practice_of_too_few_samples_is_none(samples: int) -> None:
    """Prevents a failure, or an incomplete step that looks fast."""
    lengths = example_lengths(count=samples)
    assert common_practice(lengths, 2, 2, 1, 0, lambda packs, _: pytest.fail("no step")) is None


def test_title_says_what_is_shown() -> None:
    """Prevents a picture without its model, device, caps or size, or taken for a measurement."""
    shown = case()
    for word in (
        "Predicted load of ranks: internvl-digits on laptop-cpu",
        f"900 samples in {len(shown.scheduled)} packs of at most 8 tiles and 512 tokens",
        "4 data-parallel ranks, up to 2 packs each per step",
        "Simulated from predicted time",
        "seed 5",
    ):
        assert word in words(shown)


def words(shown: Case) -> str:
    """All text of the picture."""
    root = ElementTree.fromstring(shown.svg)
    return " ".join(element.text for element in root.iter(f"{SVG}text"))


def test_names_are_text_whatever_they_hold(tmp_path) -> None:
    """Prevents markup from a name, and a file that no browser opens."""
    write_ascii(case(name=HOSTILE).svg, tmp_path / "new" / "l.svg")
    written = (tmp_path / "new" / "l.svg").read_bytes()
    root = ElementTree.fromstring(written)
    assert root.find(f".//{SVG}script") is None
    assert "<script>&\"'????\N{SNOWMAN}" in root.findtext(f"{SVG}title")
    assert written.isascii()
    assert len(case(name="n" * 200).figure.get_suptitle()) <= 90


def without_tiles() -> Lengths:
    lengths = example_lengths(count=200)
    return replace(lengths, items={"tiles": 0 * lengths.column("tiles")})


ODD: dict[str, Callable[[], Case]] = {
    "one sample": lambda: case(dp=1, micro_batches=1, lengths=example_lengths(count=1)),
    "one step": lambda: case(dp=2, micro_batches=8, lengths=example_lengths(count=70)),
    "no step before": lambda: case(dp=2, micro_batches=64, lengths=example_lengths(count=40)),
    "no tiles": lambda: case(lengths=without_tiles()),
    "a sample a pack": lambda: case(max_tokens=154),
    "many ranks": lambda: case(dp=100, micro_batches=1),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes_are_drawn(name: str) -> None:
    """Prevents division by nothing, and figures that are not numbers."""
    shown = ODD[name]()
    assert not re.search(r"\b(nan|inf)\b", shown.svg)
    assert ("before" in shown.sides) == (name != "no step before")
    assert ("do not make one complete step" in words(shown)) == (name == "no step before")
    *_, straggler, load = shown.figure.axes
    assert all(np.isfinite(line.get_xdata()).all() for line in [*straggler.lines, *load.lines])


def test_equal_inputs_give_equal_bytes() -> None:
    """Prevents pictures that differ although nothing did."""
    assert case().svg == case().svg


def test_command_draws_its_own_schedule(capsys, tmp_path) -> None:
    """Prevents a picture of other packs than those written, and an option that does nothing."""
    write_lengths(example_lengths(), tmp_path / "l.parquet")
    picture, packs = tmp_path / "new/l.svg", tmp_path / "packs.parquet"
    run(f"{PACK} --cluster laptop-cpu", tmp_path / "l.parquet", "-o", packs, "--picture", picture)
    scheduled = read_packs(packs)
    drawn = picture.read_text("ascii")
    assert f"300 samples in {len(scheduled)} packs" in drawn
    straggler = re.search(r"straggler factor +([\d.]+)", capsys.readouterr().out)[1]
    after = drawn.split("After: packed")[1].split("</text>")[1]
    assert f"straggler factor {straggler};" in after


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("l.png", "--picture must name a file ending in .svg"),
        (".", "is a directory; --picture must name a file"),
        ("l.parquet/l.svg", "is not a directory; choose another --picture"),
    ],
)
def test_picture_that_cannot_be_written_is_found_first(
    capsys, tmp_path, monkeypatch, name: str, expected: str
) -> None:
    """Prevents packing for minutes towards a picture that has no place."""
    write_lengths(example_lengths(), tmp_path / "l.parquet")
    monkeypatch.setattr("omnibal.cli.pack.read_lengths", lambda paths: pytest.fail("worked first"))
    assert expected in failure(capsys, PACK, tmp_path / "l.parquet", "--picture", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["l.parquet"]
