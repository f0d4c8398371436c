"""The picture of loads, against loads computed here pack by pack and sample by sample."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from xml.etree import ElementTree

import numpy as np
import pytest
from cli_cases import failure, printed
from length_cases import make_lengths
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plan_cases import JOB, MODEL, example_lengths, job_spec

from omnibal.data.lengths import Lengths, write_lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import ScheduledPacks, read_packs
from omnibal.report.drawing import svg_file
from omnibal.report.formatting import write_ascii
from omnibal.report.loads import compare_loads, draw_loads

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
    def dp(self) -> int:
        return self.job.parallel.data

    @property
    def sides(self) -> list[str]:
        return [*compare_loads(self.job, self.data, self.scheduled)]

    @cached_property
    def figure(self) -> Figure:
        return draw_loads(self.job, self.data, self.scheduled)

    @property
    def panels(self) -> dict[str, Axes]:
        """Axes, keyed by side."""
        return dict(zip(self.sides, self.figure.axes, strict=False))

    @cached_property
    def svg(self) -> str:
        return svg_file(self.figure)

    @property
    def picture_text(self) -> str:
        """All text of the picture."""
        root = ElementTree.fromstring(self.svg)
        return " ".join(element.text for element in root.iter(f"{SVG}text"))


def case(
    dp: int = 4,
    micro_batches: int = 2,
    lengths: Lengths | None = None,
    name: str = MODEL.name,
    max_tokens: int = 512,
) -> Case:
    lengths = example_lengths(count=900) if lengths is None else lengths
    cluster = JOB["cluster"].model_copy(update={"name": name} if name == HOSTILE else {})
    model = MODEL.model_copy(update={"name": name})
    job = job_spec(model=model, cluster=cluster, parallel=Parallel(pipeline=1, data=dp))
    data = SampleData(
        lengths=lengths,
        settings=PackSettings(packing=PackingMethod.ISF, seed=5),
        levels=(Level(caps=Caps.of(tiles=8, tokens=max_tokens)),),
        packs_per_step=dp * micro_batches,
    )
    return Case(job=job, data=data, scheduled=data.schedule(job)[0])


@pytest.fixture(scope="module")
def default_case() -> Case:
    return case()


def micro_batch_ms(shown: Case, samples: list[int], padded: bool) -> float:
    """Return forward and backward time, summed over the model's units."""
    tokens = shown.lengths.tokens[samples].astype(int)
    if padded:
        tokens[:] = tokens.max()
    tiles, loss_tokens = (shown.lengths.column(n)[samples].sum() for n in ("tiles", "loss_tokens"))
    features = [1, tiles, tokens.sum(), (tokens**2).sum(), loss_tokens]
    layers = {"vision_layer": MODEL.vision.layers, "language_layer": MODEL.language.layers}
    units = shown.job.cost.units
    both_ms = {name: units[name].forward_ms + units[name].backward_ms for name in units}
    return sum(layers.get(name, 1) * float(ms @ features) for name, ms in both_ms.items())


def loads_after(shown: Case) -> np.ndarray:
    packs = shown.scheduled
    loads = np.zeros((packs.steps, shown.dp))
    for row, (step, rank) in enumerate(zip(packs.step, packs.dp_rank, strict=True)):
        loads[step, rank] += micro_batch_ms(shown, packs.packs[row].tolist(), padded=False)
    return loads


def loads_before(shown: Case) -> tuple[np.ndarray, int, float]:
    """Return loads of unpacked steps, their number of samples and the mean share of padding."""
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


def even_indices(count: int, at_most: int) -> list[int]:
    shown = min(count, at_most)
    return [round(i * (count - 1) / max(shown - 1, 1)) for i in range(shown)]


def check_bars(axes: Axes, loads: np.ndarray, steps: list[int]) -> None:
    """Check that shown ranks compute from their step's start, then wait for the slowest rank."""
    ranks = even_indices(loads.shape[1], 16)
    assert len(axes.containers) == 2 * len(ranks)
    bars = axes.containers
    for rank, computing, waiting in zip(ranks, bars[::2], bars[1::2], strict=True):
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
    """Prevents bars of other steps or ranks, panels on two scales, and omitted waits."""
    shown = case(dp=dp, micro_batches=micro_batches)
    before, after = loads_before(shown)[0], loads_after(shown)
    count = min(24, len(before), len(after))
    steps = {"before": even_indices(len(before), count), "after": even_indices(len(after), count)}
    drawn = shown.panels
    check_bars(drawn["before"], before, steps["before"])
    check_bars(drawn["after"], after, steps["after"])
    assert drawn["before"].get_xlim() == drawn["after"].get_xlim()
    if dp == 40:  # Ranks that are not shown are waited for, and counted.
        assert not set(before.argmax(axis=1)) <= set(even_indices(dp, 16))
        assert "16 of 40 ranks" in drawn["before"].get_xlabel()


def test_key_figures(default_case: Case) -> None:
    """Prevents figures of shown steps only, or of the wrong side."""
    before, trained, padding = loads_before(default_case)
    after = loads_after(default_case)
    assert len(after) > 24
    per_sample = {}
    for side, loads, samples, pad in (
        ("before", before, trained, padding),
        ("after", after, len(default_case.lengths), 0.0),
    ):
        slowest = loads.max(axis=1)
        straggler = np.mean(slowest / loads.mean(axis=1))
        waited = 1 - loads.mean(axis=1).sum() / slowest.sum()
        per_sample[side] = slowest.sum() / samples
        written = default_case.panels[side].get_title("left")
        figures = f"straggler factor {straggler:.4f}; {100 * waited:.1f} % of rank time waited"
        assert figures in written and f"{100 * pad:.1f} % padding" in written
        per_step = re.search(r"([\d.]+) samples and ([\d.]+ m?s) per step; (.*) per", written)
        assert float(per_step[1]) == pytest.approx(samples / len(loads), rel=6e-4)
        assert milliseconds_of(per_step[2]) == pytest.approx(slowest.mean(), rel=6e-3)
        assert milliseconds_of(per_step[3]) == pytest.approx(per_sample[side], rel=6e-3)
    share = float(re.search(r"per sample, ([\d.]+) of before", written)[1])
    assert share == pytest.approx(per_sample["after"] / per_sample["before"], rel=6e-3)


def milliseconds_of(written: str) -> float:
    value, unit = written.split()
    return float(value.replace(",", "")) * {"ms": 1, "s": 1000}[unit]


def test_distributions_rise_through_the_sorted_values(default_case: Case) -> None:
    """Prevents distributions of shown steps only, swapped sides, and mirrored curves."""
    loads = {"before": loads_before(default_case)[0], "after": loads_after(default_case)}
    *_, straggler, load = default_case.figure.axes
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


def test_title_says_what_is_shown(default_case: Case) -> None:
    """Prevents a picture without its job, mistaken for a measurement, or different each time."""
    for word in (
        "Predicted load of ranks: internvl-digits on laptop-cpu",
        f"900 samples in {len(default_case.scheduled)} packs of at most 8 tiles and 512 tokens",
        "4 data-parallel ranks, up to 2 packs each per step",
        "Simulated from predicted time",
        "seed 5",
    ):
        assert word in default_case.picture_text
    assert case().svg == default_case.svg


def test_names_are_text_whatever_they_hold(tmp_path) -> None:
    """Prevents markup from a name, and a file that no browser opens."""
    write_ascii(case(name=HOSTILE).svg, tmp_path / "new" / "l.svg")
    written = (tmp_path / "new" / "l.svg").read_bytes()
    root = ElementTree.fromstring(written)
    assert root.find(f".//{SVG}script") is None
    assert "<script>&\"'????\N{SNOWMAN}" in root.findtext(f"{SVG}title")
    assert written.isascii()
    assert len(case(name="n" * 200).figure.get_suptitle()) <= 90


ODD: dict[str, Callable[[], Case]] = {
    "one sample": lambda: case(dp=1, micro_batches=1, lengths=example_lengths(count=1)),
    "one step": lambda: case(dp=2, micro_batches=8, lengths=example_lengths(count=70)),
    "no step before": lambda: case(dp=2, micro_batches=64, lengths=example_lengths(count=40)),
    "no tiles": lambda: case(lengths=make_lengths([(0, size) for size in range(40, 240)])),
    "a sample a pack": lambda: case(max_tokens=154),
    "many ranks": lambda: case(dp=100, micro_batches=1),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes_are_drawn(name: str) -> None:
    """Prevents division by zero, and NaN or infinite figures."""
    shown = ODD[name]()
    assert not re.search(r"\b(nan|inf)\b", shown.svg)
    assert ("before" in shown.sides) == (name != "no step before")
    assert ("do not make one complete step" in shown.picture_text) == (name == "no step before")
    *_, straggler, load = shown.figure.axes
    assert all(np.isfinite(line.get_xdata()).all() for line in [*straggler.lines, *load.lines])


def test_command_draws_its_own_schedule(capsys, tmp_path) -> None:
    """Prevents a picture of other packs than were written, and an ignored option."""
    write_lengths(example_lengths(), tmp_path / "l.parquet")
    picture, packs = tmp_path / "new/l.svg", tmp_path / "packs.parquet"
    options = tmp_path / "l.parquet", "-o", packs, "--picture", picture
    told = printed(capsys, f"{PACK} --cluster laptop-cpu", *options)
    drawn = picture.read_text("ascii")
    assert f"300 samples in {len(read_packs(packs))} packs" in drawn
    straggler = re.search(r"straggler factor +([\d.]+)", told)[1]
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
def test_picture_without_a_place_is_found_first(capsys, tmp_path, monkeypatch, name, expected):
    """Prevents packing for minutes before a picture path is refused."""
    write_lengths(example_lengths(), tmp_path / "l.parquet")
    monkeypatch.setattr(
        "omnibal.cli.pack_command.read_lengths", lambda paths: pytest.fail("worked first")
    )
    assert expected in failure(capsys, PACK, tmp_path / "l.parquet", "--picture", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["l.parquet"]
