"""Checkpoints through Megatron-core's dist_checkpointing, independent of the pipeline split.

A checkpoint is a folder `iter_0000100` under the run's directory. The file
`latest_checkpointed_iteration.txt` names the newest whole one and is replaced last, so a save that
was cut short is never loaded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.vlm.stage import VLMStage
from omnibal.errors import UserError
from omnibal.files import atomic
from omnibal.plan import Plan

TRACKER_FILE = "latest_checkpointed_iteration.txt"
# Optimizer state is stored per parameter, so that any split can load it, and is brought together
# on the host of one data-parallel rank, not on every device.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


def checkpoint_path(directory: Path, step: int) -> Path:
    """Folder of the checkpoint taken after `step` steps."""
    return directory / f"iter_{step:07d}"


def latest_step(directory: Path) -> int | None:
    """Steps trained in the newest whole checkpoint, or None if there is none."""
    tracker = directory / TRACKER_FILE
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise UserError(
            f"{tracker}: holds {text[:20]!r}, and must hold the step number of a checkpoint folder "
            f"beside it ({checkpoint_path(directory, 100).name} is 100); correct it"
        )
    return int(text)


def save_checkpoint(
    directory: Path,
    step: int,
    plan: Plan,
    stage: VLMStage,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    options: Mapping[str, float | str],
) -> Path:
    """Write the state after `step` steps; collective over all ranks. Returns its folder.

    Args:
        options: the optimizer's settings, which a resumed run must share.
    """
    path = checkpoint_path(directory, step)
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _model_state(stage)
    state |= {
        "optimizer": optimizer.sharded_state_dict(state["model"], metadata=_METADATA),
        "scheduler": scheduler.state_dict(),
        "step": step,
        "omnibal": _identity(plan) | {"options": dict(options)},
    }
    dist_checkpointing.save(state, str(path))
    dist.barrier()
    if dist.get_rank() == 0:
        with atomic(directory / TRACKER_FILE) as temporary:
            temporary.write_text(str(step))
    dist.barrier()
    return path


def load_checkpoint(
    directory: Path,
    plan: Plan,
    stage: VLMStage,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    options: Mapping[str, float | str],
) -> int:
    """Restore weights, optimizer and schedule from the newest checkpoint; returns its step.

    Raises:
        UserError: there is no checkpoint, it is of another model, of another order of the data, or
            was trained with other settings of the optimizer, which its state would overrule.
    """
    path, identity = _open(directory, plan)
    different = _differences(identity["options"], dict(options), "given")
    if different:
        raise UserError(
            f"{path}: was trained with other settings: {'; '.join(different)}; resume with the same"
        )
    if plan.data is not None and identity["steps_sha256"] != plan.data.steps_sha256:
        raise UserError(
            f"{path}: was trained on other steps than the plan's, so its step count does not say "
            "which samples were seen; resume with the plan it was trained with or with one made "
            "by `omnibal plan --steps-of` it, or start anew without --load"
        )
    _fill_empty_optimizer_state(optimizer)
    state = _model_state(stage)
    state["optimizer"] = optimizer.sharded_state_dict(
        state["model"], is_loading=True, metadata=_METADATA
    )
    loaded = dist_checkpointing.load(state, str(path))
    stage.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    return loaded["step"]


def load_weights(directory: Path, plan: Plan, stage: VLMStage) -> int:
    """Restore weights alone from the newest checkpoint; returns its step.

    Raises:
        UserError: there is no checkpoint, or it is of another model.
    """
    path, _ = _open(directory, plan)
    loaded = dist_checkpointing.load(_model_state(stage), str(path))
    stage.load_state_dict(loaded["model"])
    return loaded["step"]


def _model_state(stage: VLMStage) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"model": stage.sharded_state_dict(metadata={**_METADATA, "dp_cp_group": group})}


def _identity(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model.model_dump(mode="json"),
        "steps_sha256": plan.data.steps_sha256 if plan.data is not None else None,
    }


def _open(directory: Path, plan: Plan) -> tuple[Path, dict[str, Any]]:
    step = latest_step(directory)
    if step is None:
        raise UserError(
            f"{directory}: holds no checkpoint ({TRACKER_FILE} is missing); --load takes the "
            "directory that an earlier run was given as --save"
        )
    path = checkpoint_path(directory, step)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise UserError(
            f"{path}: is not a whole checkpoint; put it back, or name an earlier one in "
            f"{directory / TRACKER_FILE}"
        )
    common = dist_checkpointing.load_common_state_dict(str(path))
    if "omnibal" not in common:
        raise UserError(f"{path}: is a checkpoint of another program; load one that this one saved")
    identity = common["omnibal"]
    different = _differences(identity["model"], _identity(plan)["model"], "in the plan")
    if different:
        raise UserError(
            f"{path}: is a checkpoint of another model: {'; '.join(different)}; load one of "
            f"{plan.model.name}, or plan for the model of the checkpoint"
        )
    return path, identity


def _differences(there: dict[str, Any], here: dict[str, Any], place: str) -> list[str]:
    """What two settings disagree on, nested ones included; a model's name is not its nature."""
    there, here = _flat(there), _flat(here)
    return [
        f"{name} is {there.get(name)} there and {here.get(name)} {place}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name) and name != "name"
    ]


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in settings.items():
        nested = _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else None
        flat.update(nested if nested is not None else {prefix + name: value})
    return flat


def _fill_empty_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Core describes optimizer state by what is there; torch's AdamW has none before a step."""
    for chained in optimizer.chained_optimizers:
        for group in chained.optimizer.param_groups:
            for parameter in group["params"]:
                state = chained.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
