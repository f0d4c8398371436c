"""The OmniBal paper's ablation (Table 7) by training and replays: the gain of each kind of balance.

    python benchmarks/ablation.py [--rounds 24] [--replay-rounds 6] [--only trained|replayed]

Five plans of the same samples, from common practice (random micro-batches of four padded to the
longest, stages of equal parameters, everything recomputed) to the full system, of two models with
the proportions of InternViT-6B and InternLM2-20B:

* trained: two stages in two processes on the digits dataset, with samples read before each step,
  then again in a row, with samples read during steps and a log;
* replayed: four stages x two data-parallel ranks of wider layers, stage by stage, on random content
  with the sizes of two published length files, composed by the schedule (`tools/replay.py`).

In a round, each plan runs a full step after a short warm-up, in rotating order, and the profiler
runs once; its profile predicts all steps afterwards. Ratios are medians over steps. Plans are made
from an earlier, short profile. Prints the tables and writes ablation.json and ablation.svg.

Takes three quarters of an hour on two cores. Each finished half stays in work/ablation until it is
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

from megatron.vlm.measure.profiler import find_device_name
from megatron.vlm.measure.random_batches import ProfileOptions
from megatron.vlm.measure.stage_replay import MicroBatchTimes
from omnibal.base.errors import EXIT_USER_ERROR, UserError
from omnibal.base.files import read_json_model, write_json_model
from omnibal.base.frozen import Frozen
from omnibal.cost.model import CostModel
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
from omnibal.packing.features import pack_features
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
ROW_STEPS = 24  # trained in a row, per plan
# Distinct replayed steps per plan, without training. Stages are replayed one after another, and the
# machine's speed varies. A step composed of single times takes the max over stages, which biases
# it upwards, most with equal stages: so times are means of several rounds.
REPLAYED_STEPS = 2
UPDATES = 3  # timed optimizer updates per plan and stage in a round of replays
MIB = 2**20
PRACTICE = {  # descriptions in the figure
    Variant.COMMON: "random micro-batches of four padded to the longest, all recomputed",
    Variant.MEMORY: "balanced packs, split and recomputation searched together",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A model with its parallel sizes, caps and required speed-ups."""

    name: str
    model_file: Path
    profiled: tuple[int, int, int]  # max tiles, max tokens and tokens per sample of the profile
    parallel: Parallel
    layers: tuple[int, int]  # of vision and language: a quarter or a half of 45 and 48
    caps: Caps
    samples_per_step: int
    memory_gib: float  # per process; nine tenths may be filled
    trained: bool
    common_bar: float  # min speed-up over common practice
    careful_bar: float  # min speed-up over careful practice


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
    """Times of a step's first data-parallel rank, for the figure. [micro-batches][stages]"""

    samples: int
    forward_ms: tuple[tuple[float, ...], ...]
    backward_ms: tuple[tuple[float, ...], ...]
    recompute_ms: tuple[tuple[float, ...], ...]
    forward_link_ms: tuple[tuple[float, ...], ...]
    backward_link_ms: tuple[tuple[float, ...], ...]


class Composed(Frozen):
    """Steps composed by the schedule from measured times of micro-batches."""

    step_ms: tuple[float, ...]  # by step, from mean times of its rounds
    rounds_ms: tuple[float, ...]  # by round, from its own times
    waits: tuple[float, ...]  # idle share of the steps, [stages]
    recompute_fraction: float
    lost: LostTime


class Trained(Frozen):
    """Trained steps."""

    step_ms: tuple[float, ...]  # by round, with samples read before
    waits: tuple[float, ...]
    activations_mib: tuple[float, ...]  # peak by stage, in the run's heaviest steps
    # From here: means of steps in a row, with samples read during steps and a log.
    usual_step_ms: float
    data_ms: float  # waiting for samples, of the stage that waits longest
    logging_ms: float
    lost: LostTime  # of steps composed of the trained forwards, backwards and updates


class VariantResult(Frozen):
    """A plan in all rounds."""

    variant: Variant
    stages: str
    micro_batches: float  # mean per rank and step
    samples: tuple[int, ...]  # by step
    predicted_ms: tuple[float, ...]
    replayed: Composed
    trained: Trained | None
    predicted_mib: tuple[float, ...]  # by stage at the run's peak: state and kept activations
    replayed_mib: tuple[float, ...]
    replayed_activations_mib: tuple[float, ...]
    shown: Shown

    @property
    def step_ms(self) -> np.ndarray:
        """Trained steps, or composed steps without training. [steps]"""
        return np.array(self.trained.step_ms if self.trained else self.replayed.step_ms)

    @property
    def rounds_ms(self) -> np.ndarray:
        """Step time of every round. [rounds]"""
        return np.array(self.trained.step_ms if self.trained else self.replayed.rounds_ms)

    @property
    def waits(self) -> tuple[float, ...]:
        return self.trained.waits if self.trained else self.replayed.waits

    @property
    def predicted_error(self) -> float:
        return median_error(self.predicted_ms, self.step_ms)


class LayoutResult(Frozen):
    """Results of a layout's plans."""

    layout: str
    device: str
    samples_per_step: int
    variants: tuple[VariantResult, ...]

    def speed_up(self, variant: VariantResult, over: VariantResult) -> float:
        """Return samples per second relative to another plan's, as a median over steps."""
        samples = np.array(variant.samples) / np.array(over.samples)
        return float(np.median(samples * over.step_ms / variant.step_ms))

    def row_speed_up(self, variant: VariantResult, over: VariantResult) -> float:
        """Return the speed-up of trained steps in a row, with reading and logging."""
        rates = [
            np.mean(result.samples[:ROW_STEPS]) / (trained.usual_step_ms + trained.logging_ms)
            for result in (variant, over)
            if (trained := result.trained) is not None
        ]
        return float(rates[0] / rates[1])

    def speed_up_quartiles(self, variant: VariantResult, over: VariantResult) -> np.ndarray:
        """Return the quartiles of the speed-up over rounds. [2]"""
        step = np.arange(len(variant.rounds_ms)) % len(variant.samples)
        samples = np.array(variant.samples)[step] / np.array(over.samples)[step]
        return np.percentile(samples * over.rounds_ms / variant.rounds_ms, [25, 75])

    def predicted_speed_up(self, variant: VariantResult, over: VariantResult) -> float:
        """Return the speed-up of predicted steps."""
        rates = np.array(variant.samples) / variant.predicted_ms
        return float(np.median(rates / (np.array(over.samples) / over.predicted_ms)))


class AblationResult(Frozen):
    """Content of ablation.json."""

    layouts: tuple[LayoutResult, ...]


def median_error(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Return the median relative error."""
    return float(np.median(np.array(predicted) / np.array(measured)) - 1)


def prepare_digits(work: Path) -> TrainingData:
    """Return the digits dataset, made if missing, and scanned."""
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
    """Return the profile for plans; measure it if missing."""
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
    return work / f"profile-{layout.name}.json"


def job_of(layout: Layout, lengths: Lengths, profile: Profile) -> AblationJob:
    """Return the settings of all variants of a layout."""
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
    """Return every variant's plan with its first `count` full steps.

    Raises:
        UserError: a variant has fewer full steps.
    """
    results = {variant: make_variant(job, variant) for variant in Variant}
    # Incomplete steps do not count: a balanced epoch's has often its lightest packs.
    steps = {variant: full_steps(result, variant) for variant, result in results.items()}
    available = min(map(len, steps.values()))
    if available < count:
        raise UserError(f"{count} steps are to be run, and a plan has {available} full steps")
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
    """A step of a variant, replayed and trained."""

    replayed: list[MicroBatchTimes]  # [stages]
    update_ms: list[list[float]]  # [updates][stages]
    trained: list[TrainedStep] | None  # [ranks]


def run_rounds(
    workers: Workers, planned: Mapping[Variant, Planned], rounds: int, trains: bool
) -> dict[Variant, list[Round]]:
    """Run a step of every variant in every round."""
    results: dict[Variant, list[Round]] = {variant: [] for variant in planned}
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for number in progress.track(range(rounds), description="rounds"):
            for variant in rotate_variants(list(planned), number):
                steps = planned[variant].steps
                step = int(steps[number % len(steps)])
                trained = None
                if trains:
                    ask(workers.pair, "load", variant, number)
                    trained = ask(workers.pair, "train", variant, step)
                replayed = workers.replay("replay", variant, step)
                updates = [workers.replay("update_ms", variant) for _ in range(UPDATES)]
                round_ = Round(replayed=replayed, update_ms=updates, trained=trained)
                results[variant].append(round_)
            ask(workers.pair, "profile")
    return results


def rotate_variants(variants: list[Variant], number: int) -> list[Variant]:
    """Return the order of a round: rotated every second round, reversed every other."""
    first = number // 2 % len(variants)
    rotated = variants[first:] + variants[:first]
    return rotated[::-1] if number % 2 else rotated


def stage_replays(
    planned: Planned,
    times: Sequence[Sequence[MicroBatchTimes]],
    update_ms: np.ndarray,
    memory: Sequence[tuple[int, int]],
) -> list[StageReplay]:
    """Return replays of every stage.

    Args:
        times: [steps][stages].
        update_ms: [stages].
        memory: bytes of state and of activations, [stages].
    """

    def join(stage: int, name: str) -> tuple[float, ...]:
        return tuple(np.concatenate([getattr(step[stage], name) for step in times]).tolist())

    rows = np.concatenate([planned.rows(step) for step in planned.steps])
    return [
        StageReplay(
            stage=stage,
            rows=tuple(rows.tolist()),
            forward_ms=join(stage, "forward_ms"),
            backward_ms=join(stage, "backward_ms"),
            recompute_ms=join(stage, "recompute_ms"),
            update_ms=float(update_ms[stage]),
            state_gib=state / GIB,
            activations_gib=activations / GIB,
            with_working_memory=False,
        )
        for stage, (state, activations) in enumerate(memory)
    ]


def summary_of(planned: Planned, cost: CostModel, replays: Sequence[StageReplay]) -> ReplaySummary:
    """Return the steps composed of replays of all stages."""
    info = ReplayInfo(
        plan_sha256=plan_sha256(planned.plan),
        steps=tuple(planned.steps.tolist()),
        repetitions=1,
        content="random",
        device=find_device_name(),
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
    row: Sequence[Sequence[TrainedStep]],
) -> VariantResult:
    """Return the results of a variant.

    Args:
        cost: of the profile measured between the steps.
        memory: replayed bytes of state and of activations, [stages].
        trained_bytes: of activations in trained steps, [stages]; empty without training.
        row: steps trained in a row, [ranks][steps]; empty without training.
    """
    update_ms = np.median([result.update_ms for result in rounds], axis=(0, 1))
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
                round_ms(planned, cost, number, result, update_ms, memory)
                for number, result in enumerate(rounds)
            ),
            waits=tuple(summary.wait_fractions.tolist()),
            recompute_fraction=summary.recompute_fraction,
            lost=summary.lost,
        ),
        trained=(
            trained_result(planned, cost, rounds, memory, trained_bytes, row) if row else None
        ),
        predicted_mib=tuple(gib * 1024 for gib in kept_gib),
        replayed_mib=tuple(replay.peak_gib * 1024 for replay in replays),
        replayed_activations_mib=tuple(activations / MIB for _, activations in memory),
        shown=shown_step(planned, cost, summary, times),
    )


def mean_times(rounds: Sequence[Round], steps: int) -> list[list[MicroBatchTimes]]:
    """Return mean times over the rounds of every step. [steps][stages]"""
    # Round k runs step k % steps.
    by_step = [[result.replayed for result in rounds[step::steps]] for step in range(steps)]
    return [
        [
            MicroBatchTimes.combine(times, lambda values: np.mean(values, axis=0))
            for times in zip(*step, strict=True)
        ]
        for step in by_step
    ]


def round_ms(
    planned: Planned,
    cost: CostModel,
    number: int,
    result: Round,
    update_ms: np.ndarray,
    memory: Sequence[tuple[int, int]],
) -> float:
    """Return the step time of a round, composed of its own times."""
    run = replace(planned, steps=planned.steps[[number % len(planned.steps)]])
    replays = stage_replays(run, [result.replayed], update_ms, memory)
    return float(summary_of(run, cost, replays).each_step_ms[0])


def trained_result(
    planned: Planned,
    cost: CostModel,
    rounds: Sequence[Round],
    memory: Sequence[tuple[int, int]],
    trained_bytes: Sequence[int],
    row: Sequence[Sequence[TrainedStep]],
) -> Trained:
    """Return the trained steps of a variant."""
    trained = [result.trained for result in rounds if result.trained is not None]
    step_ms = np.array([max(rank.step_ms for rank in ranks) for ranks in trained])
    wait_ms = np.array([[stage.wait_ms for stage in ranks[0].stages] for ranks in trained])
    first, _ = row  # every rank has the records of all stages
    row_ms = np.mean([max(rank.step_ms for rank in ranks) for ranks in zip(*row, strict=True)])
    records = [step.stages for step in first]
    data_ms = np.mean([[stage.data_ms for stage in stages] for stages in records], axis=0)
    update_ms = np.mean([[stage.optimizer_ms for stage in stages] for stages in records], axis=0)
    # A trained backward is timed with its recomputation: take the share of the replay.
    times = [
        [
            replace(
                step.times,
                recompute_ms=replay.recompute_ms / replay.backward_ms * step.times.backward_ms,
            )
            for step, replay in zip(ranks, result.replayed, strict=True)
        ]
        for ranks, result in zip(zip(*row, strict=True), rounds[: len(first)], strict=True)
    ]
    run = replace(planned, steps=planned.steps[: len(first)])
    return Trained(
        step_ms=tuple(step_ms.tolist()),
        waits=tuple(np.median(wait_ms / step_ms[:, None], axis=0).tolist()),
        activations_mib=tuple(size / MIB for size in trained_bytes),
        usual_step_ms=float(row_ms),
        data_ms=float(data_ms.max()),
        logging_ms=float(np.mean([step.logging_ms for step in first])),
        lost=summary_of(run, cost, stage_replays(run, times, update_ms, memory)).lost,
    )


def shown_step(
    planned: Planned,
    cost: CostModel,
    summary: ReplaySummary,
    times: Sequence[Sequence[MicroBatchTimes]],
) -> Shown:
    """Return the first data-parallel rank of the median replayed step; `times` [steps][stages]."""
    number = int(np.argsort(summary.each_step_ms)[(len(times) - 1) // 2])
    rows = planned.rows(int(planned.steps[number]))
    first = planned.packs.dp_rank[rows] == 0
    features = pack_features(planned.packs.packs.take(rows[first]), planned.lengths, cost.features)
    links = stage_times(cost, planned.plan.stages, features)
    stages = times[number]
    return Shown(
        samples=int(np.diff(planned.packs.packs.offsets)[rows[first]].sum()),
        forward_ms=np.stack([stage.forward_ms[first] for stage in stages], axis=1).tolist(),
        backward_ms=np.stack([stage.backward_ms[first] for stage in stages], axis=1).tolist(),
        recompute_ms=np.stack([stage.recompute_ms[first] for stage in stages], axis=1).tolist(),
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
        memory, trained_bytes, rows_trained = {}, {}, {}
        for variant, run in planned.items():
            heaviest = [  # one or two rank steps per stage, each as rows of packs
                heaviest_rows(job.cost, run.plan, stage, run.workload)
                for stage in range(len(run.plan.stages))
            ]
            memory[variant] = [
                max(ask([worker], "memory_bytes", variant, rows)[0] for rows in rank_steps)
                for worker, rank_steps in zip(workers.stages, heaviest, strict=True)
            ]
            if data is not None:
                steps = {int(run.packs.step[rows[0]]) for stage in heaviest for rows in stage}
                peaks = [ask(workers.pair, "activation_bytes", variant, step) for step in steps]
                trained_bytes[variant] = np.max(peaks, axis=0).tolist()
        results = run_rounds(workers, planned, rounds, data is not None)
        if data is not None:
            log = data.meta.parent / "steps.log"
            for variant in planned:
                rows_trained[variant] = ask(workers.pair, "train_row", variant, ROW_STEPS, log)
        profile = ask(workers.pair, "finished_profile")[0]
    finally:
        workers.end()
    cost = replace(job.spec, cost_source=CostSource(profile)).cost
    return LayoutResult(
        layout=layout.name,
        device=find_device_name(),
        samples_per_step=layout.samples_per_step,
        variants=tuple(
            variant_result(
                variant,
                run,
                cost,
                results[variant],
                memory[variant],
                trained_bytes.get(variant, ()),
                rows_trained.get(variant, ()),
            )
            for variant, run in planned.items()
        ),
    )


def table_of(layout: Layout, result: LayoutResult) -> Table:
    """Return a table with a row per variant."""
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
    names = ["packs", "step ms", "predicted", "speed (quartiles)", "predicted", "idle"]
    names += ["idle by stage, %", "recomputing", "peak MiB by stage", "predicted"]
    names += ["replayed ms"] if layout.trained else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    common = result.variants[0]
    for run in result.variants:
        low, high = result.speed_up_quartiles(run, common)
        cells = [
            run.variant,
            run.stages,
            f"{run.micro_batches:.1f}",
            f"{np.median(run.step_ms):,.0f}",
            f"{run.predicted_error:+.1%}",
            f"x {result.speed_up(run, common):.2f} ({low:.2f}-{high:.2f})",
            f"x {result.predicted_speed_up(run, common):.2f}",
            f"{np.mean(run.waits):.0%}",
            " ".join(f"{100 * wait:.0f}" for wait in run.waits),
            f"{run.replayed.recompute_fraction:.0%}",
            " ".join(f"{mib:.0f}" for mib in run.replayed_mib),
            f"{largest_error(run.predicted_mib, run.replayed_mib):+.1%}",
        ]
        if run.trained:
            cells.append(f"{replay_error(run):+.1%}")
        table.add_row(*cells)
    return table


def largest_error(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Return the relative error with the largest absolute value."""
    errors = np.array(predicted) / np.array(measured) - 1
    return float(errors[np.abs(errors).argmax()])


def replay_error(result: VariantResult) -> float:
    """Return the error of replayed steps against trained steps of the same rounds."""
    assert result.trained is not None
    return median_error(result.replayed.step_ms, result.trained.step_ms)


def replay_memory_error(result: VariantResult) -> float:
    """Return the largest error of replayed activations against trained steps."""
    assert result.trained is not None
    return largest_error(result.replayed_activations_mib, result.trained.activations_mib)


def lost_table(layout: Layout, result: LayoutResult) -> Table:
    """Return a table of the mean step's time by cause."""
    table = Table(
        title=f"{layout.name}: step time by cause, ms", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("", no_wrap=True)
    columns = [lost_entries(run) for run in result.variants]
    totals = [sum(entries.values()) for entries in columns]
    for run in result.variants:
        table.add_column(run.variant, justify="right", no_wrap=True)
    for name in columns[0]:
        table.add_row(
            name,
            *(
                f"{entries[name]:,.0f} ({entries[name] / total:.1%})"
                for entries, total in zip(columns, totals, strict=True)
            ),
        )
    return table


def lost_entries(result: VariantResult) -> dict[str, float]:
    """Return ms by cause, from the ideal time on; the sum is the mean step with its logging."""
    if result.trained is None:
        return result.replayed.lost.causes()
    trained = result.trained
    entries = trained.lost.causes()
    entries.pop("communication")  # predicted, not measured
    entries["data"] = trained.data_ms
    remainder = trained.usual_step_ms - sum(entries.values())
    return entries | {"communication and rest": remainder, "logging": trained.logging_ms}


def verdicts(layout: Layout, result: LayoutResult) -> list[str]:
    """Return a line per bar: whether it holds."""
    by_variant = {run.variant: run for run in result.variants}
    common, careful = by_variant[Variant.COMMON], by_variant[Variant.CAREFUL]
    full = by_variant[Variant.MEMORY]
    lines = [
        verdict(f"speed over {over.variant}", result.speed_up(full, over), bar)
        for over, bar in ((common, layout.common_bar), (careful, layout.careful_bar))
    ]
    errors = [run.predicted_error for run in result.variants]
    lines.append(within("median steps predicted", errors, PREDICTION_BAR))
    if layout.trained:
        speeds = (result.row_speed_up(full, over) for over in (common, careful))
        lines.append("speed in a row, with reading and logging: {:.2f} and {:.2f}".format(*speeds))
        errors = list(map(replay_error, result.variants))
        lines.append(within("median replayed steps against trained", errors, STEP_BAR))
        errors = list(map(replay_memory_error, result.variants))
        lines.append(within("replayed activations against trained", errors, MEMORY_BAR))
    return [f"{layout.name}: {line}" for line in lines]


def verdict(name: str, value: float, bar: float) -> str:
    return f"{name}: {value:.2f}; the bar of {bar:g} {'holds' if value >= bar else 'is missed'}"


def within(name: str, errors: Iterable[float], bar: float) -> str:
    worst = max(map(abs, errors))
    return f"{name}: within {worst:.1%}; the bar of {bar:.0%} " + (
        "holds" if worst <= bar else "is missed"
    )


def markdown_of(result: AblationResult) -> str:
    """Return the README's table."""
    trained, replayed = result.layouts
    lines = [
        "| | trained | predicted | replayed | predicted | replayed: waits | recomputes |",
        "|---|---|---|---|---|---|---|",
    ]
    for train, replay in zip(trained.variants, replayed.variants, strict=True):
        cells = [train.variant.value]
        for layout, run in ((trained, train), (replayed, replay)):
            common = layout.variants[0]
            cells.append(f"{layout.speed_up(run, common):.2f}")
            predicted = layout.predicted_speed_up(run, common)
            cells.append(f"{predicted:.2f}, step {run.predicted_error:+.0%}")
        cells += [f"{np.mean(replay.waits):.0%}", f"{replay.replayed.recompute_fraction:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(result: LayoutResult) -> str:
    """Return an SVG of replayed steps of common practice and of the full system."""
    steps = [make_shown_step(run) for run in (result.variants[0], result.variants[-1])]
    title = "One step of each: a pipeline of four stages, before and after"
    return svg_file(before_and_after(title, steps))


def make_shown_step(run: VariantResult) -> ShownStep:
    # A last axis for steps: [micro-batches, stages, 1]
    times = {name: np.array(value)[..., None] for name, value in run.shown if name.endswith("_ms")}
    rows = SimulatedRows(
        pass_ms=np.stack([times["forward_ms"], times["backward_ms"]]),
        link_ms=np.stack([times["forward_link_ms"], times["backward_link_ms"]]),
        counts=np.array([len(times["forward_ms"])]),
    )
    return ShownStep(
        title=run.variant if run.variant is not Variant.MEMORY else "this project",
        note=f"{PRACTICE[run.variant]}; vision+language layers of the stages: {run.stages}",
        timeline=rows.simulate().of_step(0),
        recompute_ms=times["recompute_ms"][..., 0],
        samples=run.shown.samples,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--replay-rounds", type=int, default=6)
    parser.add_argument("--only", choices=[layout.name for layout in LAYOUTS])
    parser.add_argument("--anew", action="store_true", help="measure finished halves again")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "work" / "ablation")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs")
    given = parser.parse_args()
    try:
        run(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def run(given: argparse.Namespace) -> None:
    """Measure unfinished halves, and print and write all results."""
    given.work.mkdir(parents=True, exist_ok=True)
    digits = prepare_digits(given.work)
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
        ablation = AblationResult(layouts=tuple(results))
        print(markdown_of(ablation))
        write_json_model(ablation, given.output / "ablation.json")
        write_ascii(picture(results[-1]), given.output / "ablation.svg")
        print(f"wrote {given.output}/ablation.json and ablation.svg")


if __name__ == "__main__":
    main()
