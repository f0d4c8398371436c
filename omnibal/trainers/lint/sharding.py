"""How a line's data-parallel ranks share weights, gradients and optimizer state."""

from enum import IntEnum

from omnibal.base.errors import UserError
from omnibal.trainers.lint.launch_settings import ARGPARSE, MEGATRON, Launcher
from omnibal.trainers.lint.line import Line


class ZeroStage(IntEnum):
    """What data-parallel ranks shard (Rajbhandari et al. 2020, arXiv 1910.02054, section 5)."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    """Gradients and optimizer state."""
    WEIGHTS = 3
    """Weights, gradients and optimizer state."""


_MEGATRON_FSDP = "data-parallel-sharding-strategy"
_COMPOSER = "fsdp-config.sharding-strategy"
_NANOTRON = "zero-stage"
_STAGES = {
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
"""Values of each flag, its default first."""
_COPIES = ("parallelism.data-parallel-replicate-degree", "distributed.dp-replicate-size")


def zero_stage(line: Line) -> ZeroStage:
    """Return what the line's data-parallel ranks shard."""
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


def weight_shards(line: Line, data: int) -> int:
    """Return how many of the `data` ranks of a stage (DP x CP) shard every weight; 1: none."""
    if zero_stage(line) < ZeroStage.GRADIENTS:
        return 1
    copies = next(filter(None, map(line.number, _COPIES)), 1)
    if line.text(_COMPOSER) == "HYBRID_SHARD":
        copies = max(data // 8, 1)
    if data % copies:
        raise UserError(
            f"{copies} replicas of weights were given, which must divide the {data} data-parallel "
            "ranks: correct it"
        )
    return data // copies


def _stage_by_flag(line: Line, flag: str) -> ZeroStage:
    stages = _STAGES[flag]
    given = line.text(flag) or next(iter(stages))
    if given not in stages:
        raise UserError(f"--{flag} {given}: must be one of {', '.join(stages)}; correct it")
    return stages[given]
