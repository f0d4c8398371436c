"""The plan: the one planner result that training reads, as `plan.json` and `packs.parquet`.

A hand-written plan and a searched plan are the same type. `prediction` is for reports and may be
absent; everything training needs is in the other fields.
"""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from omnibal.config import MAX_LAYERS, ClusterConfig, Count, Frozen, ModelConfig, Part, Precision
from omnibal.data.lengths import LengthsOrigin
from omnibal.errors import UserError
from omnibal.files import read_json_model, write_json_model

SCHEMA_VERSION: Final = 1
PLAN_FILE = "plan.json"
PACKS_FILE = "packs.parquet"
LENGTHS_FILE = "lengths.parquet"
PROFILE_FILE = "profile.json"
"""The measured costs that the plan was made with; absent where costs were counted."""
MAX_DEVICES = 1_000_000
"""In any one direction of parallelism."""
MAX_PACKS_PER_STEP = 1_000_000
MAX_EPOCHS = 1_000
"""Each is packed anew, before the first is trained."""
MAX_SEED = 2**63 - 1
USABLE_MEMORY_FRACTION = 0.9
"""Of a device; the rest is for the runtime's context, communication buffers and fragmentation."""


Size = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
HeldLayers = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
PackedBy = Literal["balanced", "isf", "other"]
"""The rule of `omnibal plan` that made the packs, or none of them."""


class Parallel(Frozen):
    """Sizes of the parallel groups; the launch needs tensor x pipeline x data processes."""

    tensor: Size = 1
    pipeline: Size
    data: Size = 1
    sequence_parallel: bool = False
    """Divide the language model's tensors between parallel blocks over tensor ranks too."""

    @model_validator(mode="after")
    def _sequence_needs_tensor(self) -> "Parallel":
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel needs a tensor size of at least 2")
        return self

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data


class Stage(Frozen):
    """A contiguous run of the model's units, in model order.

    The units are: vision embed, vision layers, projector, language embed, language layers, head.
    """

    vision_embed: bool
    vision_layers: HeldLayers
    projector: bool
    language_embed: bool
    language_layers: HeldLayers
    head: bool
    recompute_vision: tuple[HeldLayers, ...] = ()
    """Vision layers (numbered from 0 over the whole model) whose activations are recomputed."""
    recompute_language: tuple[HeldLayers, ...] = ()
    """Language layers (numbered from 0 over the whole model) that are recomputed."""

    @classmethod
    def whole(cls, vision_layers: int, language_layers: int) -> "Stage":
        """All kinds of unit, and so many layers of each tower."""
        return cls(
            vision_embed=True,
            vision_layers=vision_layers,
            projector=True,
            language_embed=True,
            language_layers=language_layers,
            head=True,
        )

    @property
    def parts(self) -> frozenset[Part]:
        """Parts of the model that have a unit in this stage."""
        held = {
            Part.VISION: self.vision_embed or self.vision_layers,
            Part.PROJECTOR: self.projector,
            Part.LANGUAGE: self.language_embed or self.language_layers or self.head,
        }
        return frozenset(part for part, units in held.items() if units)

    @property
    def recomputed_layers(self) -> int:
        """Of both towers."""
        return len(self.recompute_vision) + len(self.recompute_language)


class Caps(Frozen):
    """Upper limits of one micro-batch."""

    max_tiles: Count
    max_tokens: Count


class Shapes(Frozen):
    """Size and number of the micro-batches of a step."""

    caps: Caps
    micro_batches_per_step: Count
    """Packs of one data-parallel rank in a full step, at most; one step of an epoch may differ."""


class DataPlan(Shapes):
    """What the packs were made from, so that training can refuse anything else."""

    method: PackedBy
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)]
    epochs: Annotated[int, Field(ge=1, le=MAX_EPOCHS)]
    packs_per_step: Count
    """Of all ranks together, in every step of an epoch but one."""
    samples: Count
    packs: Count
    steps: Count
    lengths_sha256: str
    packs_sha256: str
    steps_sha256: str
    """Of the packs of every step, whatever ranks train them: runs with equal ones can go on as
    each other."""
    origin: LengthsOrigin | None


class StageMemory(Frozen):
    """Predicted memory of one device of the stage, at the moment of its peak."""

    weights_gib: NonNegativeFloat
    gradients_gib: NonNegativeFloat
    optimizer_gib: NonNegativeFloat
    activations_gib: NonNegativeFloat
    """Of all micro-batches in flight."""
    transient_gib: NonNegativeFloat
    """Working memory of the largest unit, on top of what is kept."""

    @property
    def peak_gib(self) -> float:
        return (
            self.weights_gib
            + self.gradients_gib
            + self.optimizer_gib
            + self.activations_gib
            + self.transient_gib
        )


class LostTime(Frozen):
    """Where the time of a mean step goes: it all adds up to the step, in ms.

    Every entry is what the simulated step loses when one cause more is taken away, in this order.
    One may be slightly negative: unequal stages can suit few micro-batches better than equal ones.
    """

    rank_imbalance_ms: float
    """Waiting for the slowest data-parallel rank."""
    communication_ms: float
    """Between stages as far as anyone waits for it, within tensor-parallel groups, and the
    reduction of gradients."""
    weight_update_ms: float
    recompute_ms: float
    padding_ms: float
    """Work on attention heads that are there to be divided over tensor-parallel ranks."""
    stage_imbalance_ms: float
    """Stages that take longer than others."""
    bubble_ms: float
    """Filling and draining the pipeline, and micro-batches that differ."""
    ideal_ms: float
    """What is left: the needed work, spread evenly over all devices without waiting."""

    def named(self) -> dict[str, float]:
        """The entries from the ideal up, by their names in words."""
        entries = reversed(list(self))
        return {name.removesuffix("_ms").replace("_", " "): ms for name, ms in entries}


class StagePrediction(Frozen):
    """Mean times per micro-batch over the planned packs, and memory."""

    forward_ms: NonNegativeFloat
    backward_ms: NonNegativeFloat
    """Includes recomputation."""
    wait_fraction: Annotated[float, Field(ge=0, le=1)]
    """Share of the step in which the stage neither computes nor updates weights."""
    memory: StageMemory


class Prediction(Frozen):
    """What the simulator says of the plan on its own packs."""

    cost_source: str
    """"analytic:<cluster>" or "profile:<device>, <n> processes"."""
    step_ms: NonNegativeFloat
    """Mean over the simulated steps."""
    lost: LostTime
    bubble_fraction: Annotated[float, Field(ge=0, le=1)]
    """Share of device time spent waiting, mean over stages and steps."""
    samples_per_second_per_gpu: NonNegativeFloat | None
    """None, as `gpu_days`, for a plan of shapes only."""
    gpu_days: NonNegativeFloat | None
    """For all planned epochs."""
    stages: tuple[StagePrediction, ...]

    @property
    def ideal_step_ms(self) -> float:
        """The same computation, without anything lost."""
        return self.lost.ideal_ms


class Plan(Frozen):
    """Everything needed to build and feed the training job."""

    schema_version: Literal[1] = SCHEMA_VERSION
    model: ModelConfig
    precision: Precision
    parallel: Parallel
    frozen: tuple[Part, ...] = ()
    """Parts of the model that are not trained."""
    stages: tuple[Stage, ...]
    cluster: ClusterConfig
    data: DataPlan | None
    """None for a plan of shapes only, which cannot be trained."""
    shapes: Shapes | None = None
    """Of a plan of shapes only: every micro-batch is at the caps, each step is full."""
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _trains_something(self) -> "Plan":
        if len(set(self.frozen)) != len(self.frozen) or len(self.frozen) == len(Part):
            raise ValueError(
                f"frozen names {', '.join(self.frozen)}; it must name each part at most once and "
                "leave one to train"
            )
        return self

    def gradient_crosses(self, cut: int) -> bool:
        """Whether anything in stages 0 to `cut` is trained: the gradient of what crosses from
        `cut` to the next stage is then wanted."""
        return any(stage.parts - set(self.frozen) for stage in self.stages[: cut + 1])

    @model_validator(mode="after")
    def _predicts_every_stage(self) -> "Plan":
        if self.prediction is not None and len(self.prediction.stages) != len(self.stages):
            raise ValueError(
                f"prediction.stages has {len(self.prediction.stages)} entries for "
                f"{len(self.stages)} stages; the two must be equally many: remove `prediction`"
            )
        return self


def memory_cap_gib(cluster: ClusterConfig) -> float:
    """What a stage may fill of one device."""
    return USABLE_MEMORY_FRACTION * cluster.memory_gib


def check_packs_per_step(data_parallel: int, micro_batches: int) -> None:
    """Refuse a step of more packs than anyone trains or this program can deal out.

    Raises:
        UserError: there are too many.
    """
    count = data_parallel * micro_batches
    if count > MAX_PACKS_PER_STEP:
        raise UserError(
            f"a step of {data_parallel:,} ranks with {micro_batches:,} micro-batches each has "
            f"{count:,} packs; it may have at most {MAX_PACKS_PER_STEP:,}: give fewer "
            "micro-batches or ranks"
        )


def plan_files(directory: Path) -> list[Path]:
    """Every file of a plan directory, whether it exists or not."""
    return [directory / name for name in (PLAN_FILE, PACKS_FILE, LENGTHS_FILE, PROFILE_FILE)]


def write_plan(plan: Plan, directory: Path) -> None:
    """Write `plan.json`: sorted keys, no timestamps, so equal plans are equal bytes."""
    write_json_model(plan, directory / PLAN_FILE)


def read_plan(directory: Path) -> Plan:
    """Read `plan.json` of a plan directory.

    Raises:
        UserError: the directory holds no plan, or the plan does not follow the schema.
    """
    remedy = f"make the plan anew with `omnibal plan ... -o {directory}`"
    return read_json_model(Plan, directory / PLAN_FILE, remedy)
