"""The command line of pretrain_vlm.py, with Megatron-LM's flag names if it has the option."""

# ruff: noqa: RUF009  `_parsed` returns a field, which is not shared.
import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
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


def _replanning_steps(text: str) -> tuple[int, ...]:
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


def _option(
    about: str, kind: Callable[[str], Any] | None = None, default: Any = None, **more: Any
) -> dict[str, Any]:
    """Settings of `argparse.add_argument`; the help shows the default. A switch without `kind`."""
    if kind is None:
        return {"action": "store_true", "help": about, "default": bool(default), **more}
    about += "" if default in (None, (), range(0)) else f" (default: {default})"
    return {"help": about, "type": kind, "default": default, **more}


def _parsed(*settings: Any, **more: Any) -> Any:
    """Field of a dataclass that is the option of the same name."""
    return field(metadata=_option(*settings, **more))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointArguments:
    save_interval: int = _parsed("steps between checkpoints", _POSITIVE, 1000)
    keep_checkpoints: int | None = _parsed(
        "number of newest checkpoints to keep (default: all)", _POSITIVE
    )
    async_save: bool = _parsed(
        "write checkpoints while training goes on (default: yes)",
        action=argparse.BooleanOptionalAction,
        default=True,
    )
    exit_after_failed_saves: int = _parsed(
        "consecutive failed saves that end the run; a failed last save ends it too", _POSITIVE, 2
    )
    replan_at: tuple[int, ...] = _parsed(
        "steps after which to plan again from measured times, such as 50,500 (default: none)",
        _replanning_steps,
        (),
        metavar="STEPS",
    )
    elastic: bool = _parsed(
        "resume the newest checkpoint of --save, planned for the number of processes launched"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageArguments:
    data_index: Path | None = _parsed(
        "index that `omnibal lengths --data-index` wrote; no file of --data is read to open it",
        Path,
    )
    data_cache: Path | None = _parsed(
        "folder on a local disk that caches remote data; shared by all ranks of a node", Path
    )
    data_cache_gib: float = _parsed(
        f"size of the cache in GiB (default: {_CACHE_GIB})", _POSITIVE_SIZE
    )
    data_root: Path | None = _parsed(
        "folder or URL that all files of the data must be in, links followed", location
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationArguments:
    """Held-out data: questions after training, and validation during it."""

    eval_data: Path = _parsed("annotation file or meta JSON of held-out samples", location)
    eval_samples: int = _parsed("maximum number of held-out samples", _POSITIVE, 500)
    eval_interval: int | None = _parsed(
        "steps between validations (default: no validation)", _POSITIVE
    )
    max_new_tokens: int = _parsed(
        "longest answer in tokens; every token runs the whole question again, images included",
        _POSITIVE,
        64,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunArguments:
    """Arguments of a run that trains, evaluates or both."""

    data: Path | None = _parsed(
        "annotation file or meta JSON that the lengths were scanned from, or its URL "
        "(s3://BUCKET/meta.json)",
        location,
    )
    tokenizer_model: Path = _parsed(
        "tokenizer.model, tokenizer.json or folder that the lengths were scanned with", Path
    )
    save: Path = _parsed("directory of the run", Path)
    load: Path | None = _parsed("directory of a run to resume", Path)
    finetune: bool = _parsed(
        "take only the weights of --load, and train the plan from its first step"
    )
    skip_train: bool = _parsed("only evaluate --load")
    train_iters: int | None = _parsed("step of the plan to stop after (default: last)", _POSITIVE)
    seed: int = _parsed("seed of initial weights, augmentation and drop path", _SEED, 42)
    max_skipped_steps: int = _parsed(
        "maximum consecutive steps skipped because loss or gradients are not finite", _NATURAL, 5
    )
    num_workers: int = _parsed("loader processes of each rank", _NATURAL, 2)
    provider: Provider = _parsed(
        "implementation of linears and attention: this project and Megatron-core, or Transformer "
        "Engine; checkpoints are the same",
        str,
        "local",
        choices=get_args(Provider),
    )
    tensorboard_dir: Path | None = _parsed("folder for TensorBoard events (default: none)", Path)
    wandb_project: str | None = _parsed("Weights & Biases project (default: none)", str)
    profile_steps: range = _parsed(
        "steps with torch profiler traces in SAVE/traces (default: none)",
        _steps,
        range(0),
        metavar="FIRST[-LAST]",
    )
    samples: DataOptions
    storage: StorageArguments
    optimization: OptimizationOptions
    checkpoints: CheckpointArguments
    evaluation: EvaluationArguments | None

    @property
    def continues_run(self) -> bool:
        """Whether `load` is the run directory `save`."""
        return self.load is not None and self.load.resolve() == self.save.resolve()


_JOB = {
    "plan": _option("directory made by `omnibal plan`", Path, required=True),
    "dry_run": _option("only check the plan and print the layout over ranks"),
    "on_bad_sample": _option(
        "whether an unreadable image or recording stops the run or its sample is skipped",
        OnBadSample,
        OnBadSample.STOP,
        choices=list(OnBadSample),
    ),
}
_OPTIMIZATION = {
    "lr": _option(
        f"largest learning rate (default: {LEARNING_RATE}, of adapters {ADAPTER_LEARNING_RATE})",
        _NOT_NEGATIVE,
    ),
    "vision_lr": _option(
        f"largest rate of the vision encoder's own weights (default: {VISION_SHARE:g} x --lr)",
        _NOT_NEGATIVE,
    ),
    "min_lr": _option("learning rate of the last step", _NOT_NEGATIVE, 0.0),
    "lr_decay_style": _option(
        "decay after the warm-up", str, "cosine", choices=["cosine", "linear", "constant"]
    ),
    "lr_warmup_fraction": _option("share of the steps with linear warm-up", _FRACTION, 0.03),
    "weight_decay": _option("weight decay of matrices; 0 for vectors", _NOT_NEGATIVE, 0.05),
    "adam_beta1": _option("decay of Adam's first moment", _FRACTION, 0.9),
    "adam_beta2": _option("decay of Adam's second moment", _FRACTION, 0.999),
    "adam_eps": _option("Adam's epsilon", _NOT_NEGATIVE, 1e-8),
    "clip_grad": _option("maximum gradient norm; 0 does not clip", _NOT_NEGATIVE, 1.0),
    "loss_weighting": _option(
        "weight of a loss token: 1 (token), 1/n or 1/sqrt(n) in a sample of n loss tokens, 1/n in "
        "a micro-batch of n; sum divides nothing. Also HBP's names: Ave-Token (token), Sample-Mean "
        "(sample), Token-Mean (micro-batch) and Sum",
        _loss_weighting,
        LossWeighting.TOKEN,
        metavar="{" + ",".join(LossWeighting) + "}",
    ),
    "drop_path_rate": _option(
        "drop-path rate of the last vision layer, rising linearly from 0 at the first",
        _FRACTION,
        0.0,
    ),
}
"""Options of `OptimizationOptions`, AdamW's by Megatron-LM's names."""


def _settings_of(kind: type) -> dict[str, Mapping[str, Any]]:
    return {member.name: member.metadata for member in fields(kind) if member.metadata}


def parse_arguments() -> tuple[Path, RunArguments | None]:
    """Parse and check this process's command line.

    Returns the plan, and the arguments of the run. None for a dry run.
    """
    parser = ArgumentParser(prog="pretrain_vlm.py", description=DESCRIPTION)
    for title, options in (
        ("job", _JOB | _settings_of(RunArguments)),
        ("checkpoints", _settings_of(CheckpointArguments)),
        ("storage of the data", _settings_of(StorageArguments)),
        ("optimization (AdamW)", _OPTIMIZATION),
        ("validation, and evaluation by greedy answers", _settings_of(EvaluationArguments)),
    ):
        group = parser.add_argument_group(title)
        for name, settings in options.items():
            group.add_argument(f"--{name.replace('_', '-')}", **settings)
    given = parser.parse_args()
    check_local(vars(given))
    _check_together(given)
    check_provider(given.provider)
    if given.dry_run:
        return given.plan, None
    values = vars(given) | {
        "data_cache_gib": given.data_cache_gib or _CACHE_GIB,
        "samples": DataOptions(
            seed=given.seed,
            loss_weighting=given.loss_weighting,
            on_bad_sample=given.on_bad_sample,
            augment=True,
            drop_path=given.drop_path_rate > 0,
        ),
    }

    def make(kind: type) -> Any:
        return kind(**{member.name: values[member.name] for member in fields(kind)})

    values |= {
        "storage": make(StorageArguments),
        "optimization": make(OptimizationOptions),
        "checkpoints": make(CheckpointArguments),
        "evaluation": None if given.eval_data is None else make(EvaluationArguments),
    }
    return given.plan, make(RunArguments)


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
