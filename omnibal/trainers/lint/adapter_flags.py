"""Adapters that a launch line trains."""

import re

from omnibal.model.adapter_settings import ALL_LINEAR, AdapterConfig, adapter_mistake
from omnibal.model.config import ModelConfig
from omnibal.trainers.lint.launch_settings import Launcher
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
