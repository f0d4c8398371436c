"""A launch line's settings, independent of the trainer."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from omnibal.base.frozen import Frozen

Severity = Literal["refused", "refused-at-first-step", "ignored", "warning"]
"""The trainer fails at start, fails at the first step, drops the flag silently, or runs."""


class Launcher(StrEnum):
    """Program started by a launch line, which determines flags and defaults."""

    MEGATRON_LM = "megatron-lm"
    MEGATRON_BRIDGE = "megatron-bridge"
    MS_SWIFT = "ms-swift"
    LOONGFORGE = "loongforge"
    AUTOMODEL = "automodel"
    LLM_FOUNDRY = "llm-foundry"
    NANOTRON = "nanotron"
    TORCHTITAN = "torchtitan"


ARGPARSE = frozenset((Launcher.MEGATRON_LM, Launcher.LOONGFORGE))
"""Trainers that run Megatron-LM's `validate_args`."""
MEGATRON = ARGPARSE | {Launcher.MEGATRON_BRIDGE, Launcher.MS_SWIFT}
"""Trainers on Megatron-core, whose checks are known; others' lines are only predicted."""


class Launch(Frozen):
    """Sizes and switches of a launch line, or None if not given."""

    launcher: Launcher
    flags: dict[str, str | None]
    """Every flag as written, by name without dashes, or None for a switch without a value."""
    gpus: int | None = None
    """Processes, by torchrun's flags, the script's variables or --gpus."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Expert tensor-parallel size, or None for the launcher's default."""
    virtual: int | None = None
    """Virtual pipeline chunks per stage, from any of its flags."""
    layers_per_virtual_stage: int | None = None
    sequence_parallel: bool = False
    first_layers: int | None = None
    last_layers: int | None = None
    layout: str | tuple[tuple[str, ...], ...] | None = None
    """Layers by stage and chunk, as a string or lists of words."""
    layers_by_stage: tuple[int, ...] | None = None
    """Layers by stage of `--custom-pipeline-layers`; by chunk, chunk-major, if `is_by_chunk`."""
    is_by_chunk: bool = False
    account_for_embedding: bool = False
    account_for_loss: bool = False
    recompute: Literal["full", "selective"] | None = None
    recompute_method: Literal["block", "uniform"] | None = None
    recompute_layers: int | None = None
    recompute_by_stage: tuple[int, ...] | None = None
    recompute_modules: tuple[str, ...] = ()
    recompute_encoders: bool = False
    micro_batch: int | None = None
    """Samples or packs per micro-batch."""
    global_batch: int | None = None
    """Samples or packs per step."""
    sequence_length: int | None = None
    """Tokens per sample or pack."""
    prediction_layers: int | None = None
    frozen: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    """Variables set before the command, or exported by its script."""
    unknown: tuple[str, ...] = ()
    """Variables of the line with unknown values, not used by sizes or switches above."""


class Finding(Frozen):
    """A problem of a launch line, or a remark."""

    rule: str
    """Stable short name, such as `layers-divide-stages`."""
    severity: Severity
    message: str
    """Problem, requirement and fix."""
    source: str
    """File, line and version of the trainer's own check."""

    @property
    def is_refusal(self) -> bool:
        return self.severity in ("refused", "refused-at-first-step")
