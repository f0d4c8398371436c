"""Weights of a launch line: trained adapters, the ZeRO stage, and FP8 settings."""

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple, get_args

from omnibal.base.errors import UserError
from omnibal.model.adapter_settings import ALL_LINEAR, AdapterConfig, adapter_mistake
from omnibal.model.config import ModelConfig, Precision
from omnibal.model.fp8 import TRAINED_FP8, Fp8, Fp8Recipe
from omnibal.trainers.lint.launch_settings import ARGPARSE, MEGATRON, Launcher
from omnibal.trainers.lint.line import LaunchLine

_ADAPTER_KINDS = ("lora", "longlora", "adalora", "dora", "peft")
# Flags of ms-swift, of Bridge's recipes and of their performance scripts.
_KIND_FLAGS = ("tuner-type", "train-type", "peft-scheme", "task", "finetuning", "peft")
_RANK_FLAGS = ("lora-rank", "peft.dim", "lora-dim")
_TARGET_FLAGS = ("target-modules", "peft.target_modules", "lora-target-modules")
_DEFAULT_RANK = 8  # default of ms-swift 4.6.0 (`swift/arguments/tuner_args.py`)
_BRIDGE_DEFAULT_RANK = 32


def is_adapter(line: LaunchLine) -> bool:
    """Return whether the line trains adapters."""
    kinds = map(line.text, _KIND_FLAGS)
    is_named = any(kind is not None and kind.lower() in _ADAPTER_KINDS for kind in kinds)
    return is_named or any(name.startswith("peft.") for name in line.flags)


def adapters_of_line(line: LaunchLine, model: ModelConfig) -> AdapterConfig | None:
    """Return the line's adapters of the language model, or None for full training."""
    if not is_adapter(line):
        return None
    is_bridge = line.launch.launcher is Launcher.MEGATRON_BRIDGE
    ranks = (rank for rank in map(line.number, _RANK_FLAGS) if rank and rank > 0)
    rank = next(ranks, _BRIDGE_DEFAULT_RANK if is_bridge else _DEFAULT_RANK)
    adapters = AdapterConfig(rank=rank, alpha=rank, experts=True)
    # Unknown modules, as of fused linears, are predicted as all linears.
    names = tuple(re.findall(r"[\w.-]+", line.text(*_TARGET_FLAGS) or ""))
    if names and ALL_LINEAR not in names:
        named = adapters.model_copy(update={"targets": names, "experts": False})
        if adapter_mistake(model, (), named) is None:
            return named
    return adapters


class ZeroStage(IntEnum):
    """State sharded by data-parallel ranks (ZeRO, arXiv 1910.02054, section 5)."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2  # gradients and optimizer state
    WEIGHTS = 3  # weights, gradients and optimizer state


_COMPOSER = "fsdp-config.sharding-strategy"
_ZERO_STAGES = {  # by value of each flag, its default first
    "data-parallel-sharding-strategy": {
        "no_shard": ZeroStage.NOTHING,
        "optim": ZeroStage.OPTIMIZER,
        "optim_grads": ZeroStage.GRADIENTS,
        "optim_grads_params": ZeroStage.WEIGHTS,
    },
    "zero-stage": {"0": ZeroStage.NOTHING, "1": ZeroStage.OPTIMIZER},
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
    flag = {Launcher.NANOTRON: "zero-stage", Launcher.LLM_FOUNDRY: _COMPOSER}.get(launcher)
    if flag is None and (launcher not in MEGATRON or line.on("use-torch-fsdp2")):
        return ZeroStage.WEIGHTS
    if line.on("use-megatron-fsdp"):
        flag = flag or "data-parallel-sharding-strategy"
    if flag is None:
        return ZeroStage(line.on("use-distributed-optimizer", default=launcher not in ARGPARSE))
    stages = _ZERO_STAGES[flag]
    given = line.text(flag) or next(iter(stages))
    if given not in stages:
        raise UserError(f"--{flag} must be {' or '.join(stages)}, got {given}; correct it")
    return stages[given]


def weight_shards(line: LaunchLine, data: int) -> int:
    """Return how many of a stage's `data` ranks (DP x CP) shard gradients or weights."""
    if zero_stage(line) < ZeroStage.GRADIENTS:
        return 1
    replicas = next(filter(None, map(line.number, _REPLICA_FLAGS)), 1)
    if line.text(_COMPOSER) == "HYBRID_SHARD":  # shards within nodes, of 8 GPUs
        replicas = max(data // 8, 1)
    if data % replicas:
        raise UserError(f"{replicas} replicas do not divide {data} data-parallel ranks; mend them")
    return data // replicas


_FP8_RECIPES: dict[str, Fp8Recipe] = {recipe: recipe for recipe in get_args(Fp8Recipe)}


class _NamedPrecision(NamedTuple):
    """FP8 settings of a named mixed precision of Megatron-Bridge."""

    recipe: Fp8Recipe
    keeps_bf16_weights: bool = False
    bf16_ends: int = 0  # bf16 layers at each end of the model


# src/megatron/bridge/training/mixed_precision.py
_BRIDGE_NAMES: dict[str, _NamedPrecision] = {
    "bf16_with_fp8_delayed_scaling_mixed": _NamedPrecision("delayed"),
    "bf16_with_mxfp8_mixed": _NamedPrecision("mxfp8"),
    "bf16_with_fp8_current_scaling_mixed": _NamedPrecision("tensorwise", bf16_ends=1),
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": _NamedPrecision("tensorwise", bf16_ends=2),
    "nanov2_bf16_with_fp8_current_scaling_mixed": _NamedPrecision("blockwise", bf16_ends=2),
    "bf16_with_fp8_subchannel_scaling_mixed": _NamedPrecision("blockwise", keeps_bf16_weights=True),
}
_BRIDGE_TYPES = {  # of `--compute_dtype` of Bridge's performance scripts
    "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_mx": "bf16_with_mxfp8_mixed",
    "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8_sc": "bf16_with_fp8_subchannel_scaling_mixed",
}
_PLAIN_TYPES = ("", "bf16", "fp16", "fp32", "bf16_mixed", "fp16_mixed")


def _find_name(line: LaunchLine) -> str:
    """Return the line's mixed precision: a name of Bridge, a compute type, or an empty string."""
    kind, recipe = ((line.text(name) or "").lower() for name in ("compute-dtype", "fp8-recipe"))
    if kind == "fp8":  # then the recipe is the type's suffix, such as `cs`
        kind = f"fp8_{recipe}" if f"fp8_{recipe}" in _BRIDGE_TYPES else "fp8_ds"
    name = line.text("mixed-precision") or _BRIDGE_TYPES.get(kind, kind)
    return name.lower().replace("-", "_")


def precision_of(line: LaunchLine) -> tuple[Precision, Fp8]:
    """Return the precision to predict, "bf16" or "fp8", and the FP8 recipe."""
    named = _BRIDGE_NAMES.get(_find_name(line))
    if named is None and line.text("fp8-format", "fp8") is None:
        return "bf16", TRAINED_FP8
    is_bridge = line.launch.launcher is Launcher.MEGATRON_BRIDGE
    # Core's flags default to delayed scaling, Bridge's `MixedPrecisionConfig` to tensorwise.
    usual = named.recipe if named else "tensorwise" if is_bridge else "delayed"
    unknown = named.recipe if named else "tensorwise"
    recipe = _FP8_RECIPES.get(line.text("fp8-recipe") or usual, unknown)
    gathers = named is not None and not named.keeps_bf16_weights
    for flag in ("fp8-param-gather", "fp8-param"):
        gathers = line.on(flag, default=gathers)
    return "fp8", Fp8(recipe=recipe, keeps_bf16_weights=not gathers)


def notes_on_precision(line: LaunchLine) -> Iterator[str]:
    """Yield notes on precisions that are approximated or not counted."""
    if line.text("fp4", "fp4-format"):
        yield "FP4 is not counted: products and activations are predicted in bf16"
    name = _find_name(line)
    if name not in _BRIDGE_NAMES and name not in _PLAIN_TYPES:
        yield f"precision {name} is not known here: products are predicted in bf16"
    precision, fp8 = precision_of(line)
    if precision != "fp8":
        return
    recipe = line.text("fp8-recipe")
    known = (*_FP8_RECIPES, *(kind.removeprefix("fp8_") for kind in _BRIDGE_TYPES))
    if recipe is not None and recipe.lower() not in known:
        yield f"FP8 recipe {recipe} is predicted as {fp8.recipe}"
    ends = _count_bf16_layers(line)
    if ends:
        yield f"{ends} language layers stay in bf16, predicted in FP8: the line takes longer"
    if line.on("fp8-dot-product-attention") or line.on("fp8-multi-head-attention"):
        yield "attention is predicted in bf16, and the line computes it in FP8"
    if line.on("no-fp8-wgrad"):
        yield "gradients of weights are predicted in FP8, and the line computes them in bf16"


def _count_bf16_layers(line: LaunchLine) -> int:
    """Return the number of bf16 layers at both ends together, under FP8."""
    named = _BRIDGE_NAMES.get(_find_name(line))
    usual = named.bf16_ends if named is not None else 0
    if "first-last-layers-bf16" in line.flags:
        usual = (usual or 1) if line.on("first-last-layers-bf16") else 0  # core's default is 1
    if not usual:
        return 0
    given = [line.number(f"num-layers-at-{end}-in-bf16") for end in ("start", "end")]
    return sum(usual if number is None else number for number in given)
