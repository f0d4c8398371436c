"""A launch line's settings, independent of the trainer."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from omnibal.base.frozen import Frozen

# The trainer fails at start, fails at the first step, drops the flag silently, or runs.
Severity = Literal["refused", "refused-at-first-step", "ignored", "warning"]


class Launcher(StrEnum):
    """Trainer started by a launch line; determines flags and defaults."""

    MEGATRON_LM = "megatron-lm"
    MEGATRON_BRIDGE = "megatron-bridge"
    MS_SWIFT = "ms-swift"
    LOONGFORGE = "loongforge"
    AUTOMODEL = "automodel"
    LLM_FOUNDRY = "llm-foundry"
    NANOTRON = "nanotron"
    TORCHTITAN = "torchtitan"


# Trainers that run Megatron-LM's `validate_args`.
ARGPARSE = frozenset((Launcher.MEGATRON_LM, Launcher.LOONGFORGE))
# Trainers on Megatron-core, with rules. Lines of other trainers are only predicted.
MEGATRON = ARGPARSE | {Launcher.MEGATRON_BRIDGE, Launcher.MS_SWIFT}


class Launch(Frozen):
    """Sizes and switches of a launch line: None, or the default below, if not given."""

    launcher: Launcher
    flags: dict[str, str | None]  # as written, by name without dashes; None for a bare switch
    gpus: int | None = None  # processes, by torchrun's flags, the script's variables or --gpus
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None  # None for the launcher's default
    virtual: int | None = None  # virtual pipeline chunks per stage, from any of its flags
    layers_per_virtual_stage: int | None = None  # layers per chunk, instead of `virtual`
    sequence_parallel: bool = False
    first_layers: int | None = None  # language model layers of the first stage
    last_layers: int | None = None  # and of the last stage
    layout: str | tuple[tuple[str, ...], ...] | None = None  # a string, or chunks of words
    # LoongForge's list: by stage, or in model order of chunks if `is_by_chunk`.
    layers_by_stage: tuple[int, ...] | None = None
    is_by_chunk: bool = False
    account_for_embedding: bool = False  # the embedding counts as a layer of the split
    account_for_loss: bool = False  # the loss counts as a layer of the split
    recompute: Literal["full", "selective"] | None = None
    recompute_method: Literal["block", "uniform"] | None = None
    recompute_layers: int | None = None  # `block`: first layers of a chunk; `uniform`: of a unit
    recompute_by_stage: tuple[int, ...] | None = None  # LoongForge's list of `recompute_layers`
    recompute_modules: tuple[str, ...] = ()
    recompute_encoders: bool = False
    micro_batch: int | None = None  # samples or packs per micro-batch
    global_batch: int | None = None  # samples or packs per step
    sequence_length: int | None = None  # tokens per sample or pack
    prediction_layers: int | None = None  # layers of multi-token prediction
    frozen: tuple[str, ...] = ()  # frozen parts of the model
    environment: dict[str, str] = Field(default={})  # set before the command, or exported
    unknown: tuple[str, ...] = ()  # variables without value, in flags that are not used here


class Finding(Frozen):
    """Report of a rule that a launch line breaks."""

    rule: str  # stable short name, such as `layers-divide-stages`
    severity: Severity
    message: str  # problem, requirement and fix
    source: str  # file, line and version of the trainer's own check

    @property
    def is_refusal(self) -> bool:
        return self.severity in ("refused", "refused-at-first-step")
