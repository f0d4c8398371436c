"""The picture of loads against loads worked out here, pack by pack and sample by sample."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from xml.etree import ElementTree

import numpy as np
import pytest
from cli_cases import failure, run
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
from omnibal.report.loads import common_practice, draw_loads, write_loads
from omnibal.steps.pack_settings import PackSettings

pytestmark = pytest.mark.quick

SVG = "{http://www.w3.org/2000/svg}"
LEFT, RIGHT = 92, 1000
ROUNDING = 0.1001
"""Of a difference of two coordinates, which are written to 0.1."""
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
    def svg(self) -> str:
        return draw_loads(self.job, self.data, self.scheduled)

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


def panel(svg: str, side: str) -> ElementTree.Element | None:
    return ElementTree.fromstring(svg).find(f"{SVG}g[@class='panel {side}']")


def bars(drawn: ElementTree.Element, css: str) -> dict[tuple[int, int], tuple[float, float]]:
    """Left end and width of the bar of every (step, rank) that its tip names."""
    found = {}
    for box in drawn.findall(f"{SVG}rect[@class='{css}']"):
        tip = box.findtext(f"{SVG}title")
        step, rank = re.match(r"step ([\d,]+), rank ([\d,]+): ", tip).groups()
        where = int(step.replace(",", "")), int(rank.replace(",", ""))
        assert where not in found
        found[where] = float(box.get("x")), float(box.get("width"))
    return found


def words(drawn: ElementTree.Element) -> list[str]:
    return [element.text for element in drawn.iter(f"{SVG}text")]


def check_bars(svg: str, side: str, loads: np.ndarray, steps: list[int], pixels: float) -> None:
    """Every shown rank computes its load from its step's start and waits for the slowest of all."""
    drawn = panel(svg, side)
    computing, waiting = bars(drawn, side), bars(drawn, "wait")
    ranks = evenly(loads.shape[1], 16)
    assert set(computing) == set(product(steps, ranks))
    start = LEFT
    for step in steps:
        slowest = max(loads[step])
        for rank in ranks:
            left, width = computing[step, rank]
            assert left == pytest.approx(start, abs=ROUNDING)
            assert width == pytest.approx(loads[step, rank] * pixels, abs=ROUNDING)
            rest = (slowest - loads[step, rank]) * pixels
            at, wait = waiting.get((step, rank), (left + width, 0.0))
            assert wait == pytest.approx(rest, abs=ROUNDING)
            assert at + wait == pytest.approx(start + slowest * pixels, abs=2 * ROUNDING)
        start += slowest * pixels
    assert set(waiting) <= set(computing)


@pytest.mark.parametrize(
    ("dp", "micro_batches"), [(4, 2), (1, 4), (40, 1), (3, 60)], ids=lambda value: str(value)
)
def test_bars_are_loads_and_waits(dp: int, micro_batches: int) -> None:
    """Prevents bars of other steps or ranks, panels on two scales, and a wait for shown ranks."""
    shown = case(dp=dp, micro_batches=micro_batches)
    before, after = loads_before(shown)[0], loads_after(shown)
    count = min(24, len(before), len(after))
    steps = {"before": evenly(len(before), count), "after": evenly(len(after), count)}
    ends = [
        sum(max(loads[step]) for step in steps[side])
        for side, loads in (("before", before), ("after", after))
    ]
    pixels = (RIGHT - LEFT) / max(ends)
    check_bars(shown.svg, "before", before, steps["before"], pixels)
    check_bars(shown.svg, "after", after, steps["after"], pixels)


def test_waiting_is_drawn_hatched() -> None:
    """Prevents waits told apart by colour alone, and a guard case in which nobody waits."""
    svg = case().svg
    assert len(bars(panel(svg, "before"), "wait")) > 40
    assert re.search(r"rect\.wait \{ fill: url\(#waiting\)", svg)
    assert ElementTree.fromstring(svg).find(f".//{SVG}pattern[@id='waiting']/{SVG}line") is not None


def test_ranks_not_shown_are_still_waited_for() -> None:
    """Prevents steps that end with the slowest of the shown ranks, and a silent choice of ranks."""
    shown = case(dp=40, micro_batches=1)
    before = loads_before(shown)[0]
    assert any(before[step].argmax() not in evenly(40, 16) for step in range(len(before)))
    assert any("16 of 40 ranks" in word for word in words(panel(shown.svg, "before")))


def key_figures(loads: np.ndarray, samples: int) -> tuple[str, str, float, float]:
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
        written = words(panel(shown.svg, side))
        figures = {label: value for value, label in pairwise(written)}
        straggler, waited, step_ms, per_sample[side] = key_figures(loads, samples)
        assert figures["straggler factor, mean"] == straggler
        assert figures["of rank time waited"] == waited
        assert figures["of tokens are padding"] == f"{100 * pad:.1f} %"
        assert milliseconds_of(figures["per step, mean"]) == pytest.approx(step_ms, rel=6e-3)
        assert float(figures["samples per step, mean"]) == pytest.approx(
            samples / len(loads), rel=6e-4
        )
        label = next(label for label in figures if label.startswith("per sample"))
        assert milliseconds_of(figures[label]) == pytest.approx(per_sample[side], rel=6e-3)
    share = float(re.search(r"per sample, ([\d.]+) of before", shown.svg)[1])
    assert share == pytest.approx(per_sample["after"] / per_sample["before"], rel=6e-3)


def milliseconds_of(written: str) -> float:
    value, unit = written.split()
    return float(value.replace(",", "")) * {"ms": 1, "s": 1000}[unit]


def test_distributions_rise_through_the_sorted_values() -> None:
    """Prevents distributions of shown steps only, swapped sides, and a curve that is mirrored."""
    shown = case()
    loads = {"before": loads_before(shown)[0], "after": loads_after(shown)}
    root = ElementTree.fromstring(shown.svg)
    for name, values_of, lowest in (
        ("straggler", lambda ms: ms.max(axis=1) / ms.mean(axis=1), 1.0),
        ("load", np.ravel, 0.0),
    ):
        values = {side: np.sort(values_of(ms)) for side, ms in loads.items()}
        high = 1.02 * max(v[-1] for v in values.values())
        drawn = root.find(f"{SVG}g[@class='{name}']")
        axis = drawn.find(f"{SVG}line[@class='axis']")
        x_start, x_end, bottom = (float(axis.get(key)) for key in ("x1", "x2", "y1"))
        top = min(float(line.get("y1")) for line in drawn.findall(f"{SVG}line[@class='grid']"))
        for side, ordered in values.items():
            curve = drawn.find(f"{SVG}polyline[@class='{side}']").get("points")
            points = np.array([point.split(",") for point in curve.split()], float)
            pixels = (x_end - x_start) / (high - lowest)
            reached = lowest + (points[:, 0] - x_start) / pixels
            share = (bottom - points[:, 1]) / (bottom - top)
            slack = 0.06 / pixels
            at_most = np.searchsorted(ordered, reached + slack, side="right") / len(ordered)
            below = np.searchsorted(ordered, reached - slack, side="left") / len(ordered)
            assert (below - 0.001 <= share).all()
            assert (share <= at_most + 0.001).all()
            assert reached[-1] == pytest.approx(ordered[-1], abs=slack)


def test_one_rank_has_no_straggler() -> None:
    """Prevents an empty plot where nobody can wait."""
    root = ElementTree.fromstring(case(dp=1).svg)
    assert root.find(f"{SVG}g[@class='straggler']") is None
    assert root.find(f"{SVG}g[@class='load']") is not None


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
    written = " ".join(words(ElementTree.fromstring(shown.svg)))
    for word in (
        "Predicted load of ranks: internvl-digits on laptop-cpu",
        f"900 samples in {len(shown.scheduled)} packs of at most 8 tiles and 512 tokens",
        "4 data-parallel ranks, up to 2 packs each per step",
        "simulated from predicted time",
        "seed 5",
    ):
        assert word in written


def test_names_are_text_whatever_they_hold(tmp_path) -> None:
    """Prevents markup from a name, and a file that no browser opens."""
    write_loads(*parts(case(name=HOSTILE)), tmp_path / "new" / "l.svg")
    written = (tmp_path / "new" / "l.svg").read_bytes()
    root = ElementTree.fromstring(written)
    assert root.find(f".//{SVG}script") is None
    assert "<script>&\"'????\N{SNOWMAN}" in root.findtext(f"{SVG}title")
    assert written.isascii()
    long = ElementTree.fromstring(case(name="n" * 200).svg)
    assert max(map(len, words(long))) <= 160


def parts(shown: Case) -> tuple[JobSpec, SampleData, ScheduledPacks]:
    return shown.job, shown.data, shown.scheduled


def without_tiles() -> Lengths:
    lengths = example_lengths(count=200)
    return Lengths(
        items={"tiles": np.zeros_like(lengths.column("tiles"))},
        tokens=lengths.tokens,
        loss_tokens=lengths.loss_tokens,
        source=lengths.source,
        source_names=lengths.source_names,
        origin=None,
    )


ODD: dict[str, Callable[[], Case]] = {
    "one sample": lambda: case(dp=1, micro_batches=1, lengths=example_lengths(count=1)),
    "one step": lambda: case(dp=2, micro_batches=8, lengths=example_lengths(count=70)),
    "no step before": lambda: case(dp=2, micro_batches=64, lengths=example_lengths(count=40)),
    "no tiles": lambda: case(lengths=without_tiles()),
    "a sample a pack": lambda: case(max_tokens=154),
    "many ranks": lambda: case(dp=100, micro_batches=1),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes_are_drawn_inside_the_picture(name: str) -> None:
    """Prevents division by nothing, boxes outside the picture, and figures that are not numbers."""
    svg = ODD[name]().svg
    root = ElementTree.fromstring(svg)
    assert not re.search(r"\b(nan|inf)\b", svg)
    assert bars(panel(svg, "after"), "after")
    assert (panel(svg, "before") is None) == (name == "no step before")
    assert ("do not make one complete step" in svg) == (name == "no step before")
    for box in root.iter(f"{SVG}rect"):
        assert 0 <= float(box.get("x", 0)) <= 1100 - float(box.get("width")) + ROUNDING
        assert 0 <= float(box.get("y", 0)) <= float(root.get("height"))
    tops = [float(g.get("transform").split()[-1][:-1]) for g in root.findall(f"{SVG}g")]
    assert max(tops) + 220 < float(root.get("height"))


def text_box(element: ElementTree.Element) -> tuple[float, float, float]:
    """Left, right and baseline of a text in a wide font."""
    kind, *anchor = element.get("class").split()
    width = {"title": 12.5, "heading": 9.2, "value": 9.8, "mark": 8.6}.get(kind, 6.8)
    width *= len(element.text)
    left = float(element.get("x")) - width * {"middle": 0.5, "end": 1.0}.get("".join(anchor), 0.0)
    return left, left + width, float(element.get("y"))


@pytest.mark.parametrize(("dp", "samples"), [(16, 900), (1, 6000), (8, 900)])
def test_labels_do_not_touch(dp: int, samples: int) -> None:
    """Prevents numbers of short steps, or names of thin rows, from being drawn over one another."""
    svg = case(dp=dp, micro_batches=1, lengths=example_lengths(count=samples)).svg
    for side in ("before", "after"):
        boxes = [text_box(element) for element in panel(svg, side).iter(f"{SVG}text")]
        assert len(boxes) > 30
        assert all(left >= 0 and right <= 1100 for left, right, _ in boxes)
        for (left, right, y), (other_left, other_right, other_y) in combinations(boxes, 2):
            assert right <= other_left or other_right <= left or abs(y - other_y) >= 11


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
    assert straggler in words(panel(drawn, "after"))


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
