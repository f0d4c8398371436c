"""The ablation of the OmniBal paper (Table 7) on real code: what each kind of balance brings.

    python benchmarks/ablation.py [--rounds 24] [--replay-rounds 6] [--only trained|replayed]

Five plans of the same samples, from common practice (random micro-batches of four padded to the
longest, stages of equal parameters, everything recomputed) to the full system, of two models with
the proportions of InternViT-6B and InternLM2-20B:

* trained: two stages in two processes on the digits dataset, its samples read before each step,
  and then once more in a row, read ahead and logged as usual;
* replayed: four stages x two data-parallel ranks of wider layers, stage by stage, on random content
  in the sizes of the two published length files, put together by the schedule (`tools/replay.py`).

In every round each plan takes one step, in alternating order, between them a round of the profiler,
from which all steps are predicted afterwards; ratios are medians over the steps, of which two are
replayed in several rounds. Each turn starts with a little of the same that does not count. Only
full steps count: a balanced epoch's one step with what is left over (often its lightest packs) is
no part of it. Plans are made from a short profile beforehand. Prints the tables and writes
ablation.json and ablation.svg.

Takes three quarters of an hour on two cores. Each finished half stays in work/ablation, and is
measured again with --anew.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from ablation_picture import ShownStep, before_and_after
from ablation_runs import PAIR, Planned, TrainedStep, TrainingData, Workers, ask
from ablation_variants import (
    MODEL_FILE,
    PUBLISHED,
    REPOSITORY,
    WIDE_MODEL_FILE,
    AblationJob,
    Variant,
    full_steps,
    make_variant,
    real_lengths,
)
from numpy.typing import ArrayLike
from rich import box
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from megatron.vlm.measure.profiler import device_name
from megatron.vlm.measure.random_batches import ProfileOptions
from megatron.vlm.measure.stage_replay import MicroBatchTimes
from omnibal.base.errors import EXIT_USER_ERROR, UserError
from omnibal.base.files import read_json_model, write_json_model
from omnibal.base.frozen import Frozen
from omnibal.cost.model import CostModel, pack_features
from omnibal.cost.profile import Profile, read_profile
from omnibal.cost.source import CostSource
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths
from omnibal.data.scan import scan_lengths
from omnibal.data.tokenizer import open_tokenizer
from omnibal.job.plan import plan_sha256
from omnibal.job.replay import (
    ReplayInfo,
    ReplaySummary,
    StageReplay,
    heaviest_rows,
    summarise_replay,
)
from omnibal.model.config import load_cluster, load_model
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.pipeline.prediction import LostTime
from omnibal.pipeline.simulate import SimulatedRows
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.stage_memory import GIB
from omnibal.report.drawing import svg_file
from omnibal.report.formatting import write_ascii

sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts" / "reproduce")]
from paper import layers_of  # noqa: E402

from tools.make_digits_dataset import main as make_digits_dataset  # noqa: E402

STEP_BAR, MEMORY_BAR, PREDICTION_BAR = 0.05, 0.03, 0.10
USUAL_STEPS = 24
"""Of every plan, trained in a row."""
REPLAYED_STEPS = 2
"""Of every plan where nothing is trained, in turn. Stages are replayed one after another while the
machine changes its speed, and a step takes as long as the slowest: composed of single times, it is
the longer the more equal its stages are. So the mean of several rounds counts."""
UPDATES = 3
"""Timed of every plan and stage in a round of replays."""
MIB = 2**20
PRACTICE = {
    Variant.COMMON: "random micro-batches of four padded to the longest, all recomputed",
    Variant.MEMORY: "balanced packs, split and recomputation searched together",
}
"""What the picture says of a plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where and on what the plans are compared."""

    name: str
    model_file: Path
    profiled: tuple[int, int, int]
    """Tiles and tokens of the largest packs that are profiled, and tokens of a sample in them."""
    parallel: Parallel
    layers: tuple[int, int]
    """Of the vision and of the language tower: a quarter or a half of 45 and 48."""
    caps: Caps
    samples_per_step: int
    memory_gib: float
    """Of a process; nine tenths of it may be filled."""
    trained: bool
    common_bar: float
    """Speed over the common practice's, and over the careful practice's."""
    careful_bar: float


LAYOUTS = (
    Layout(
        name="trained",
        model_file=MODEL_FILE,
        profiled=(24, 512, 64),
        parallel=Parallel(pipeline=2),
        layers=(11, 12),
        caps=Caps.of(tiles=10, tokens=300),
        samples_per_step=48,
        memory_gib=0.18,
        trained=True,
        common_bar=1.8,
        careful_bar=1.3,
    ),
    Layout(
        name="replayed",
        model_file=WIDE_MODEL_FILE,
        profiled=(24, 288, 36),
        parallel=Parallel(pipeline=4, data=2),
        layers=(23, 24),
        caps=Caps.of(tiles=15, tokens=144),
        samples_per_step=256,
        memory_gib=0.3,
        trained=False,
        common_bar=2.5,
        careful_bar=1.5,
    ),
)


class Shown(Frozen):
    """The micro-batches of a step's first rank, for the picture; all are [micro-batches][...]."""

    samples: int
    forward_ms: tuple[tuple[float, ...], ...]
    backward_ms: tuple[tuple[float, ...], ...]
    recompute_ms: tuple[tuple[float, ...], ...]
    forward_link_ms: tuple[tuple[float, ...], ...]
    backward_link_ms: tuple[tuple[float, ...], ...]


class Composed(Frozen):
    """Steps put together from measured times of micro-batches."""

    step_ms: tuple[float, ...]
    """Of every step, from the mean times of the rounds that ran it."""
    rounds_ms: tuple[float, ...]
    """Of every round, from its own times."""
    waits: tuple[float, ...]
    """Share of the steps, of every stage."""
    recompute_fraction: float
    lost: LostTime


class Trained(Frozen):
    """Real steps."""

    step_ms: tuple[float, ...]
    """Of every round, of samples that were read before."""
    waits: tuple[float, ...]
    activations_mib: tuple[float, ...]
    """Of every stage at its peak, in the heaviest steps of the run, with random content."""
    usual_step_ms: float
    """The next four are means of steps in a row, read ahead and logged as usual."""
    data_ms: float
    """Waiting for samples; of the stage that waits longest."""
    logging_ms: float
    lost: LostTime
    """Of steps put together from the real ones' forwards, backwards and updates."""


class VariantResult(Frozen):
    """One plan in all rounds."""

    variant: Variant
    stages: str
    micro_batches: float
    """Of a rank in a step, mean."""
    samples: tuple[int, ...]
    """Of every step."""
    predicted_ms: tuple[float, ...]
    replayed: Composed
    trained: Trained | None
    predicted_mib: tuple[float, ...]
    """Of every stage at the run's peak: state, and activations kept for the backward pass."""
    replayed_mib: tuple[float, ...]
    replayed_activations_mib: tuple[float, ...]
    shown: Shown

    @property
    def step_ms(self) -> np.ndarray:
        """As they really were, or as they were put together where nothing was trained."""
        return np.array(self.trained.step_ms if self.trained else self.replayed.step_ms)

    @property
    def rounds_ms(self) -> np.ndarray:
        """As `step_ms`, of every round by itself."""
        return np.array(self.trained.step_ms if self.trained else self.replayed.rounds_ms)

    @property
    def waits(self) -> tuple[float, ...]:
        return self.trained.waits if self.trained else self.replayed.waits

    @property
    def predicted_error(self) -> float:
        return median_error(self.predicted_ms, self.step_ms)


class LayoutResult(Frozen):
    """All plans of a layout."""

    layout: str
    device: str
    samples_per_step: int
    variants: tuple[VariantResult, ...]

    def speed_up(self, variant: VariantResult, over: VariantResult) -> float:
        """Samples per second over another's: the median step."""
        samples = np.array(variant.samples) / np.array(over.samples)
        return float(np.median(samples * over.step_ms / variant.step_ms))

    def usual_speed_up(self, variant: VariantResult, over: VariantResult) -> float:
        """The same of trained steps in a row, samples read and steps logged beside them."""
        rates = [
            np.mean(one.samples[:USUAL_STEPS]) / (trained.usual_step_ms + trained.logging_ms)
            for one in (variant, over)
            if (trained := one.trained) is not None
        ]
        return float(rates[0] / rates[1])

    def speed_up_quartiles(self, variant: VariantResult, over: VariantResult) -> np.ndarray:
        """Of the single rounds. [2]"""
        step = np.arange(len(variant.rounds_ms)) % len(variant.samples)
        samples = np.array(variant.samples)[step] / np.array(over.samples)[step]
        return np.percentile(samples * over.rounds_ms / variant.rounds_ms, [25, 75])

    def predicted_speed_up(self, variant: VariantResult, over: VariantResult) -> float:
        """The same of predicted steps."""
        rates = np.array(variant.samples) / variant.predicted_ms
        return float(np.median(rates / (np.array(over.samples) / over.predicted_ms)))


class AblationResult(Frozen):
    """What ablation.json holds."""

    layouts: tuple[LayoutResult, ...]


def median_error(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Of the median round, as a share of what was measured."""
    return float(np.median(np.array(predicted) / np.array(measured)) - 1)


def prepared_digits(work: Path) -> TrainingData:
    """The digits dataset, made and scanned unless it is there."""
    digits = work / "digits"
    make_digits_dataset(["--output", str(digits)])
    meta, tokenizer = digits / "train" / "meta.json", digits / "tokenizer.model"
    scanned = scan_lengths(
        Annotations.open(meta),
        load_model("internvl-digits"),
        open_tokenizer(tokenizer),
        lambda done: None,
    )
    return TrainingData(meta=meta, tokenizer=tokenizer, lengths=scanned.lengths)


def first_profile(layout: Layout, work: Path) -> Profile:
    """What the plans are made from; measured unless it is there."""
    path = profile_file(layout, work)
    if not path.exists():
        tiles, tokens, tokens_per_sample = layout.profiled
        command = [
            "profile", "--model", layout.model_file, "--max-tiles", tiles, "--max-tokens", tokens,
            "--tokens-per-sample", tokens_per_sample, "--precision", "fp32",
            "--processes", PAIR, "-o", path,
        ]  # fmt: skip
        subprocess.run([sys.executable, "-m", "omnibal", *map(str, command)], check=True)
    return read_profile(path)


def profile_file(layout: Layout, work: Path) -> Path:
    """Where the first profile is kept."""
    return work / f"profile-{layout.name}.json"


def job_of(layout: Layout, lengths: Lengths, profile: Profile) -> AblationJob:
    """What the variants of a layout have in common."""
    model = load_model(str(layout.model_file))
    vision, language = layout.layers
    node = {"memory_gib": layout.memory_gib, "gpus_per_node": layout.parallel.world_size}
    return AblationJob(
        model=model.with_layers(vision=vision, language=language),
        parallel=layout.parallel,
        cluster=load_cluster("laptop-cpu").model_copy(update=node),
        caps=layout.caps,
        samples_per_step=layout.samples_per_step,
        lengths=lengths,
        cost_source=CostSource(profile),
        seed=0,
    )


def planned_variants(job: AblationJob, count: int) -> dict[Variant, Planned]:
    """Every variant's plan, and so many steps of it that the rounds take in turn.

    Raises:
        UserError: one has fewer full steps.
    """
    results = {variant: make_variant(job, variant) for variant in Variant}
    steps = {variant: full_steps(result, variant) for variant, result in results.items()}
    fewest = min(len(own) for own in steps.values())
    if fewest < count:
        raise UserError(f"{count} steps are to be run, and there are {fewest} full ones")
    planned = {}
    for variant, result in results.items():
        assert result.data is not None
        packs, lengths = result.data
        planned[variant] = Planned(
            plan=result.plan,
            packs=packs,
            lengths=lengths,
            steps=steps[variant][:count],
            cost=job.cost,
        )
    return planned


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Round:
    """One step of a variant, everywhere."""

    replayed: list[MicroBatchTimes]
    """Of every stage."""
    update_ms: list[list[float]]
    trained: list[TrainedStep] | None
    """Of both ranks."""


def run_rounds(
    workers: Workers, planned: Mapping[Variant, Planned], rounds: int, trains: bool
) -> dict[Variant, list[Round]]:
    """Everybody in turn, in another order every time."""
    kept: dict[Variant, list[Round]] = {variant: [] for variant in planned}
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for number in progress.track(range(rounds), description="rounds"):
            for variant in _turned(list(planned), number):
                steps = planned[variant].steps
                step = int(steps[number % len(steps)])
                trained = None
                if trains:
                    ask(workers.pair, "load", variant, number)
                    trained = ask(workers.pair, "train", variant, step)
                replayed = workers.replay("replay", variant, step)
                updates = [workers.replay("update_ms", variant) for _ in range(UPDATES)]
                kept[variant].append(Round(replayed=replayed, update_ms=updates, trained=trained))
            ask(workers.pair, "profile")
    return kept


def _turned(variants: list[Variant], number: int) -> list[Variant]:
    """Another first one every round, and every other round backwards."""
    first = number // 2 % len(variants)
    turned = variants[first:] + variants[:first]
    return turned[::-1] if number % 2 else turned


def stage_replays(
    planned: Planned,
    times: Sequence[Sequence[MicroBatchTimes]],
    update_ms: np.ndarray,
    memory: Sequence[tuple[int, int]],
) -> list[StageReplay]:
    """Rounds as replays of every stage.

    Args:
        times: [rounds][stages].
        update_ms: [stages].
        memory: bytes of state and activations of every stage.
    """
    rows = np.concatenate([planned.rows(step) for step in planned.steps])
    return [
        StageReplay(
            stage=stage,
            rows=tuple(rows.tolist()),
            forward_ms=tuple(np.concatenate([one[stage].forward_ms for one in times]).tolist()),
            backward_ms=tuple(np.concatenate([one[stage].backward_ms for one in times]).tolist()),
            recompute_ms=tuple(np.concatenate([one[stage].recompute_ms for one in times]).tolist()),
            update_ms=float(update_ms[stage]),
            state_gib=state / GIB,
            activations_gib=activations / GIB,
            with_working_memory=False,
        )
        for stage, (state, activations) in enumerate(memory)
    ]


def summary_of(planned: Planned, cost: CostModel, replays: Sequence[StageReplay]) -> ReplaySummary:
    """The rounds' steps, put together."""
    info = ReplayInfo(
        plan_sha256=plan_sha256(planned.plan),
        steps=tuple(planned.steps.tolist()),
        repetitions=1,
        content="random",
        device=device_name(),
        processes=PAIR,
    )
    return summarise_replay(info, replays, planned.plan, cost, planned.workload)


def variant_result(
    variant: Variant,
    planned: Planned,
    cost: CostModel,
    rounds: Sequence[Round],
    memory: Sequence[tuple[int, int]],
    trained_bytes: Sequence[int],
    usual: Sequence[Sequence[TrainedStep]],
) -> VariantResult:
    """All that was seen of a variant.

    Args:
        cost: of the profile that was measured between the steps.
        memory: bytes of state and activations of every stage, replayed.
        trained_bytes: of activations, in real steps; empty where nothing was trained, as `usual`.
        usual: the first steps in a row, of both ranks.
    """
    update_ms = np.median([one.update_ms for one in rounds], axis=(0, 1))
    times = mean_times(rounds, len(planned.steps))
    replays = stage_replays(planned, times, update_ms, memory)
    summary = summary_of(planned, cost, replays)
    sizes = np.diff(planned.packs.packs.offsets)
    assert planned.plan.prediction is not None
    stages = planned.plan.prediction.stages
    kept_gib = [replay.predicted_gib(stages[replay.stage].memory) for replay in replays]
    return VariantResult(
        variant=variant,
        stages=layers_of(planned.plan.stages),
        micro_batches=float(
            np.mean([len(planned.rows(step)) for step in planned.steps])
            / planned.plan.parallel.data
        ),
        samples=tuple(int(sizes[planned.rows(step)].sum()) for step in planned.steps),
        predicted_ms=tuple(summary.predicted_each_step_ms.tolist()),
        replayed=Composed(
            step_ms=tuple(summary.each_step_ms.tolist()),
            rounds_ms=tuple(
                round_ms(planned, cost, number, one, update_ms, memory)
                for number, one in enumerate(rounds)
            ),
            waits=tuple(summary.wait_fractions.tolist()),
            recompute_fraction=summary.recompute_fraction,
            lost=summary.lost,
        ),
        trained=(
            trained_result(planned, cost, rounds, memory, trained_bytes, usual) if usual else None
        ),
        predicted_mib=tuple(gib * 1024 for gib in kept_gib),
        replayed_mib=tuple(replay.peak_gib * 1024 for replay in replays),
        replayed_activations_mib=tuple(activations / MIB for _, activations in memory),
        shown=shown_step(planned, cost, summary, times),
    )


def mean_times(rounds: Sequence[Round], steps: int) -> list[list[MicroBatchTimes]]:
    """Of every step and stage, over the rounds that ran it. [steps][stages]"""
    same_step = [[one.replayed for one in rounds[step::steps]] for step in range(steps)]
    return [
        [
            MicroBatchTimes.combined(times, lambda each: np.mean(each, axis=0))
            for times in zip(*own, strict=True)
        ]
        for own in same_step
    ]


def round_ms(
    planned: Planned,
    cost: CostModel,
    number: int,
    one: Round,
    update_ms: np.ndarray,
    memory: Sequence[tuple[int, int]],
) -> float:
    """The step of a round, put together from its own times."""
    run = replace(planned, steps=planned.steps[[number % len(planned.steps)]])
    replays = stage_replays(run, [one.replayed], update_ms, memory)
    return float(summary_of(run, cost, replays).each_step_ms[0])


def trained_result(
    planned: Planned,
    cost: CostModel,
    rounds: Sequence[Round],
    memory: Sequence[tuple[int, int]],
    trained_bytes: Sequence[int],
    usual: Sequence[Sequence[TrainedStep]],
) -> Trained:
    """The real steps of a variant.

    What of a backward recomputes is not told apart in a real step: it is the replay's share.
    """
    trained = [one.trained for one in rounds if one.trained is not None]
    step_ms = np.array([max(rank.step_ms for rank in ranks) for ranks in trained])
    wait_ms = np.array([[stage.wait_ms for stage in ranks[0].stages] for ranks in trained])
    first, _ = usual
    usual_ms = np.mean([max(rank.step_ms for rank in ranks) for ranks in zip(*usual, strict=True)])
    records = [one.stages for one in first]
    data_ms = np.mean([[stage.data_ms for stage in stages] for stages in records], axis=0)
    update_ms = np.mean([[stage.optimizer_ms for stage in stages] for stages in records], axis=0)
    times = [
        [
            replace(
                real.times,
                recompute_ms=again.recompute_ms / again.backward_ms * real.times.backward_ms,
            )
            for real, again in zip(ranks, one.replayed, strict=True)
        ]
        for ranks, one in zip(zip(*usual, strict=True), rounds[: len(first)], strict=True)
    ]
    run = replace(planned, steps=planned.steps[: len(first)])
    return Trained(
        step_ms=tuple(step_ms.tolist()),
        waits=tuple(np.median(wait_ms / step_ms[:, None], axis=0).tolist()),
        activations_mib=tuple(size / MIB for size in trained_bytes),
        usual_step_ms=float(usual_ms),
        data_ms=float(data_ms.max()),
        logging_ms=float(np.mean([one.logging_ms for one in first])),
        lost=summary_of(run, cost, stage_replays(run, times, update_ms, memory)).lost,
    )


def shown_step(
    planned: Planned,
    cost: CostModel,
    summary: ReplaySummary,
    times: Sequence[Sequence[MicroBatchTimes]],
) -> Shown:
    """The replayed step of median time, of its first data-parallel rank.

    Args:
        times: [steps][stages].
    """
    number = int(np.argsort(summary.each_step_ms)[(len(times) - 1) // 2])
    rows = planned.rows(int(planned.steps[number]))
    first = planned.packs.dp_rank[rows] == 0
    features = pack_features(planned.packs.packs.take(rows[first]), planned.lengths, cost.features)
    links = stage_times(cost, planned.plan.stages, features)
    shown = times[number]
    return Shown(
        samples=int(np.diff(planned.packs.packs.offsets)[rows[first]].sum()),
        forward_ms=np.stack([one.forward_ms[first] for one in shown], axis=1).tolist(),
        backward_ms=np.stack([one.backward_ms[first] for one in shown], axis=1).tolist(),
        recompute_ms=np.stack([one.recompute_ms[first] for one in shown], axis=1).tolist(),
        forward_link_ms=links.forward_link_ms.tolist(),
        backward_link_ms=links.backward_link_ms.tolist(),
    )


def measure(
    layout: Layout, job: AblationJob, data: TrainingData | None, rounds: int
) -> LayoutResult:
    """Plan, train and replay a layout's variants."""
    planned = planned_variants(job, rounds if layout.trained else min(rounds, REPLAYED_STEPS))
    tiles, tokens, tokens_per_sample = layout.profiled
    options = ProfileOptions(
        max_tiles=tiles,
        max_tokens=tokens,
        tokens_per_sample=tokens_per_sample,
        layers=4,
        repetitions=rounds,
    )
    workers = Workers((job.spec, options), planned, data)
    try:
        memory, trained_bytes, usual = {}, {}, {}
        for variant, one in planned.items():
            heaviest = [
                heaviest_rows(job.cost, one.plan, stage, one.workload)
                for stage in range(len(one.plan.stages))
            ]
            memory[variant] = [
                max(ask([worker], "memory_bytes", variant, rows)[0] for rows in of_stage)
                for worker, of_stage in zip(workers.stages, heaviest, strict=True)
            ]
            if data is not None:
                steps = {int(one.packs.step[rows[0]]) for of_stage in heaviest for rows in of_stage}
                peaks = [ask(workers.pair, "activation_bytes", variant, step) for step in steps]
                trained_bytes[variant] = np.max(peaks, axis=0).tolist()
        kept = run_rounds(workers, planned, rounds, data is not None)
        if data is not None:
            log = data.meta.parent / "steps.log"
            for variant in planned:
                usual[variant] = ask(workers.pair, "train_as_usual", variant, USUAL_STEPS, log)
        profile = ask(workers.pair, "finished_profile")[0]
    finally:
        workers.end()
    cost = replace(job.spec, cost_source=CostSource(profile)).cost
    return LayoutResult(
        layout=layout.name,
        device=device_name(),
        samples_per_step=layout.samples_per_step,
        variants=tuple(
            variant_result(
                variant,
                one,
                cost,
                kept[variant],
                memory[variant],
                trained_bytes.get(variant, ()),
                usual.get(variant, ()),
            )
            for variant, one in planned.items()
        ),
    )


def table_of(layout: Layout, result: LayoutResult) -> Table:
    """One row a variant."""
    sizes = layout.parallel
    rounds = len(result.variants[0].rounds_ms)
    table = Table(
        title=f"{layout.name}: PP {sizes.pipeline} x DP {sizes.data}, about "
        f"{layout.samples_per_step} samples a step, {rounds} rounds, {result.device}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("", no_wrap=True)
    table.add_column("vision+language layers (recomputed)", no_wrap=True)
    names = [
        "packs",
        "step ms",
        "predicted",
        "speed (quartiles)",
        "predicted",
        "idle",
        "waits of stages, %",
    ]
    names += ["recomputing", "peak MiB of stages", "predicted"]
    names += ["replayed ms"] if layout.trained else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    common = result.variants[0]
    for one in result.variants:
        low, high = result.speed_up_quartiles(one, common)
        cells = [
            one.variant,
            one.stages,
            f"{one.micro_batches:.1f}",
            f"{np.median(one.step_ms):,.0f}",
            f"{one.predicted_error:+.1%}",
            f"x {result.speed_up(one, common):.2f} ({low:.2f}-{high:.2f})",
            f"x {result.predicted_speed_up(one, common):.2f}",
            f"{np.mean(one.waits):.0%}",
            " ".join(f"{100 * wait:.0f}" for wait in one.waits),
            f"{one.replayed.recompute_fraction:.0%}",
            " ".join(f"{mib:.0f}" for mib in one.replayed_mib),
            f"{memory_error(one):+.1%}",
        ]
        if one.trained:
            cells.append(f"{replay_error(one):+.1%}")
        table.add_row(*cells)
    return table


def memory_error(one: VariantResult) -> float:
    """Of the prediction, on the stage where it is largest."""
    errors = np.array(one.predicted_mib) / np.array(one.replayed_mib) - 1
    return float(errors[np.abs(errors).argmax()])


def replay_error(one: VariantResult) -> float:
    """Of replayed steps, beside the real ones of the same rounds."""
    assert one.trained is not None
    return median_error(one.replayed.step_ms, one.trained.step_ms)


def replay_memory_error(one: VariantResult) -> float:
    """Of activations, on the stage where it is largest."""
    assert one.trained is not None
    errors = np.array(one.replayed_activations_mib) / np.array(one.trained.activations_mib) - 1
    return float(errors[np.abs(errors).argmax()])


def lost_table(layout: Layout, result: LayoutResult) -> Table:
    """Where the mean step of every plan goes."""
    table = Table(
        title=f"{layout.name}: where a step's time goes, ms", title_justify="left",
        box=box.SIMPLE_HEAD,
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    shown = result.variants
    columns = [lost_entries(one) for one in shown]
    for one in shown:
        table.add_column(one.variant, justify="right", no_wrap=True)
    for name in columns[0]:
        total = [sum(entries.values()) for entries in columns]
        table.add_row(
            name,
            *(
                f"{entries[name]:,.0f} ({entries[name] / all_:.1%})"
                for entries, all_ in zip(columns, total, strict=True)
            ),
        )
    return table


def lost_entries(one: VariantResult) -> dict[str, float]:
    """By cause, from the ideal up; they add up to the mean step (and what is between two)."""
    if one.trained is None:
        return one.replayed.lost.causes()
    trained = one.trained
    entries = trained.lost.causes()
    entries.pop("communication")  # which is the cost model's
    entries["data"] = trained.data_ms
    rest = trained.usual_step_ms - sum(entries.values())
    return entries | {"communication and rest": rest, "logging": trained.logging_ms}


def verdicts(layout: Layout, result: LayoutResult) -> list[str]:
    """Every bar, and whether it holds."""
    common, careful, full = (
        next(one for one in result.variants if one.variant is variant)
        for variant in (Variant.COMMON, Variant.CAREFUL, Variant.MEMORY)
    )
    lines = [
        verdict(f"speed over {over.variant}", result.speed_up(full, over), bar)
        for over, bar in ((common, layout.common_bar), (careful, layout.careful_bar))
    ]
    errors = [one.predicted_error for one in result.variants]
    lines.append(within("median steps predicted", errors, PREDICTION_BAR))
    if layout.trained:
        speeds = (result.usual_speed_up(full, over) for over in (common, careful))
        lines.append("speed in a row, samples read meanwhile: {:.2f} and {:.2f}".format(*speeds))
        lines.append(
            within(
                "median replayed steps beside real ones",
                map(replay_error, result.variants),
                STEP_BAR,
            )
        )
        lines.append(
            within(
                "replayed activations beside real ones",
                map(replay_memory_error, result.variants),
                MEMORY_BAR,
            )
        )
    return [f"{layout.name}: {line}" for line in lines]


def verdict(name: str, value: float, bar: float) -> str:
    return f"{name}: {value:.2f}; the bar of {bar:g} {'holds' if value >= bar else 'is missed'}"


def within(name: str, errors: Iterable[float], bar: float) -> str:
    worst = max(map(abs, errors))
    return f"{name}: within {worst:.1%}; the bar of {bar:.0%} " + (
        "holds" if worst <= bar else "is missed"
    )


def markdown_of(result: AblationResult) -> str:
    """The README's table."""
    trained, replayed = result.layouts
    lines = [
        "| | trained | predicted | replayed | predicted | replayed: waits | recomputes |",
        "|---|---|---|---|---|---|---|",
    ]
    for real, alone in zip(trained.variants, replayed.variants, strict=True):
        cells = [real.variant.value]
        for layout, one in ((trained, real), (replayed, alone)):
            common = layout.variants[0]
            cells.append(f"{layout.speed_up(one, common):.2f}")
            predicted = layout.predicted_speed_up(one, common)
            cells.append(f"{predicted:.2f}, step {one.predicted_error:+.0%}")
        cells += [f"{np.mean(alone.waits):.0%}", f"{alone.replayed.recompute_fraction:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(result: LayoutResult) -> str:
    """The common practice's step above the full system's, as replayed."""
    first, last = result.variants[0], result.variants[-1]
    title = "One step of each: a pipeline of four stages, before and after"
    return svg_file(before_and_after(title, [_shown(result, first), _shown(result, last)]))


def _shown(result: LayoutResult, one: VariantResult) -> ShownStep:
    times = {name: np.array(value)[..., None] for name, value in one.shown if name.endswith("_ms")}
    rows = SimulatedRows(
        pass_ms=np.stack([times["forward_ms"], times["backward_ms"]]),
        link_ms=np.stack([times["forward_link_ms"], times["backward_link_ms"]]),
        counts=np.array([len(times["forward_ms"])]),
    )
    return ShownStep(
        title=one.variant if one.variant is not Variant.MEMORY else "this project",
        note=f"{PRACTICE[one.variant]}; vision+language layers of the stages: {one.stages}",
        timeline=rows.simulate().of_step(0),
        recompute_ms=times["recompute_ms"][..., 0],
        samples=one.shown.samples,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--replay-rounds", type=int, default=6)
    parser.add_argument("--only", choices=[layout.name for layout in LAYOUTS])
    parser.add_argument("--anew", action="store_true", help="measure what is kept again")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "work" / "ablation")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs")
    given = parser.parse_args()
    try:
        run(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def run(given: argparse.Namespace) -> None:
    """Measure what is not kept, and print and write all."""
    given.work.mkdir(parents=True, exist_ok=True)
    digits = prepared_digits(given.work)
    console, results = Console(width=230), []
    for layout in LAYOUTS:
        if given.only not in (None, layout.name):
            continue
        path = given.work / f"{layout.name}.json"
        if given.anew or not path.exists():
            if given.anew:
                profile_file(layout, given.work).unlink(missing_ok=True)
            data = digits if layout.trained else None
            lengths = digits.lengths
            if not layout.trained:
                lengths = real_lengths(PUBLISHED, load_model(str(layout.model_file)))
            job = job_of(layout, lengths, first_profile(layout, given.work))
            rounds = given.rounds if layout.trained else given.replay_rounds
            write_json_model(measure(layout, job, data, rounds), path)
        result = read_json_model(LayoutResult, path, "remove it to measure again")
        results.append(result)
        console.print(table_of(layout, result))
        console.print(lost_table(layout, result))
        for line in verdicts(layout, result):
            console.print(line)
    if given.only is None:
        both = AblationResult(layouts=tuple(results))
        print(markdown_of(both))
        write_json_model(both, given.output / "ablation.json")
        write_ascii(picture(results[-1]), given.output / "ablation.svg")
        print(f"wrote {given.output}/ablation.json and ablation.svg")


if __name__ == "__main__":
    main()
