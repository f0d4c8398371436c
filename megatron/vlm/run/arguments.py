"""Command line of pretrain_vlm.py. Flags that Megatron-LM has too have its names."""

# ruff: noqa: RUF009  `_flag` returns a field, which is not shared.
import argparse
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

from megatron.vlm.inputs.data import LossWeighting, MicroBatchOptions, OnBadSample
from megatron.vlm.model.providers import check_provider
from megatron.vlm.step.train import OptimizationOptions
from omnibal.base.errors import UserError
from omnibal.base.program import ArgumentParser
from omnibal.base.remote_path import check_local, location
from omnibal.model.config import Provider

_CACHE_GIB = 32  # some hours of samples, and less than most nodes' local disks
LEARNING_RATE, ADAPTER_LEARNING_RATE = 1e-5, 1e-4
VISION_SHARE = 0.2  # of --lr, for the vision encoder


def _parser(
    kind: Callable[[str], Any], holds: Callable[[Any], bool], requirement: str
) -> Callable[[str], Any]:
    """Return a parser of a flag's text: `kind` makes the value, for which `holds` must be true."""

    def parse(text: str) -> Any:
        with suppress(ValueError):
            if holds(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {requirement}, got {text!r}")

    return parse


_POSITIVE = _parser(int, lambda value: value >= 1, "an integer >= 1")
_NATURAL = _parser(int, lambda value: value >= 0, "an integer >= 0")
_SEED_NUMBER = _parser(int, lambda value: 0 <= value < 2**63, "an integer >= 0 and < 2^63")
_FRACTION = _parser(float, lambda value: 0 <= value < 1, "a number >= 0 and < 1")
_POSITIVE_SIZE = _parser(float, lambda value: 0 < value < math.inf, "a finite number > 0")
_NOT_NEGATIVE = _parser(float, lambda value: 0 <= value < math.inf, "a finite number >= 0")
_LOSS_WEIGHTING = _parser(LossWeighting, bool, f"one of {', '.join(LossWeighting)}")


def _steps_between(text: str) -> range:
    """Return the steps of `FIRST`, or of `FIRST-LAST` with both ends."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last if dash else first) + 1)


def _steps_listed(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(step) for step in text.split(",")}))


_TRACED_STEPS = _parser(_steps_between, bool, "a step or a range such as 5-7")
_REPLAN_STEPS = _parser(
    _steps_listed, lambda steps: steps[0] >= 1, "steps >= 1, such as 50 or 50,500"
)


def _option(
    help_text: str, kind: Callable[[str], Any] | None = None, default: Any = None, **more: Any
) -> dict[str, Any]:
    """Return keyword arguments of `add_argument`, for a switch if `kind` is None."""
    if kind is None:
        return {"action": "store_true", "help": help_text, "default": bool(default), **more}
    help_text += "" if default in (None, (), range(0)) else f" (default: {default})"
    if "choices" not in more and "metavar" not in more:
        names = {_POSITIVE: "N", _NATURAL: "N", _SEED_NUMBER: "N", str: "NAME"}
        more["metavar"] = "PATH" if kind in (Path, location) else names.get(kind, "X")
    return {"help": help_text, "type": kind, "default": default, **more}


def _flag(*settings: Any, **more: Any) -> Any:
    """Return a dataclass field whose metadata are the settings of the flag of its name."""
    option = _option(*settings, **more)
    return field(metadata=option, default=option["default"])


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointArguments:
    save_interval: int = _flag("steps between saves", _POSITIVE, 1000)
    keep_checkpoints: int | None = _flag("newest checkpoints to keep (default: all)", _POSITIVE)
    async_save: bool = _flag(
        "save in the background (default: yes)",
        action=argparse.BooleanOptionalAction,
        default=True,
    )
    exit_after_failed_saves: int = _flag("failed saves that end the run", _POSITIVE, 2)
    replan_at: tuple[int, ...] = _flag(
        "steps to plan again after (default: none)", _REPLAN_STEPS, (), metavar="STEPS"
    )
    elastic: bool = _flag("resume --save, on any number of processes")


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageArguments:
    data_index: Path | None = _flag("file of `omnibal lengths --data-index`", Path)
    data_cache: Path | None = _flag("local folder that caches remote data", Path)
    data_cache_gib: float = _flag(f"cache size in GiB (default: {_CACHE_GIB})", _POSITIVE_SIZE)
    data_root: Path | None = _flag("folder or URL that must hold all data", location)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationArguments:
    """Held-out data: its loss during training, and generated answers after it."""

    eval_data: Path = _flag("held-out annotations or meta JSON", location)
    eval_samples: int = _flag("max held-out samples", _POSITIVE, 500)
    eval_interval: int | None = _flag("steps between validations (default: none)", _POSITIVE)
    max_new_tokens: int = _flag("max tokens of an answer", _POSITIVE, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunArguments:
    """Arguments of a run that trains, evaluates or both."""

    data: Path | None = _flag("annotations or meta JSON of the lengths", location)
    tokenizer_model: Path = _flag("tokenizer of the lengths, file or folder", Path)
    save: Path = _flag("run directory, of checkpoints and logs", Path)
    load: Path | None = _flag("run directory to load from", Path)
    finetune: bool = _flag("load weights only, and start at step 0")
    skip_train: bool = _flag("only evaluate --load")
    train_iters: int | None = _flag("step to stop after (default: the last)", _POSITIVE)
    seed: int = _flag("of weights and augmentation", _SEED_NUMBER, 42)
    max_skipped_steps: int = _flag("max non-finite steps in a row", _NATURAL, 5)
    num_workers: int = _flag("dataloader workers per rank", _NATURAL, 2)
    provider: Provider = _flag(
        "local, or Transformer Engine",
        str,
        "local",
        choices=get_args(Provider),
    )
    tensorboard_dir: Path | None = _flag("TensorBoard log directory (default: none)", Path)
    wandb_project: str | None = _flag("Weights & Biases project (default: none)", str)
    profile_steps: range = _flag(
        "steps traced to SAVE/traces (default: none)",
        _TRACED_STEPS,
        range(0),
        metavar="FIRST[-LAST]",
    )
    samples: MicroBatchOptions
    storage: StorageArguments
    optimization: OptimizationOptions
    checkpoints: CheckpointArguments
    evaluation: EvaluationArguments | None

    @property
    def continues_run(self) -> bool:
        """Return whether `load` is the run directory `save`."""
        return self.load is not None and self.load.resolve() == self.save.resolve()


_JOB = {
    "plan": _option("plan directory", Path, required=True),
    "dry_run": _option("only check the plan, and print its ranks"),
    "on_bad_sample": _option(
        "stop, or train without it",
        OnBadSample,
        OnBadSample.STOP,
        choices=list(OnBadSample),
    ),
}
# Flags of `OptimizationOptions`, a class of the training step without a command line.
_OPTIMIZATION = {
    "lr": _option(
        f"max rate (default: {LEARNING_RATE}, adapters {ADAPTER_LEARNING_RATE})",
        _NOT_NEGATIVE,
    ),
    "vision_lr": _option(
        f"vision's max rate (default: {VISION_SHARE:g} x --lr)",
        _NOT_NEGATIVE,
    ),
    "min_lr": _option("learning rate of the last step", _NOT_NEGATIVE, 0.0),
    "lr_decay_style": _option(
        "learning rate decay", str, "cosine", choices=["cosine", "linear", "constant"]
    ),
    "lr_warmup_fraction": _option("fraction of warmup steps", _FRACTION, 0.03),
    "weight_decay": _option("of matrices, not vectors", _NOT_NEGATIVE, 0.05),
    "adam_beta1": _option("decay of the first moment", _FRACTION, 0.9),
    "adam_beta2": _option("decay of the second moment", _FRACTION, 0.999),
    "adam_eps": _option("term in the denominator", _NOT_NEGATIVE, 1e-8),
    "clip_grad": _option("max gradient L2 norm; 0: none", _NOT_NEGATIVE, 1.0),
    "loss_weighting": _option(
        "docs/training.md",
        _LOSS_WEIGHTING,
        LossWeighting.TOKEN,
        metavar="{" + ",".join(LossWeighting) + "}",
    ),
    "drop_path_rate": _option("of the last vision layer", _FRACTION, 0.0),
}


def _list_flags(kind: type) -> dict[str, Mapping[str, Any]]:
    return {member.name: member.metadata for member in fields(kind) if member.metadata}


def parse_arguments() -> tuple[Path, RunArguments | None]:
    """Return the plan's directory and the run's arguments (None: dry run); raises UserError."""
    parser = ArgumentParser(
        prog="pretrain_vlm.py",
        usage="pretrain_vlm.py --plan PATH [OPTION]...",
        description="Train a vision-language or language model by an OmniBal plan.",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=32),
    )
    for title, options in (
        ("job", _JOB | _list_flags(RunArguments)),
        ("checkpoints", _list_flags(CheckpointArguments)),
        ("storage of the data", _list_flags(StorageArguments)),
        ("optimization (AdamW)", _OPTIMIZATION),
        ("validation, and evaluation by greedy answers", _list_flags(EvaluationArguments)),
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
        "samples": MicroBatchOptions(
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
    has_data = given.skip_train or given.dry_run or given.data
    loads_other = given.elastic and given.load not in (None, given.save) and not given.finetune
    for message, is_wrong in {
        "--skip-train needs --load and --eval-data": (
            given.skip_train and not (given.load and given.eval_data)
        ),
        "training needs --data (or give --skip-train, to only evaluate)": not has_data,
        "training and evaluation need --save and --tokenizer-model (--dry-run needs neither)": (
            not given.dry_run and not (given.save and given.tokenizer_model)
        ),
        "--data-cache-gib needs --data-cache": given.data_cache_gib and not given.data_cache,
        "--finetune needs --load, the run to take weights from": given.finetune and not given.load,
        "--elastic resumes --save: drop --load, or add --finetune": loads_other,
        "--eval-interval needs --eval-data": given.eval_interval and not given.eval_data,
    }.items():
        if is_wrong:
            raise UserError(f"{message}; see pretrain_vlm.py --help")
