"""Parts of a proof, in order. Each adds figures to the context as it measures them."""

import importlib.util
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from pydantic import JsonValue

from omnibal.cost.analytic import unit_flops
from omnibal.cost.profile import fit_residuals, read_profile
from omnibal.job.check import open_plan
from omnibal.job.fake_replay import Roofline, read_fake_stages
from omnibal.job.job import JobSpec
from omnibal.job.plan_files import PlanFiles
from omnibal.job.replay import REPLAY_FILES, StageReplay
from omnibal.job.runlog import RUN_FILE, StepRecord, latest_step, read_run
from omnibal.model.config import load_cluster, load_model
from omnibal.model.units import feature_names
from omnibal.packing.features import pack_features
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.unit_runs import unit_counts
from scripts.gpu_proof.running import Context, Part, PartEndedError, Until

_TESTED = re.compile(r"^(PASSED|FAILED|SKIPPED) (\w+) (.+)$", re.MULTILINE)
_PRECISION = "bf16"
_CLUSTER = "h100-80g"  # preset to plan with; --cluster-output adds measured rates to it
_SMALL_MODEL = "internvl-digits"
_SMALL = f"--model {_SMALL_MODEL} --max-tiles 12 --max-tokens 448"
# Programs of all parts, for Python or a shell.
_COMMANDS = {
    "tests": "tests/training/cuda_checks.py {out}/tests",
    "digits": ("tools/make_digits_dataset.py --output {data} --samples 600 --heldout-samples 10"),
    "train_lengths": (
        f"-m omnibal lengths {{data}}/train/meta.json --model {_SMALL_MODEL} "
        "--tokenizer-model {data}/tokenizer.model -o {out}/train/lengths.parquet"
    ),
    "train_profile": (
        f"-m omnibal profile {_SMALL} --precision {_PRECISION} "
        "--lengths {out}/train/lengths.parquet --repetitions 5 -o {out}/train/profile.json"
    ),
    "train_plan": (
        f"-m omnibal plan {_SMALL} --precision {{precision}} --cluster {_CLUSTER} "
        "--lengths {out}/train/lengths.parquet --micro-batches 3 --epochs 20 "
        "-o {out}/train/{precision}"
    ),
    "train": (
        "scripts/train_nodes.sh 1 0 localhost {out}/train/{precision} {data}/train/meta.json "
        "{data}/tokenizer.model {out}/train/{run} --train-iters {settings.trained_steps} "
        "--num-workers 2"
    ),
    "lengths": "tools/make_lengths.py --samples {settings.samples} -o {out}/lengths.parquet",
    "plan": (
        f"-m omnibal plan --model {{settings.model}} --cluster {_CLUSTER} --precision {_PRECISION} "
        "--max-tiles {settings.max_tiles} --max-tokens {settings.max_tokens} "
        "--micro-batches {settings.micro_batches} -o {out}/plan"
    ),
    "replay": "tools/replay.py {out}/plan -o {out}/replay --stages {stage}",
    "checkpoint": "tests/training/large_checkpoint.py {out}/checkpoint {settings.checkpoint_gib}",
    "profile": (
        f"-m omnibal profile --model {{model}} --precision {_PRECISION} "
        "--max-tiles {settings.max_tiles} --max-tokens {settings.max_tokens} "
        "--tokens-per-sample {settings.tokens_per_sample} --layers 2 --repetitions 5 "
        f"--cluster {_CLUSTER} --cluster-output {{out}}/cluster.toml -o {{out}}/profile.json"
    ),
}
_WARM_UP = 3  # untimed first steps, which compile and choose kernels
_STOPPED_AFTER = 3
_ROUNDING = {"bf16": 0.02, "fp8": 0.1}  # max relative difference of losses, by precision


def _run(
    context: Context,
    command: str,
    *more: object,
    log: str = "",
    until: Until | None = None,
    **fields: object,
) -> Path:
    """Run a program of `_COMMANDS`, and return its log."""
    fields |= {"out": context.output, "data": _data(context), "settings": context.settings}
    words = [word.format(**fields) for word in _COMMANDS[command].split()]
    return context.run(log or command, *words, *more, until=until)


def tests(context: Context) -> None:
    """Check the trainer and fused operations on the device, in one process."""
    try:
        _run(context, "tests")
    finally:
        output = (context.output / "logs" / "tests.txt").read_text(errors="replace")
        context.figures.update(checks_of(output))


def checks_of(output: str) -> dict[str, JsonValue]:
    """Return results in the output of cuda_checks.py, by name of the check."""
    return {name: f"{result.lower()} in {how}" for result, name, how in _TESTED.findall(output)}


def profile(context: Context) -> None:
    """Measure layers, matrix products and a copy, and write a cluster file of the rates."""
    model = _SMALL_MODEL if context.on_fake_device else context.settings.model
    _run(context, "profile", model=model)
    measured = read_profile(context.output / "profile.json")
    assert measured.rates is not None
    rates = [  # TFLOP/s
        2e-9 * product.rows * product.inner * product.outer / product.time_ms(None)
        for product in measured.rates.products
    ]
    residuals = fit_residuals(measured, load_model(model))
    times = [residual for residual in residuals if "_ms" in residual.quantity]
    cluster = load_cluster(_CLUSTER)
    context.figures.update(
        fastest_tflops=max(rates),
        slowest_tflops=min(rates),
        worst_median_fit_error=max(residual.median_error for residual in times),
    )
    if context.on_fake_device:
        return
    assumed_tflops = cluster.tflops(measured.precision) * cluster.matmul_efficiency
    context.compare("matrix products", "TFLOP/s", assumed_tflops, median(rates))
    copies = max(1e-6 * copy.bytes_per_ms for copy in measured.rates.copies)
    context.compare("copies", "GB/s", cluster.memory_gb_per_s, copies)
    _compare_with_rates(context)


def _compare_with_rates(context: Context) -> None:
    """Predict the replayed stages again, by the measured rates."""
    if not (context.output / "replay").exists():
        return
    files = open_plan(context.output / "plan")
    job = replace(files.job, cluster=load_cluster(str(context.output / "cluster.toml")))
    for replay in REPLAY_FILES.read_stages(context.output / "replay", len(files.plan.stages)):
        predicted, measured = predicted_ms(files, job, replay), computed_ms(replay)
        context.compare(f"stage {replay.stage} by these rates", "ms", predicted, measured)


def replay(context: Context) -> None:
    """Replay stages of a plan for many devices, most informative first."""
    settings, output = context.settings, context.output
    lengths: tuple[object, ...] = ()
    if settings.samples:
        _run(context, "lengths")
        lengths = ("--lengths", output / "lengths.parquet")
    _run(context, "plan", *settings.sizes, *lengths)
    files = open_plan(output / "plan")
    context.figures["plan"] = f"{files.plan.model.name}, {files.plan.parallel}"
    for stage in settings.replayed:
        fake = ["--fake-device"] if context.on_fake_device else ["--steps", 1, "--repetitions", 2]
        _run(context, "replay", *fake, log=f"replay_{stage}", stage=stage)
        _compare_stage(context, files, stage)


def _compare_stage(context: Context, files: PlanFiles, stage: int) -> None:
    """Add measured or counted figures of a stage, with predictions."""
    folder, plan, name = context.output / "replay", files.plan, f"stage {stage}"
    if context.on_fake_device:
        [counted] = [fake for fake in read_fake_stages(folder, plan) if fake.stage == stage]
        rates = Roofline.of_cluster(plan.cluster, plan.precision)
        assert counted.predicted_gib is not None, "the plan predicts its stages"
        context.compare(name, "GiB", counted.predicted_gib, counted.allocated_gib)
        context.figures[f"{name} kernels"] = counted.kernels
        context.figures[f"{name} element-wise share"] = counted.element_wise_share(rates)
        return
    replays = REPLAY_FILES.read_stages(folder, len(plan.stages))
    [measured] = [replay for replay in replays if replay.stage == stage]
    own_ms = computed_ms(measured)
    features = _features(files, measured, feature_names(plan.model))
    flops = stage_flops(files, stage, features) / plan.parallel.tensor
    predicted_gib = measured.predicted_gib(plan.known_prediction.stages[stage].memory)
    context.compare(name, "ms", predicted_ms(files, files.job, measured), own_ms)
    context.compare(name, "GiB", predicted_gib, measured.peak_gib)
    # Per tensor-parallel rank, over computing time, without FLOPs of recomputation.
    mfu = flops / (1e-3 * own_ms) / (1e12 * plan.cluster.tflops(plan.precision))
    context.figures[f"{name} MFU"] = mfu


def computed_ms(measured: StageReplay) -> float:
    """Return the measured time of a stage's forwards and backwards."""
    return sum(measured.forward_ms) + sum(measured.backward_ms)


def predicted_ms(files: PlanFiles, job: JobSpec, measured: StageReplay) -> float:
    """Return predicted ms of the replayed packs, without tensor-parallel links."""
    # The replay runs alone: infinitely fast links, and no measured collectives.
    fast = {"intra_node_gb_per_s": 1e18, "inter_node_gb_per_s": 1e18}
    rates = {
        precision: table.model_copy(update={"collectives": ()})
        for precision, table in job.cluster.rates.items()
    }
    alone = replace(job, cluster=job.cluster.model_copy(update=fast | {"rates": rates}))
    features = _features(files, measured, alone.cost.features)
    times = stage_times(alone.cost, files.plan.stages, features)
    both = times.forward_ms + times.backward_ms
    return float(both[:, measured.stage].sum())


def stage_flops(files: PlanFiles, stage: int, features: np.ndarray) -> float:
    """Return FLOPs of a stage over all tensor-parallel ranks; `features` [packs, features]."""
    job = files.job
    flops = unit_flops(job.model, job.frozen, job.adapters)
    counts = unit_counts(job.cost.kinds, files.plan.stages[stage].units)
    per_feature = sum(
        int(count) * flops[kind.name] for kind, count in zip(job.cost.kinds, counts, strict=True)
    )
    return float((features @ per_feature).sum())


def _features(files: PlanFiles, measured: StageReplay, names: Sequence[str]) -> np.ndarray:
    """Return features of the replayed packs. [packs, features]"""
    packs, lengths = files.steps
    return pack_features(packs.packs, lengths, names)[list(measured.rows)]


def train(context: Context) -> None:
    """Train the quickstart's model by the launcher, stop, and resume."""
    settings, folder = context.settings, context.output / "train"
    folder.mkdir(parents=True, exist_ok=True)
    if context.digits is None:
        _run(context, "digits")
    _run(context, "train_lengths")
    _run(context, "train_profile")
    _plan_training(context, _PRECISION, "--profile", folder / "profile.json")
    log = folder / "run" / RUN_FILE

    def has_begun() -> bool:
        return log.exists() and log.read_bytes().count(b"\n") >= _STOPPED_AFTER

    _train(context, "run", _PRECISION, until=has_begun)
    stopped = latest_step(log.parent)
    _train(context, "run", _PRECISION)
    records = read_run(log)
    context.figures.update(
        stopped_after=stopped,
        first_loss=records[0].loss,
        last_loss=records[-1].loss,
        mfu=median(step.mfu for step in _timed_steps(records)),
    )
    prediction = open_plan(folder / _PRECISION).plan.known_prediction
    context.compare("step", "ms", prediction.step_ms, _step_ms(records))
    if not context.on_fake_device:
        peak_gib = records[-1].stages[0].peak_gib
        context.compare("step", "GiB", prediction.stages[0].memory.peak_gib, peak_gib)
    steps = settings.trained_steps
    if not 0 < (stopped or 0) < steps or [step.step for step in records] != list(range(steps)):
        reason = f"stopped after {stopped} of {steps} steps, and {len(records)} are logged"
        raise PartEndedError("failed", reason)
    if not np.isfinite(records[-1].loss):
        raise PartEndedError("failed", "the loss is not finite: see logs/train_run.txt")


def _data(context: Context) -> Path:
    return context.digits or context.output / "train" / "digits"


def _plan_training(context: Context, precision: str, *costs: object) -> None:
    _run(context, "train_plan", *costs, log=f"plan_{precision}", precision=precision)


def _train(
    context: Context, run: str, precision: str, *more: object, until: Until | None = None
) -> None:
    log = f"train_{run}"
    _run(context, "train", *more, log=log, until=until, run=run, precision=precision)


def _timed_steps(records: list[StepRecord]) -> list[StepRecord]:
    return records[min(_WARM_UP, len(records) - 1) :]


def _step_ms(records: list[StepRecord]) -> float:
    return median(step.step_ms for step in _timed_steps(records))


def checkpoint(context: Context) -> None:
    """Save a large checkpoint during training, and resume from it."""
    try:
        log = _run(context, "checkpoint")
    finally:
        shutil.rmtree(context.output / "checkpoint", ignore_errors=True)
    figures = json.loads(log.read_text().splitlines()[-1])
    context.compare("checkpoint", "GiB", figures.pop("stated_gib"), figures.pop("written_gib"))
    context.figures.update(figures)


def providers(context: Context) -> None:
    """Train the steps of `train` with Transformer Engine's layers, and compare losses."""
    local = context.output / "train" / "run" / RUN_FILE
    if not local.exists():
        raise PartEndedError("skipped", "the part train left no run to compare with")
    if importlib.util.find_spec("transformer_engine") is None:
        raise PartEndedError("skipped", "transformer-engine is not installed")
    local_steps = read_run(local)
    for plan, rounding in _ROUNDING.items():
        if plan != _PRECISION:
            _plan_training(context, plan)
        _train(context, f"run_te_{plan}", plan, "--provider", "te")
        te_steps = read_run(context.output / "train" / f"run_te_{plan}" / RUN_FILE)
        pairs = zip(local_steps, te_steps, strict=True)
        difference = max(abs(a.loss / b.loss - 1) for a, b in pairs)
        context.figures[f"te_{plan}_over_local_time"] = _step_ms(te_steps) / _step_ms(local_steps)
        context.figures[f"te_{plan}_largest_loss_difference"] = difference
        if not difference <= rounding:  # also for nan
            reason = f"losses in {plan} differ by {difference:.1%}, more than {rounding:.0%}"
            raise PartEndedError("failed", reason)


PARTS: dict[str, Part] = {
    part.__name__: part for part in (tests, train, replay, checkpoint, profile, providers)
}
