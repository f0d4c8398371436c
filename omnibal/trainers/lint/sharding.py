"""ZeRO stage of a launch line: the state that its data-parallel ranks shard."""

from enum import IntEnum

from omnibal.base.errors import UserError
from omnibal.trainers.lint.launch_settings import ARGPARSE, MEGATRON, Launcher
from omnibal.trainers.lint.line import LaunchLine


class ZeroStage(IntEnum):
    """State sharded by data-parallel ranks (ZeRO, arXiv 1910.02054, section 5)."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2  # gradients and optimizer state
    WEIGHTS = 3  # weights, gradients and optimizer state


_MEGATRON_FSDP = "data-parallel-sharding-strategy"
_COMPOSER = "fsdp-config.sharding-strategy"
_NANOTRON = "zero-stage"
_ZERO_STAGES = {  # by value of each flag, its default first
    _MEGATRON_FSDP: {
        "no_shard": ZeroStage.NOTHING,
        "optim": ZeroStage.OPTIMIZER,
        "optim_grads": ZeroStage.GRADIENTS,
        "optim_grads_params": ZeroStage.WEIGHTS,
    },
    _NANOTRON: {"0": ZeroStage.NOTHING, "1": ZeroStage.OPTIMIZER},
    _COMPOSER: {
        "FULL_SHARD": ZeroStage.WEIGHTS,
        "HYBRID_SHARD": ZeroStage.WEIGHTS,
        "SHARD_GRAD_OP": ZeroStage.GRADIENTS,
        "NO_SHARD": ZeroStage.NOTHING,
    },
}
_REPLICA_FLAGS = ("parallelism.data-parallel-replicate-degree", "distributed.dp-replicate-size")


def zero_stage(line: LaunchLine) -> ZeroStage:
    """Return the line's ZeRO stage, by its flags or its trainer's default. Raise if unknown."""
    launcher = line.launch.launcher
    if launcher is Launcher.NANOTRON:
        return _stage_by_flag(line, _NANOTRON)
    if launcher is Launcher.LLM_FOUNDRY:
        return _stage_by_flag(line, _COMPOSER)
    if launcher not in MEGATRON or line.on("use-torch-fsdp2"):
        return ZeroStage.WEIGHTS
    if line.on("use-megatron-fsdp"):
        return _stage_by_flag(line, _MEGATRON_FSDP)
    return ZeroStage(line.on("use-distributed-optimizer", default=launcher not in ARGPARSE))


def weight_shards(line: LaunchLine, data: int) -> int:
    """Return how many of a stage's `data` ranks (DP x CP) shard gradients or weights."""
    if zero_stage(line) < ZeroStage.GRADIENTS:
        return 1
    replicas = next(filter(None, map(line.number, _REPLICA_FLAGS)), 1)
    if line.text(_COMPOSER) == "HYBRID_SHARD":  # shards within nodes, of 8 GPUs
        replicas = max(data // 8, 1)
    if data % replicas:
        raise UserError(
            f"{replicas} replicas of weights do not divide {data} data-parallel ranks; correct the "
            "number of replicas"
        )
    return data // replicas


def _stage_by_flag(line: LaunchLine, flag: str) -> ZeroStage:
    stages = _ZERO_STAGES[flag]
    given = line.text(flag) or next(iter(stages))
    if given not in stages:
        raise UserError(f"--{flag} must be {' or '.join(stages)}, got {given}; correct it")
    return stages[given]
