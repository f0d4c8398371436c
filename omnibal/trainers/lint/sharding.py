"""How a line's data-parallel ranks share weights, gradients and optimizer state."""

from enum import IntEnum

from omnibal.base.errors import UserError
from omnibal.trainers.lint.launch import MEGATRON, Launcher
from omnibal.trainers.lint.line import ARGPARSE, Line


class ZeroStage(IntEnum):
    """What data-parallel ranks shard (Rajbhandari et al. 2020, arXiv 1910.02054, section 5)."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    """Gradients and optimizer state."""
    WEIGHTS = 3
    """Weights, gradients and optimizer state."""


_MEGATRON_STAGES = {
    "no_shard": ZeroStage.NOTHING,
    "optim": ZeroStage.OPTIMIZER,
    "optim_grads": ZeroStage.GRADIENTS,
    "optim_grads_params": ZeroStage.WEIGHTS,
}
"""`--data-parallel-sharding-strategy` of Megatron-FSDP."""
_FSDP_STAGES = {
    "NO_SHARD": ZeroStage.NOTHING,
    "SHARD_GRAD_OP": ZeroStage.GRADIENTS,
    "FULL_SHARD": ZeroStage.WEIGHTS,
    "HYBRID_SHARD": ZeroStage.WEIGHTS,
}
"""`fsdp_config.sharding_strategy` of Composer."""
_COPIES = ("parallelism.data_parallel_replicate_degree", "distributed.dp_replicate_size")


def zero_stage(line: Line) -> ZeroStage:
    """What the line's data-parallel ranks shard."""
    launcher = line.launch.launcher
    if launcher in MEGATRON:
        if line.on("use-torch-fsdp2"):
            return ZeroStage.WEIGHTS
        if line.on("use-megatron-fsdp"):
            return _named(line, "data-parallel-sharding-strategy", "no_shard", _MEGATRON_STAGES)
        is_default = launcher not in ARGPARSE
        return ZeroStage(line.on("use-distributed-optimizer", default=is_default))
    if launcher is Launcher.NANOTRON:
        stages = {str(stage.value): stage for stage in (ZeroStage.NOTHING, ZeroStage.OPTIMIZER)}
        return _named(line, "zero-stage", "0", stages)
    if launcher is Launcher.LLM_FOUNDRY:
        return _named(line, "fsdp-config.sharding-strategy", "FULL_SHARD", _FSDP_STAGES)
    return ZeroStage.WEIGHTS


def weight_shards(line: Line, data: int) -> int:
    """Data-parallel ranks that shard every weight, 1 if replicated.

    Args:
        data: data- and context-parallel ranks of a stage.
    """
    if zero_stage(line) < ZeroStage.GRADIENTS:
        return 1
    copies = next(filter(None, map(line.number, map(_canonical, _COPIES))), 1)
    if line.text("fsdp-config.sharding-strategy") == "HYBRID_SHARD":
        copies = max(data // 8, 1)
    if data % copies:
        raise UserError(
            f"{copies} replicas of weights were given, which must divide the {data} data-parallel "
            "ranks: correct it"
        )
    return data // copies


def _canonical(name: str) -> str:
    return name.replace("_", "-")


def _named(line: Line, flag: str, usual: str, stages: dict[str, ZeroStage]) -> ZeroStage:
    given = line.text(flag) or usual
    if given not in stages:
        raise UserError(f"--{flag} {given}: must be one of {', '.join(stages)}; correct it")
    return stages[given]
