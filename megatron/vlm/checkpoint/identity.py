"""Identity of a checkpoint (model, adapters, steps, settings), read without loading weights."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint import CheckpointException

from megatron.vlm.checkpoint.run_folders import check_checksums, list_complete_steps
from omnibal.base.errors import UserError
from omnibal.job.plan import DataPlan
from omnibal.job.runlog import TRACKER_FILE, checkpoint_path
from omnibal.model.adapter_settings import AdapterConfig, adapted_linears, has_adapters
from omnibal.model.config import ModelConfig, model_sizes
from omnibal.model.units import unit_kinds

_log = logging.getLogger(__name__)
CHECKPOINT_BACKEND = ("torch_dist", 1)  # name and version of core's format
# Fields that change no weight's shape. Layer scale is compared separately, as on or off.
_NOT_ARCHITECTURE = (
    *("layer_scale_init", "max_positions", "rope_factor"),
    *("imbalance", "auxiliary_loss", "prediction_loss"),
    *("min_pixels", "max_pixels", "max_side_pixels", "resize", "image_text", "video"),
    *("pixel_mean", "pixel_std", "pixel_scale"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointIdentity:
    """Identity of a run's newest checkpoint, as stored in it."""

    path: Path
    step: int
    model: ModelConfig
    steps_sha256: str | None  # SHA-256 of the plan's steps, or None without data
    steps: int | None  # number of the plan's steps, if known
    options: dict[str, Any] | None  # the optimizer's settings, or None if it has only weights
    common: dict[str, Any]  # state except tensors: steps, schedule, settings of the optimizer
    adapters: AdapterConfig | None = None


def identity_state(
    model: ModelConfig,
    data: DataPlan | None,
    options: Mapping[str, Any] | None,
    adapters: AdapterConfig | None = None,
) -> dict[str, Any]:
    """Return the entry "omnibal" of a checkpoint's common state."""
    adapter_entry = {} if adapters is None else {"adapters": adapters.model_dump(mode="json")}
    return adapter_entry | {
        "model": model.model_dump(mode="json"),
        "steps_sha256": None if data is None else data.steps_sha256,
        "steps": None if data is None else data.steps,
        "options": None if options is None else dict(options),
    }


def open_newest(
    directory: Path,
    agree: Callable[[Callable[[], Any]], Any] = lambda work: work(),
    rank: int = 0,
    ranks: int = 1,
) -> CheckpointIdentity:
    """Return the newest readable checkpoint. Broken newer ones are skipped; the newest is logged.

    Raises UserError if there is none. Rank `rank` of `ranks` verifies its part of the checksums.
    `agree` calls a function on every rank, and raises UserError on all if one fails.
    """
    steps = agree(lambda: list_complete_steps(directory))
    if not steps:
        raise UserError(
            f"{directory}: holds no checkpoint ({TRACKER_FILE} is missing); give the --save of an "
            "earlier run, or the directory of an import"
        )
    failures: list[UserError] = []
    for step in steps:
        try:
            identity = agree(partial(_open_step, directory, step, rank, ranks))
        except UserError as error:
            failures.append(error)
            continue
        if failures:
            # A run prints INFO of one rank. Tools print only warnings.
            level = logging.INFO if dist.is_initialized() else logging.WARNING
            _log.log(level, f"{failures[0]}; until then, {identity.path} is loaded")
        return identity
    raise failures[0]


def _open_step(directory: Path, step: int, rank: int, ranks: int) -> CheckpointIdentity:
    path = checkpoint_path(directory, step)
    with checkpoint_errors(path):
        irregular = [file for file in path.glob("*") if not file.is_file()]
        if irregular:
            raise UserError(f"{irregular[0]}: is no regular file; {_remedy(path)}")
        if not check_is_distributed_checkpoint(str(path)):
            raise UserError(f"{path}: is not a whole checkpoint; {_remedy(path)}")
        common = torch.load(path / COMMON_STATE_FNAME, map_location="cpu", weights_only=True)
        if not {"omnibal", "training_state"} <= common.keys():
            raise UserError(
                f"{path}: is a checkpoint of another program; load one saved by pretrain_vlm.py"
            )
        identity = common["omnibal"]
        check_checksums(path, rank, ranks)
        adapters = identity.get("adapters")
        return CheckpointIdentity(
            path=path,
            step=step,
            model=ModelConfig.model_validate(identity["model"]),
            steps_sha256=identity["steps_sha256"],
            steps=identity["steps"],
            options=identity["options"],
            common=common,
            adapters=adapters if adapters is None else AdapterConfig.model_validate(adapters),
        )


def adapter_differences(
    model: ModelConfig, there: AdapterConfig, here: AdapterConfig | None
) -> list[str]:
    """Return the differences between a checkpoint's adapters and a plan's. Empty if equal."""
    if here is None:
        return ["it has some, and the plan none"]
    return differences(_adapter_shapes(model, there), _adapter_shapes(model, here), "in the plan")


def _adapter_shapes(model: ModelConfig, adapters: AdapterConfig) -> dict[str, Any]:
    # The adapted linears, not the names of targets: several names have the same linears.
    linears = {
        kind.part: ", ".join(
            piece.name
            for linear in adapted_linears(model, kind, adapters)
            for piece in linear.adapted_pieces
        )
        for kind in unit_kinds(model)
        if has_adapters(model, kind, adapters)
    }
    return {"adapters": {"rank": adapters.rank, "scale": adapters.scale, "linears": linears}}


def architecture_differences(
    there: ModelConfig, here: ModelConfig, place: str = "in the plan"
) -> list[str]:
    """Return the differences that prevent loading one model's weights into the other."""
    sizes, own_sizes = (model_sizes(model, without=_NOT_ARCHITECTURE) for model in (there, here))
    for model, own in ((there, sizes), (here, own_sizes)):
        own["language"]["head_size"] = model.language.head_width  # left out or given
    lines = differences(sizes, own_sizes, place)
    for name in there.encoders.keys() & here.encoders.keys():
        towers = there.encoders[name], here.encoders[name]
        scaled = ["off" if tower.layer_scale_init is None else "on" for tower in towers]
        if scaled[0] != scaled[1]:
            lines.append(f"layer scale is {scaled[0]} there and {scaled[1]} {place}")
    return lines


def differences(there: Mapping[str, Any], here: Mapping[str, Any], place: str) -> list[str]:
    """Return the differences between nested settings, one line each; `place` names `here`."""
    there, here = _flatten(there), _flatten(here)
    return [
        f"{name} is {there.get(name)} there and {here.get(name)} {place}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in settings.items():
        nested = _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else None
        flat.update(nested if nested is not None else {prefix + name: value})
    return flat


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Convert errors of a broken checkpoint to UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: cannot be read: {reason(error)}; {_remedy(path)}") from error


def raise_interrupts(error: BaseException) -> None:
    """Raise the first cause that is an interrupt, such as Ctrl-C, or a UserError, if any."""
    for cause in _causes(error):
        if isinstance(cause, UserError) or not isinstance(cause, Exception):
            raise cause from error


def _causes(error: BaseException) -> list[BaseException]:
    # A CheckpointException has each rank's failure.
    if not isinstance(error, CheckpointException):
        return [error]
    return [failure[0] for failure in error.failures.values()]


def reason(error: BaseException) -> str:
    """Return the OSError or UserError behind an error in one line, or else its own first line."""
    error = _causes(error)[0]
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError | UserError):
        cause = cause.__context__
    if isinstance(cause, UserError):
        return str(cause)
    if cause is not None and cause.strerror is not None:
        return f"{cause.filename}: {cause.strerror}" if cause.filename else cause.strerror
    line = next(filter(None, map(str.strip, str(error).splitlines())), "")
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{kind}{line[:200]}"


def _remedy(path: Path) -> str:
    return f"restore a copy, or name an earlier checkpoint in {path.parent / TRACKER_FILE}"
