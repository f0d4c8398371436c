"""Adapters that a launch line trains."""

import re

from omnibal.model.adapter_settings import ALL_LINEAR, AdapterConfig, adapter_mistake
from omnibal.model.config import ModelConfig
from omnibal.trainers.lint.launch_settings import Launcher
from omnibal.trainers.lint.line import Line

_KINDS = ("lora", "longlora", "adalora", "dora", "peft")
_KIND_FLAGS = ("tuner-type", "train-type", "peft-scheme", "task", "finetuning", "peft")
"""Flags for adapters: of ms-swift, recipes and their performance scripts."""
_RANK_FLAGS = ("lora-rank", "peft.dim", "lora-dim")
_TARGET_FLAGS = ("target-modules", "peft.target_modules", "lora-target-modules")
_DEFAULT_RANK = 8
"""Default of ms-swift 4.6.0 (`swift/arguments/tuner_args.py`)."""
_BRIDGE_RANK = 32


def is_adapter(line: Line) -> bool:
    """Return whether the line trains adapters of a frozen model."""
    kinds = map(line.text, _KIND_FLAGS)
    is_named = any(kind is not None and kind.lower() in _KINDS for kind in kinds)
    return is_named or any(name.startswith("peft.") for name in line.flags)


def adapters_of_line(line: Line, model: ModelConfig) -> AdapterConfig | None:
    """Return the line's language model adapters, or None; unknown modules mean all linears."""
    if not is_adapter(line):
        return None
    is_bridge = line.launch.launcher is Launcher.MEGATRON_BRIDGE
    ranks = (rank for rank in map(line.number, _RANK_FLAGS) if rank and rank > 0)
    rank = next(ranks, _BRIDGE_RANK if is_bridge else _DEFAULT_RANK)
    adapters = AdapterConfig(rank=rank, alpha=rank, experts=True)
    names = tuple(re.findall(r"[\w.-]+", line.text(*_TARGET_FLAGS) or ""))
    if names and ALL_LINEAR not in names:
        named = adapters.model_copy(update={"targets": names, "experts": False})
        if adapter_mistake(model, (), named) is None:
            return named
    return adapters
