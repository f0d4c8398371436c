"""The command line of pretrain_vlm.py, with Megatron-LM's flag names if it has the option."""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from megatron.vlm.inputs.data import DataOptions, LossWeighting, OnBadSample
from megatron.vlm.model.providers import check_provider
from megatron.vlm.step.train import OptimizationOptions
from omnibal.base.errors import UserError
from omnibal.base.program import ArgumentParser
from omnibal.base.remote_path import check_local, location
from omnibal.model.config import Provider

_CACHE_GIB = 32
"""Size of a cache of remote data: some hours of samples, which most nodes' disks can hold."""
LEARNING_RATE, ADAPTER_LEARNING_RATE, VISION_SHARE = 1e-5, 1e-4, 0.2
"""The largest rate of all weights and of adapters, and the vision encoder's share of it."""
DESCRIPTION = "Train a language model, with or without a vision encoder, as a plan says."


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointArguments:
    save_interval: int
    keep_checkpoints: int | None
    """Number of newest checkpoints to keep. None for all."""
    async_save: bool
    exit_after_failed_saves: int
    replan_at: tuple[int, ...]
    """Steps that are followed by replanning from measured times."""
    elastic: bool
    """Whether to resume the newest checkpoint with a plan for the current number of processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageArguments:
    data_index: Path | None = None
    """Index of the training data from `omnibal lengths`. None to read all files."""
    data_cache: Path | None = None
    """Cache folder for remote data, shared by a node's processes. None for no cache."""
    data_cache_gib: float = _CACHE_GIB
    data_root: Path | None = None
    """Folder or URL that all files of the data must be in. None for any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationArguments:
    """Options for held-out data: questions after training, and validation during it."""

    eval_data: Path
    """Meta JSON of held-out samples."""
    eval_samples: int
    eval_interval: int | None
    """Steps between validations. None for no validation."""
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunArguments:
    """Arguments of a run that trains, evaluates or both."""

    tokenizer_model: Path
    """tokenizer.model, tokenizer.json or folder, as the plan's lengths were scanned with."""
    save: Path
    load: Path | None
    """Run directory to resume, to take weights from, or to evaluate."""
    data: Path | None
    """Meta JSON, as the plan's lengths were scanned from. May be None with `skip_train`."""
    skip_train: bool
    """Whether to only evaluate `load`, which must be given."""
    finetune: bool
    """Whether to take only weights from `load`, and train the plan from its first step."""
    train_iters: int | None
    """Step of the plan to stop after. None for the last."""
    seed: int
    """Seed of initial weights, augmentation and drop path."""
    max_skipped_steps: int
    """Maximum number of consecutive steps skipped for non-finite loss or gradients."""
    num_workers: int
    provider: Provider
    samples: DataOptions
    storage: StorageArguments
    optimization: OptimizationOptions
    checkpoints: CheckpointArguments
    tensorboard_dir: Path | None
    wandb_project: str | None
    profile_steps: range
    """Steps with torch profiler traces."""
    evaluation: EvaluationArguments | None


def _number(
    kind: Callable[[str], float], holds: Callable[[float], bool], must: str
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} was given, and must be {must}")
        return value

    return parse


_POSITIVE = _number(int, lambda value: value >= 1, "a whole number from 1 on")
_NATURAL = _number(int, lambda value: value >= 0, "a whole number from 0 on")
_SEED = _number(int, lambda value: 0 <= value < 2**63, "a whole number from 0 to below 2^63")
_FRACTION = _number(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")
_POSITIVE_SIZE = _number(float, lambda value: 0 < value < math.inf, "a number above 0")
_NOT_NEGATIVE = _number(float, lambda value: 0 <= value < math.inf, "a finite number from 0 on")


def _steps(text: str) -> range:
    """Parse a step or an inclusive range: 5 or 5-7."""
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
        raise argparse.ArgumentTypeError(
            f"{text!r} was given, and must be a step or the first and last of several, such as 5-7"
        )
    return range(int(first), int(last) + 1)


def _each_step(text: str) -> tuple[int, ...]:
    """Parse comma-separated steps."""
    steps = text.split(",")
    if not all(step.isdecimal() and int(step) for step in steps):
        raise argparse.ArgumentTypeError(
            f"{text!r} was given, and must be steps from 1 on, such as 50 or 50,500"
        )
    return tuple(sorted({int(step) for step in steps}))


def _loss_weighting(text: str) -> LossWeighting:
    try:
        return LossWeighting(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} was given, and must be one of {', '.join(LossWeighting)}"
        ) from None


def parse_arguments() -> tuple[Path, RunArguments | None]:
    """Parse and check this process's command line.

    Returns:
        The plan, and the arguments of the run. None for a dry run.
    """
    parser = ArgumentParser(prog="pretrain_vlm.py", description=DESCRIPTION)
    _add_job(parser.add_argument_group("job"))
    _add_checkpoints(parser.add_argument_group("checkpoints and faults"))
    _add_data(parser.add_argument_group("data and model"))
    _add_optimization(parser.add_argument_group("optimization (AdamW)"))
    _add_reports(parser.add_argument_group("reports"))
    _add_evaluation(parser.add_argument_group("validation, and evaluation by greedy answers"))
    given = parser.parse_args()
    check_local(vars(given))
    _check_together(given)
    check_provider(given.provider)
    return given.plan, None if given.dry_run else _run_arguments(given)


def _run_arguments(given: argparse.Namespace) -> RunArguments:
    values = vars(given) | {
        "data_cache_gib": given.data_cache_gib or _CACHE_GIB,
        "samples": DataOptions(
            seed=given.seed,
            loss_weighting=given.loss_weighting,
            on_bad_sample=given.on_bad_sample,
            augment=True,
            drop_path=given.drop_path_rate > 0,
        ),
        "evaluation": None,
    }
    for name, group in _GROUPS.items():
        if name != "evaluation" or given.eval_data is not None:
            values[name] = group(**_fields_of(group, values))
    return RunArguments(**_fields_of(RunArguments, values))


_GROUPS: dict[str, type] = {
    "optimization": OptimizationOptions,
    "storage": StorageArguments,
    "checkpoints": CheckpointArguments,
    "evaluation": EvaluationArguments,
}


def _fields_of(group: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the values that are fields of a dataclass."""
    return {field.name: values[field.name] for field in fields(group)}


def _check_together(given: argparse.Namespace) -> None:
    for wrong, message in (
        (
            given.skip_train and not (given.load and given.eval_data),
            "--skip-train evaluates a trained model: give --load and --eval-data",
        ),
        (
            not (given.skip_train or given.dry_run or given.data),
            "training needs --data (or --skip-train to only evaluate)",
        ),
        (
            not given.dry_run and not (given.save and given.tokenizer_model),
            "training and evaluation need --save and --tokenizer-model (--dry-run needs neither)",
        ),
        (
            given.data_cache_gib is not None and not given.data_cache,
            "--data-cache-gib is the size of a cache: give --data-cache, its folder",
        ),
        (
            given.finetune and not given.load,
            "--finetune starts from the weights of a run: give --load",
        ),
        (
            given.elastic and given.load and given.load != given.save and not given.finetune,
            "--elastic goes on from --save: give no other --load, but one with --finetune",
        ),
        (
            given.eval_interval is not None and not given.eval_data,
            "--eval-interval validates on held-out data: give --eval-data",
        ),
    ):
        if wrong:
            raise UserError(f"{message}; see pretrain_vlm.py --help")


def _add(
    group: argparse._ArgumentGroup,
    name: str,
    kind: Callable[[str], Any],
    default: Any = None,
    about: str | None = None,
    **more: Any,
) -> None:
    if default not in (None, (), range(0)):
        about = f"{about or ''} (default: {default})".lstrip()
    group.add_argument(name, type=kind, default=default, help=about, **more)


def _add_job(job: argparse._ArgumentGroup) -> None:
    _add(job, "--plan", Path, None, "directory made by `omnibal plan`", required=True)
    lengths = "that the lengths were scanned"
    about = f"annotation file or meta JSON {lengths} from, or its URL (s3://BUCKET/meta.json)"
    _add(job, "--data", location, None, about)
    index = (
        "that `omnibal lengths --data-index` wrote, by which no file of --data is read to open it"
    )
    _add(job, "--data-index", Path, None, index)
    cache = "folder on a local disk for what is read of remote data; all ranks of a node share it"
    _add(job, "--data-cache", Path, None, cache)
    size = f"most that it holds, in GiB (default: {_CACHE_GIB})"
    _add(job, "--data-cache-gib", _POSITIVE_SIZE, None, size)
    below = "folder or URL that all files of the data must be in, links followed"
    _add(job, "--data-root", location, None, below)
    tokenizer = f"tokenizer.model, tokenizer.json or folder {lengths} with"
    _add(job, "--tokenizer-model", Path, None, tokenizer)
    _add(job, "--save", Path, None, "directory of the run")
    _add(job, "--load", Path, None, "directory of a run to resume")
    weights = "take only the weights of --load, and train the plan from its first step"
    job.add_argument("--finetune", action="store_true", help=weights)
    _add(job, "--train-iters", _POSITIVE, None, "stop after this many of the plan's steps")
    _add(job, "--seed", _SEED, 42, "of initial weights, augmentation and drop path")
    layout = "only check the plan and print which rank would hold what"
    job.add_argument("--dry-run", action="store_true", help=layout)


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    _add(group, "--save-interval", _POSITIVE, 1000, "steps between checkpoints")
    newest = "number of newest checkpoints to keep (default: all)"
    _add(group, "--keep-checkpoints", _POSITIVE, None, newest)
    group.add_argument(
        "--async-save",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write checkpoints while training goes on (default: yes)",
    )
    failed = "failed saves in a row that end the run; a failed last save ends it too"
    _add(group, "--exit-after-failed-saves", _POSITIVE, 2, failed)
    skipped = "steps in a row that may be skipped because loss or gradients are not finite"
    _add(group, "--max-skipped-steps", _NATURAL, 5, skipped)
    anew = "steps after which the run is planned anew by what it has measured, such as 50,500"
    _add(group, "--replan-at", _each_step, (), anew, metavar="STEPS")
    elastic = "go on from the newest checkpoint of --save, planned for as many processes as came"
    group.add_argument("--elastic", action="store_true", help=elastic)
    bad = "whether an unreadable image or recording stops the run or its sample is passed over"
    choices = list(OnBadSample)
    _add(group, "--on-bad-sample", OnBadSample, OnBadSample.STOP, bad, choices=choices)


def _add_data(group: argparse._ArgumentGroup) -> None:
    _add(group, "--num-workers", _NATURAL, 2, "loader processes of each rank")
    _add(
        group,
        "--loss-weighting",
        _loss_weighting,
        LossWeighting.TOKEN,
        "a loss token weighs 1 (token), 1/n or 1/sqrt(n) in a sample with n of them, 1/n in a "
        "micro-batch with n; sum divides nothing. Also HBP's names: Ave-Token (token), Sample-Mean "
        "(sample), Token-Mean (micro-batch) and Sum",
        metavar="{" + ",".join(LossWeighting) + "}",
    )
    rate = "of the last vision layer's branches; rises linearly from 0 at the first layer"
    _add(group, "--drop-path-rate", _FRACTION, 0.0, rate)
    group.add_argument(
        "--provider",
        choices=get_args(Provider),
        default="local",
        help="of the layers' linears and attention: this project and Megatron-core, or "
        "Transformer Engine; checkpoints are the same (default: local)",
    )


def _add_optimization(group: argparse._ArgumentGroup) -> None:
    largest = (
        f"largest learning rate (default: {LEARNING_RATE}, of adapters {ADAPTER_LEARNING_RATE})"
    )
    _add(group, "--lr", _NOT_NEGATIVE, None, largest)
    vision = f"that of the vision encoder's own weights (default: {VISION_SHARE:g} x --lr)"
    _add(group, "--vision-lr", _NOT_NEGATIVE, None, vision)
    _add(group, "--min-lr", _NOT_NEGATIVE, 0.0, "learning rate of the last step")
    styles = ["cosine", "linear", "constant"]
    _add(group, "--lr-decay-style", str, "cosine", "after the warm-up", choices=styles)
    _add(group, "--lr-warmup-fraction", _FRACTION, 0.03, "share of the steps")
    _add(group, "--weight-decay", _NOT_NEGATIVE, 0.05, "of matrices; vectors have none")
    _add(group, "--adam-beta1", _FRACTION, 0.9)
    _add(group, "--adam-beta2", _FRACTION, 0.999)
    _add(group, "--adam-eps", _NOT_NEGATIVE, 1e-8)
    _add(group, "--clip-grad", _NOT_NEGATIVE, 1.0, "gradient norm; 0 does not clip")


def _add_reports(group: argparse._ArgumentGroup) -> None:
    _add(group, "--tensorboard-dir", Path, None, "also write TensorBoard events there")
    _add(group, "--wandb-project", str, None, "also log to this Weights & Biases project")
    traces = "write torch profiler traces of these steps into SAVE/traces"
    _add(group, "--profile-steps", _steps, range(0), traces, metavar="FIRST[-LAST]")


def _add_evaluation(group: argparse._ArgumentGroup) -> None:
    _add(group, "--eval-data", location, None, "annotation file or meta JSON of held-out samples")
    _add(group, "--eval-samples", _POSITIVE, 500, "held-out samples, at most")
    _add(group, "--eval-interval", _POSITIVE, None, "steps between losses on the held-out samples")
    longest = "longest answer; every token runs the whole question again, images included"
    _add(group, "--max-new-tokens", _POSITIVE, 64, longest)
    group.add_argument("--skip-train", action="store_true", help="only evaluate --load")
