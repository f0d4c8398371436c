"""The parts of a proof, in order. Each adds figures to the context as it finds them."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from pydantic import JsonValue

from omnibal.cost.analytic import unit_flops
from omnibal.cost.model import pack_features
from omnibal.cost.profile import fit_residuals, read_profile
from omnibal.job.check import open_plan
from omnibal.job.fake_replay import Roofline, read_fake_stages
from omnibal.job.job import JobSpec
from omnibal.job.plan_files import PlanFiles
from omnibal.job.replay import REPLAY_FILES, StageReplay
from omnibal.job.runlog import RUN_FILE, StepRecord, read_run
from omnibal.model.config import load_cluster, load_model
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.unit_runs import unit_counts
from scripts.gpu_proof.running import Context, Part, PartEndedError

_TESTED = re.compile(
    r"(PASSED|FAILED|ERROR|SKIPPED)\s+\S+::(\S+)|::(\S+)\s+(PASSED|FAILED|ERROR|SKIPPED)"
)
_PRECISION = "bf16"
_CLUSTER = "h100-80g"
"""Preset to plan with; --cluster-output adds measured rates to it."""
_SMALL_MODEL = "internvl-digits"
_SMALL_CAPS = ("--max-tiles", 12, "--max-tokens", 448)
_WARM_UP = 3
"""Untimed first steps of a training, which compile and choose kernels."""
_ROUNDING = 0.02
"""Relative difference of two providers' bf16 losses that counts as rounding."""


def tests(context: Context) -> None:
    """Run the tests for devices: the trainer, and fused operations against plain torch."""
    workers = ["-n", "4"] if importlib.util.find_spec("xdist") and not context.pretended else []
    if importlib.util.find_spec("pytest") is None:
        raise PartEndedError("skipped", "pytest is not installed")
    try:
        context.run("tests", "-m", "pytest", "-vv", *workers, *context.settings.tests)
    finally:
        log = context.output / "logs" / "tests.txt"
        results = tested(log.read_text(errors="replace")) if log.exists() else {}
        context.figures["tests"] = results
    if not any(result == "passed" for result in results.values()):
        raise PartEndedError("failed", "no test ran: see logs/tests.txt")


def tested(printed: str) -> dict[str, JsonValue]:
    """Results in the output of pytest -v, by test name."""
    found = {}
    for first, name, other_name, second in _TESTED.findall(printed):
        found[name or other_name] = (first or second).lower()
    return found


def profile(context: Context) -> None:
    """Measure layers, matrix products and a copy, and write a cluster file of the rates."""
    settings, output = context.settings, context.output
    model = _SMALL_MODEL if context.pretended else settings.model
    caps = ("--max-tiles", settings.max_tiles, "--max-tokens", settings.max_tokens)
    context.run(
        "profile", "-m", "omnibal", "profile", "--model", model,
        "--precision", _PRECISION, *caps,
        "--tokens-per-sample", settings.tokens_per_sample,
        "--layers", 2, "--repetitions", 5,
        "--cluster", _CLUSTER, "--cluster-output", output / "cluster.toml",
        "-o", output / "profile.json",
    )  # fmt: skip
    measured = read_profile(output / "profile.json")
    assert measured.rates is not None
    products = measured.rates.products
    rates = [2e-9 * one.rows * one.inner * one.outer / one.time_ms(None) for one in products]
    times = [one for one in fit_residuals(measured, load_model(model)) if "_ms" in one.quantity]
    cluster = load_cluster(_CLUSTER)
    context.figures.update(
        model=model,
        device=measured.device,
        products=len(products),
        fastest_tflops=max(rates),
        median_tflops=median(rates),
        slowest_tflops=min(rates),
        assumed_tflops=cluster.tflops(measured.precision) * cluster.matmul_efficiency,
        copy_gb_per_s=max(1e-6 * one.bytes_per_ms for one in measured.rates.copies),
        assumed_memory_gb_per_s=cluster.memory_gb_per_s,
        worst_median_fit_error=max(one.median_error for one in times),
    )


def replay(context: Context) -> None:
    """Replay stages of a plan for many devices, most informative first."""
    settings, output = context.settings, context.output
    lengths: tuple[object, ...] = ()
    if settings.samples:
        lengths = ("--lengths", output / "lengths.parquet")
        context.run(
            "lengths", "tools/make_lengths.py", "--samples", settings.samples,
            "-o", output / "lengths.parquet",
        )  # fmt: skip
    context.run(
        "plan", "-m", "omnibal", "plan", "--model", settings.model, "--cluster", _CLUSTER,
        "--precision", _PRECISION, *settings.sizes, *lengths,
        "--max-tiles", settings.max_tiles, "--max-tokens", settings.max_tokens,
        "--micro-batches", settings.micro_batches, "-o", output / "plan",
    )  # fmt: skip
    files = open_plan(output / "plan")
    context.figures["plan"] = f"{files.plan.model.name}, {files.plan.parallel}"
    stages: list[JsonValue] = []
    context.figures["stages"] = stages
    for stage in settings.replayed:
        fake = ["--fake-device"] if context.pretended else ["--steps", 1, "--repetitions", 2]
        context.run(
            f"replay_{stage}", "tools/replay.py", output / "plan", "-o", output / "replay",
            "--stages", stage, *fake,
        )  # fmt: skip
        stages.append(_replayed(context, files, stage))


def _replayed(context: Context, files: PlanFiles, stage: int) -> dict[str, JsonValue]:
    """Measured or counted figures of a stage with predictions."""
    folder, plan = context.output / "replay", files.plan
    if context.pretended:
        [counted] = [one for one in read_fake_stages(folder, plan) if one.stage == stage]
        rates = Roofline.of_cluster(plan.cluster, plan.precision)
        return {
            "stage": stage,
            "predicted_gib": counted.predicted_gib,
            "allocated_gib": counted.allocated_gib,
            "kernels": counted.kernels,
            "element_wise_share": counted.element_wise_share(rates),
        }
    [measured] = [one for one in REPLAY_FILES.read(folder, len(plan.stages)) if one.stage == stage]
    own_ms = sum(measured.forward_ms) + sum(measured.backward_ms)
    flops = stage_flops(files, stage, _features(files, measured)) / plan.parallel.tensor
    figures: dict[str, JsonValue] = {
        "stage": stage,
        "predicted_gib": measured.predicted_gib(plan.predicted.stages[stage].memory),
        "measured_gib": measured.peak_gib,
        "predicted_ms": predicted_ms(files, files.job, measured),
        "measured_ms": own_ms,
        # While it computes, per tensor-parallel rank, without recomputation.
        "mfu": flops / (1e-3 * own_ms) / (1e12 * plan.cluster.tflops(plan.precision)),
    }
    rates_file = context.output / "cluster.toml"
    if rates_file.exists():
        job = replace(files.job, cluster=load_cluster(str(rates_file)))
        figures["predicted_with_measured_rates_ms"] = predicted_ms(files, job, measured)
    return figures


def predicted_ms(files: PlanFiles, job: JobSpec, measured: StageReplay) -> float:
    """Predicted forward and backward of the replayed packs, without tensor-parallel links."""
    fast = {"intra_node_gb_per_s": 1e18, "inter_node_gb_per_s": 1e18}
    rates = {
        precision: table.model_copy(update={"collectives": ()})
        for precision, table in job.cluster.rates.items()
    }
    alone = replace(job, cluster=job.cluster.model_copy(update=fast | {"rates": rates}))
    features = _features(files, measured)
    times = stage_times(alone.cost, files.plan.stages, features)
    both = times.forward_ms + times.backward_ms
    return float(both[:, measured.stage].sum())


def stage_flops(files: PlanFiles, stage: int, features: np.ndarray) -> float:
    """FLOPs of a stage's packs over all tensor-parallel ranks."""
    job = files.job
    each = unit_flops(job.model, job.cluster, job.frozen, job.adapters)
    counts = unit_counts(job.cost.kinds, files.plan.stages[stage])
    per_feature = sum(
        int(count) * each[kind.name] for kind, count in zip(job.cost.kinds, counts, strict=True)
    )
    return float((features @ per_feature).sum())


def _features(files: PlanFiles, measured: StageReplay) -> np.ndarray:
    """Features of the replayed packs, [packs, features]."""
    packs, lengths = files.steps
    return pack_features(packs.packs, lengths, files.job.cost.features)[list(measured.rows)]


def train(context: Context) -> None:
    """Train the quickstart's model from data to steps, with its costs measured first."""
    settings, output = context.settings, context.output
    folder = output / "train"
    folder.mkdir(parents=True, exist_ok=True)
    data, tokenizer = folder / "digits", folder / "digits" / "tokenizer.model"
    if not data.exists():
        context.run(
            "digits", "tools/make_digits_dataset.py", "--output", data,
            "--samples", settings.trained_samples, "--heldout-samples", 10,
        )  # fmt: skip
    lengths = folder / "lengths.parquet"
    context.run(
        "train_lengths", "-m", "omnibal", "lengths", data / "train" / "meta.json",
        "--model", _SMALL_MODEL, "--tokenizer-model", tokenizer, "-o", lengths,
    )  # fmt: skip
    job = ("--model", _SMALL_MODEL, "--precision", _PRECISION, *_SMALL_CAPS)
    context.run(
        "train_profile", "-m", "omnibal", "profile", *job, "--lengths", lengths,
        "--repetitions", 5, "-o", folder / "profile.json",
    )  # fmt: skip
    context.run(
        "train_plan", "-m", "omnibal", "plan", *job, "--cluster", _CLUSTER,
        "--lengths", lengths, "--profile", folder / "profile.json", "--micro-batches", 3,
        "-o", folder / "plan",
    )  # fmt: skip
    _train(context, "local", folder / "run")
    prediction = open_plan(folder / "plan").plan.predicted
    records = read_run(folder / "run" / RUN_FILE)
    context.figures.update(
        steps=len(records),
        first_loss=records[0].loss,
        last_loss=records[-1].loss,
        predicted_step_ms=prediction.step_ms,
        measured_step_ms=_step_ms(records),
        predicted_gib=prediction.stages[0].memory.peak_gib,
        measured_gib=None if context.pretended else records[-1].stages[0].peak_gib,
        mfu=median(one.mfu for one in records[-_timed(records) :]),
    )
    if not np.isfinite(records[-1].loss):
        raise PartEndedError("failed", "the loss is not finite: see logs/train_local.txt")


def _train(context: Context, provider: str, run: Path) -> None:
    """Train the steps with a provider of layers."""
    folder = context.output / "train"
    context.run(
        f"train_{provider}", "pretrain_vlm.py", "--plan", folder / "plan",
        "--data", folder / "digits" / "train" / "meta.json",
        "--tokenizer-model", folder / "digits" / "tokenizer.model", "--save", run,
        "--train-iters", context.settings.trained_steps, "--num-workers", 0, "--provider", provider,
    )  # fmt: skip


def _timed(records: list[StepRecord]) -> int:
    return max(len(records) - _WARM_UP, 1)


def _step_ms(records: list[StepRecord]) -> float:
    return median(one.step_ms for one in records[-_timed(records) :])


def providers(context: Context) -> None:
    """Train the same steps with Transformer Engine's layers, and compare losses and times."""
    local = context.output / "train" / "run"
    if not (local / RUN_FILE).exists():
        raise PartEndedError("skipped", "the part train left no run to compare with")
    if importlib.util.find_spec("transformer_engine") is None:
        raise PartEndedError("skipped", "transformer-engine is not installed: local alone ran")
    other = context.output / "train" / "run_te"
    _train(context, "te", other)
    one, two = (read_run(folder / RUN_FILE) for folder in (local, other))
    differences = [abs(a.loss / b.loss - 1) for a, b in zip(one, two, strict=True)]
    context.figures.update(
        largest_loss_difference=max(differences),
        local_step_ms=_step_ms(one),
        te_step_ms=_step_ms(two),
        te_over_local=_step_ms(two) / _step_ms(one),
    )
    if max(differences) > _ROUNDING:
        raise PartEndedError(
            "failed", f"losses differ by {max(differences):.1%}, more than {_ROUNDING:.0%}"
        )


PARTS: dict[str, Part] = {
    part.__name__: part for part in (tests, profile, replay, train, providers)
}
