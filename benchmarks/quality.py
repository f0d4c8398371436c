"""Whether balance costs quality: the quickstart's model on balanced and on plain batches.

    python benchmarks/quality.py [--seeds 3] [--processes 2] [--samples 4000]

Balanced are the product's packs and steps, planned for three data-parallel ranks with one pack
each, so that all packs of a step are matched. Plain are samples in random order, equally many in
every step, packed in that order under the same caps. Both train the same samples in as many steps
from the same initial weights, each run in one process with one thread, and held-out questions are
asked at even distances. Prints what was reached when, and writes quality.svg and quality.json.

Takes half an hour on two cores. Finished runs stay in work/quality: the same command goes on where
it was stopped.
"""

import argparse
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from megatron.vlm.backend import current_device
from megatron.vlm.inputs.batch import MicroBatchShape, MicroBatchStream
from megatron.vlm.inputs.data import PackDataset, load_batches
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.run.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.evaluate import EvaluationOptions, evaluate
from megatron.vlm.step.train import OptimizationOptions, Trainer, build_trainer, train_step
from omnibal.base.files import atomic, read_json_model, write_json_model
from omnibal.base.frozen import Frozen
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths, read_lengths
from omnibal.data.scan import scan_lengths
from omnibal.data.tokenizer import open_tokenizer
from omnibal.job.check import check_plan
from omnibal.job.job import JobSpec
from omnibal.job.plan import LENGTHS_FILE, PACKS_FILE, read_plan
from omnibal.job.plan_data import SampleData
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanRequest, PlanResult, make_plan
from omnibal.model.config import load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import Packs, ScheduledPacks, read_packs
from omnibal.report.svg import Plot, polyline, rect, text
from omnibal.steps.pack_settings import PackSettings
from omnibal.steps.steps import Steps, deal_steps, size_load

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from tools.make_digits_dataset import main as make_digits_dataset  # noqa: E402

MODEL = "internvl-digits"
RANKS = 3
"""That the balanced steps are planned for, with a pack each."""
CAPS = Caps.of(tiles=12, tokens=448)
EPOCHS = 3
POINTS = 8
"""Evaluations of a run, the last at its end."""
SINGLE = "single"
"""The kind of question about one digit."""
MAX_NEW_TOKENS = 12
"""The longest answer, a page read out, has 11 and the end."""
OPTIMIZATION = OptimizationOptions(
    lr=1e-3, min_lr=5e-5, lr_decay_style="cosine", lr_warmup_fraction=0.05, weight_decay=0.05,
    adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0,
)  # fmt: skip


SHARES = (0.6, 0.8, 0.9)
"""Of single digits answered exactly: how many samples until then."""
TITLE = "Balanced and plain batches: quality over the same samples"
WIDTH, HEIGHT, MARGIN = 1100, 380, 22
STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fdfdfc; --ink: #1d2125; --soft: #565d64; --rule: #dcddda;
  --plain: #c2691c; --balanced: #1c6dab;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15181b; --ink: #e4e6e8; --soft: #a3abb2; --rule: #363c41;
    --plain: #e8995a; --balanced: #5caae6;
  }
}
.paper { fill: var(--paper); }
text { font: 12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums; fill: var(--soft); }
text.title { font-size: 20px; font-weight: 600; fill: var(--ink); }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
line.grid { stroke: var(--rule); stroke-width: 1; }
line.axis { stroke: var(--soft); stroke-width: 1; }
polyline { fill: none; stroke-linejoin: round; }
.balanced { stroke: var(--balanced); }
.plain { stroke: var(--plain); stroke-dasharray: 7 4; }
.mean { stroke-width: 2.4; }
.one { stroke-width: 1; stroke-opacity: 0.45; }
"""


class Batches(StrEnum):
    """Where the samples of a step come from."""

    BALANCED = "balanced"
    PLAIN = "plain"


class Answers(Frozen):
    """To the questions of one kind."""

    correct: int
    questions: int


class Point(Frozen):
    """A moment of a run."""

    samples: int
    """Seen so far."""
    loss: float
    """Mean over the loss tokens since the point before."""
    answers: dict[str, Answers]
    """By kind of question."""

    @property
    def single(self) -> float:
        """Share of single digits that are answered exactly."""
        return self.answers[SINGLE].correct / self.answers[SINGLE].questions

    @property
    def all(self) -> float:
        """Share of all questions that are answered exactly."""
        kinds = self.answers.values()
        return sum(kind.correct for kind in kinds) / sum(kind.questions for kind in kinds)


class Curve(Frozen):
    """A finished run."""

    batches: Batches
    seed: int
    packs_sha256: str
    steps: int
    packs: int
    points: tuple[Point, ...]


class Result(Frozen):
    """All runs: what quality.json holds."""

    curves: tuple[Curve, ...]


def digits_lengths(digits: Path) -> Lengths:
    """Of the training samples."""
    annotations = Annotations.open(digits / "train" / "meta.json")
    tokenizer = open_tokenizer(digits / "tokenizer.model")
    return scan_lengths(annotations, load_model(MODEL), tokenizer, lambda done: None).lengths


def make_plans(folder: Path, lengths: Lengths, seed: int) -> None:
    """Write the seed's balanced and plain plan, each for one process and checked."""
    job = JobSpec(
        model=load_model(MODEL),
        cluster=load_cluster("laptop-cpu"),
        parallel=Parallel(pipeline=1, data=RANKS),
        precision="fp32",
    )
    data = SampleData(
        settings=PackSettings(epochs=EPOCHS, seed=seed),
        lengths=lengths,
        levels=(Level(caps=CAPS),),
        packs_per_step=RANKS,
    ).drawn(job)
    balanced = make_plan(PlanRequest(job=job.sized(Parallel(pipeline=1)), data=data))
    for batches, result in (
        (Batches.BALANCED, balanced),
        (Batches.PLAIN, with_plain_batches(balanced, seed)),
    ):
        save_plan(result, plan_folder(folder, batches, seed))
        check_plan(plan_folder(folder, batches, seed))


def plan_folder(folder: Path, batches: Batches, seed: int) -> Path:
    return folder / "plans" / f"{batches}-{seed}"


def with_plain_batches(balanced: PlanResult, seed: int) -> PlanResult:
    """The same plan with other packs, in as many steps of every epoch."""
    assert balanced.data is not None and balanced.plan.data is not None
    packs, lengths = balanced.data
    first_packs = np.flatnonzero(np.diff(packs.step, prepend=-1))
    steps = plain_steps(lengths, CAPS, np.bincount(packs.epoch[first_packs]).tolist(), seed)
    levels = balanced.plan.pack_levels
    plain = deal_steps(steps, lengths, lambda some: size_load(some, lengths), 1, levels)
    most = int(np.bincount(plain.step).max())
    data = balanced.plan.data.model_copy(
        update={
            "packs_per_step": most,
            "micro_batches_per_step": most,
            "packs": len(plain),
            "packs_sha256": plain.sha256,
            "steps_sha256": steps.sha256,
        }
    )
    plan = balanced.plan.model_copy(
        update={"data": data, "settings_sha256": None, "prediction": None}
    )
    return replace(balanced, plan=plan, data=(plain, lengths))


def plain_steps(lengths: Lengths, caps: Caps, steps_of_epochs: Sequence[int], seed: int) -> Steps:
    """Every epoch in a random order, cut into steps of equally many samples (or one more)."""
    packs: list[list[int]] = []
    step: list[int] = []
    epoch: list[int] = []
    for number, steps in enumerate(steps_of_epochs):
        order = np.random.default_rng([seed, number]).permutation(len(lengths))
        for samples in np.array_split(order, steps):
            drawn = first_fit(lengths, caps, samples.tolist())
            step += [step[-1] + 1 if step else 0] * len(drawn)
            epoch += [number] * len(drawn)
            packs += drawn
    return Steps.of(Packs.from_lists(packs), np.array(step), np.array(epoch, np.int32))


def first_fit(lengths: Lengths, caps: Caps, samples: Iterable[int]) -> list[list[int]]:
    """Packs of the samples: each goes into the first that has room under both caps."""
    packs: list[list[int]] = []
    for sample in samples:
        for pack in packs:
            tiles, tokens = (
                lengths.column("tiles")[[*pack, sample]],
                lengths.tokens[[*pack, sample]],
            )
            if tiles.sum() <= caps["tiles"] and tokens.sum() <= caps["tokens"]:
                pack.append(sample)
                break
        else:
            packs.append([sample])
    return packs


def curve_file(folder: Path, batches: Batches, seed: int) -> Path:
    return folder / "runs" / f"{batches}-{seed}.json"


def finished(folder: Path, batches: Batches, seed: int) -> Curve | None:
    """What an earlier run of the same plan kept."""
    path = curve_file(folder, batches, seed)
    if not path.exists():
        return None
    curve = read_json_model(Curve, path, "remove it to train again")
    plan = read_plan(plan_folder(folder, batches, seed))
    assert plan.data is not None
    return curve if curve.packs_sha256 == plan.data.packs_sha256 else None


def run(folder: Path, batches: Batches, seed: int) -> Curve:
    """Train and evaluate in this process; keeps the result."""
    planned, output = plan_folder(folder, batches, seed), curve_file(folder, batches, seed)
    plan, packs = read_plan(planned), read_packs(planned / PACKS_FILE)
    torch.set_num_threads(1)
    launch = Launch(rank=0, world_size=1, local_rank=0)
    links = initialize_distributed(launch, plan.parallel, seed)
    trainer = build_trainer(plan, links, OPTIMIZATION, steps=packs.steps, seed=seed)
    points = []
    for point in train_and_evaluate(trainer, packs, planned, folder / "digits"):
        points.append(point)
        print(f"{batches}, seed {seed}: {described(point)}", flush=True)
    shut_down_distributed()
    curve = Curve(
        batches=batches,
        seed=seed,
        packs_sha256=packs.sha256,
        steps=packs.steps,
        packs=len(packs),
        points=tuple(points),
    )
    output.parent.mkdir(exist_ok=True)
    write_json_model(curve, output)
    return curve


def described(point: Point) -> str:
    return (
        f"{point.samples:,} samples, loss {point.loss:.3f}, "
        f"single digits {point.single:.1%}, all questions {point.all:.1%}"
    )


def train_and_evaluate(
    trainer: Trainer, packs: ScheduledPacks, planned: Path, digits: Path
) -> Iterator[Point]:
    """The points of a run, as it gets there."""
    tokenizer = open_tokenizer(digits / "tokenizer.model")
    training, heldout = (
        SampleReader(Annotations.open(digits / split / "meta.json"), tokenizer, trainer.plan.model)
        for split in ("train", "heldout")
    )
    lengths, rows = read_lengths([planned / LENGTHS_FILE]), np.arange(len(packs))
    dataset = PackDataset(training, packs, lengths, rows, trainer.plan.stages[0])
    batches = load_batches(dataset, num_workers=0, device=current_device())
    ends = np.linspace(0, packs.steps, POINTS + 1).round().astype(int)
    samples = np.diff(packs.packs.offsets)
    for start, end in pairwise(ends.tolist()):
        loss, loss_tokens = 0.0, 0
        for step in range(start, end):
            shapes = MicroBatchShape.of_rows(packs, np.flatnonzero(packs.step == step))
            result = train_step(trainer, MicroBatchStream(batches=batches, shapes=shapes))
            loss += result.loss * result.loss_tokens
            loss_tokens += result.loss_tokens
        yield Point(
            samples=int(samples[packs.step < end].sum()),
            loss=loss / loss_tokens,
            answers=answers(trainer, heldout, end),
        )


def answers(trainer: Trainer, heldout: SampleReader, step: int) -> dict[str, Answers]:
    """To all held-out questions, by kind."""
    evaluation = evaluate(
        trainer,
        CAPS,
        heldout,
        step,
        EvaluationOptions(samples=len(heldout.annotations), max_new_tokens=MAX_NEW_TOKENS),
        lambda done, total: None,
    )
    return {
        kind.kind: Answers(correct=kind.correct, questions=kind.questions)
        for kind in evaluation.kinds
    }


def run_all(folder: Path, seeds: int, processes: int) -> list[Curve]:
    """All runs, several side by side, each in a process of its own; finished ones are kept."""
    runs = [(folder, batches, seed) for seed in range(seeds) for batches in Batches]
    kept = [finished(*one) for one in runs]
    curves = [curve for curve in kept if curve is not None]
    print(f"{len(curves)} of {len(runs)} runs are finished already", flush=True)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, max_tasks_per_child=1) as pool:
        jobs = [
            pool.submit(run, *one) for one, curve in zip(runs, kept, strict=True) if curve is None
        ]
        for job in as_completed(jobs):
            curves.append(job.result())
            print(f"{len(curves)} of {len(runs)} runs are finished", flush=True)
    return sorted(curves, key=lambda curve: (curve.batches, curve.seed))


def samples_until(curve: Curve, share: float) -> float:
    """Samples seen when single digits are first answered so well, on a straight line between
    points; NaN if they never are."""
    seen = [0, *(point.samples for point in curve.points)]
    reached = [0.0, *(point.single for point in curve.points)]
    for before, after in pairwise(range(len(seen))):
        if reached[after] >= share:
            part = (share - reached[before]) / (reached[after] - reached[before])
            return seen[before] + part * (seen[after] - seen[before])
    return math.nan


FIGURES: dict[str, Callable[[Curve], float]] = {
    **{f"samples to {share:.0%}": partial(samples_until, share=share) for share in SHARES},
    "single digits": lambda curve: curve.points[-1].single,
    "all questions": lambda curve: curve.points[-1].all,
    "loss": lambda curve: curve.points[-1].loss,
    "steps": lambda curve: curve.steps,
    "micro-batches": lambda curve: curve.packs,
}
"""Columns of the table, and what they say of a run."""


def table_of(curves: Sequence[Curve]) -> Table:
    """Mean and spread over the seeds."""
    table = Table(title="Held-out answers, mean and standard deviation over seeds")
    table.add_column("batches")
    for name in FIGURES:
        table.add_column(name, justify="right")
    for batches in Batches:
        own = [curve for curve in curves if curve.batches == batches]
        table.add_row(batches, *(cell([figure(c) for c in own]) for figure in FIGURES.values()))
    return table


def cell(values: Sequence[float]) -> str:
    """Mean and spread of those that are numbers, and how many those are."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return "never"
    mean = statistics.mean(numbers)
    digits = 0 if mean > 10 else 3
    spread = f" +- {statistics.stdev(numbers):,.{digits}f}" if len(numbers) > 1 else ""
    of = f" ({len(numbers)} of {len(values)})" if len(numbers) < len(values) else ""
    return f"{mean:,.{digits}f}{spread}{of}"


def picture(curves: Sequence[Curve]) -> str:
    """The SVG: every run as a thin line, and the mean over seeds."""
    most_loss = max(point.loss for curve in curves for point in curve.points)
    panels: tuple[tuple[str, Callable[[Point], float], float], ...] = (
        ("single digits answered exactly, %", lambda point: 100 * point.single, 100),
        ("all questions answered exactly, %", lambda point: 100 * point.all, 100),
        ("training loss per token", lambda point: point.loss, 1.04 * most_loss),
    )
    parts = [rect(0, 0, WIDTH, HEIGHT, "paper"), text(MARGIN, 34, TITLE, "title")]
    for place, batches in enumerate(Batches):
        x, y = MARGIN + 130 * place, 58
        parts.append(polyline(np.array([x, x + 30]), np.array([y, y]), f"mean {batches}"))
        parts.append(text(x + 38, y + 4, batches))
    seeds = len({curve.seed for curve in curves})
    note = f"thick: mean of {seeds} seeds; thin: each; held-out scans are in no training sample"
    parts.append(text(MARGIN + 270, 62, note))
    width = (WIDTH - 2 * MARGIN) / len(panels)
    most_samples = max(curve.points[-1].samples for curve in curves)
    for place, (name, figure, most) in enumerate(panels):
        plot = Plot.over((0, most_samples), (0, most), width, HEIGHT - 96)
        at = f"{MARGIN + place * width:g} 84"
        drawn = plot.axes("samples seen", name) + lines(curves, figure, plot)
        parts.append(f'<g transform="translate({at})">{drawn}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{TITLE}" '
        f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f"<title>{TITLE}</title>\n<style>{STYLE}</style>\n{''.join(parts)}</svg>\n"
    )


def lines(curves: Sequence[Curve], figure: Callable[[Point], float], plot: Plot) -> str:
    """One figure of all runs over the samples seen, and its means."""
    parts = []
    for batches in Batches:
        own = [
            np.array([(point.samples, figure(point)) for point in curve.points])
            for curve in curves
            if curve.batches == batches
        ]
        parts += [polyline(*on(plot, line), f"one {batches}") for line in own]
        parts.append(polyline(*on(plot, np.mean(own, axis=0)), f"mean {batches}"))
    return "".join(parts)


def on(plot: Plot, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of (samples, value). [points, 2]"""
    return plot.x(points[:, 0]), plot.y(points[:, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="runs side by side")
    parser.add_argument("--samples", type=int, default=4000, help="in an epoch of three")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "work" / "quality")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs")
    arguments = parser.parse_args()
    digits = arguments.work / "digits"
    make_digits_dataset(["--output", str(digits), "--samples", str(arguments.samples)])
    lengths = digits_lengths(digits)
    for seed in range(arguments.seeds):
        make_plans(arguments.work, lengths, seed)
    curves = run_all(arguments.work, arguments.seeds, arguments.processes)
    Console(width=150).print(table_of(curves))
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_json_model(Result(curves=tuple(curves)), arguments.output / "quality.json")
    with atomic(arguments.output / "quality.svg") as temporary:
        temporary.write_text(picture(curves), encoding="ascii")
    print(f"wrote {arguments.output}/quality.svg and quality.json")


if __name__ == "__main__":
    main()
