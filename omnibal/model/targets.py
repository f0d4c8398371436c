"""Supported trainers and their constraints on plans; docs/trainers.md lists sources."""

from collections.abc import Collection, Iterator
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from omnibal.base.errors import UserError
from omnibal.base.frozen import Frozen
from omnibal.model.config import ModelConfig
from omnibal.model.limits import words
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.model.runtime import OWN_RUNTIME, RuntimeOptions


class TargetName(StrEnum):
    """Name of a trainer on the command line and in plan.json."""

    MS_SWIFT = "ms-swift"
    MS_SWIFT_DEEPSPEED = "ms-swift-deepspeed"
    XTUNER = "xtuner"
    MEGATRON_LM = "megatron-lm"
    MEGATRON_BRIDGE = "megatron-bridge"


class RecomputeFreedom(StrEnum):
    """Granularity of recomputation, from finest to coarsest."""

    LAYERS = "layers"  # any layers of any stage
    STAGES = "stages"  # one number n per stage: first min(n, held) layers of every tower
    LANGUAGE = "language"
    """One n for the language model: first min(n, held) per stage; encoders all or none."""
    ALL = "all"  # all language layers or none. All layers of an encoder or none


class StageRules(Frozen):
    """Constraints on stages, recomputation and encoder division."""

    encoders_on_first: bool = False
    """Whether the first stage must hold all encoders and the language embed."""
    encoders_whole: bool = False
    """Whether encoders are replicated on tensor-parallel ranks instead of divided."""
    head_on_all_tokens: bool = False
    """Whether the head also computes logits of tokens without loss (Megatron, Transformers)."""
    language_everywhere: bool = False  # whether every stage must hold a language layer
    recompute: RecomputeFreedom = RecomputeFreedom.LAYERS

    @property
    def is_free(self) -> bool:
        """Whether stages are unconstrained; encoder division and head tokens only affect cost."""
        costs = {"encoders_whole": False, "head_on_all_tokens": False}
        return self.model_copy(update=costs) == FREE


FREE = StageRules()  # no constraints, as in this project's trainer


class Padding(StrEnum):
    """Condition under which packs are padded to the longest."""

    NOWHERE = "nowhere"
    PIPELINES = "pipelines"  # with several stages, which exchange micro-batches of equal length
    EVERYWHERE = "everywhere"

    def applies(self, pipeline: int) -> bool:
        """Whether packs are padded with `pipeline` stages."""
        return self is Padding.EVERYWHERE or (self is Padding.PIPELINES and pipeline > 1)


class PackRules(Frozen):
    """Constraints on packs."""

    tokens_alone: bool = False  # whether packs are limited by tokens only, not by encoder items
    next_fit: bool = False
    """Whether the trainer packs samples itself by next-fit in the plan's order."""
    one_medium: bool = False
    """Whether text-only samples and samples with items must not share a pack."""
    padded: Padding = Padding.NOWHERE
    full_steps: bool = False
    """Whether every step has equally many packs and the remainder is dropped."""


ANY_PACKS = PackRules()  # no constraints, as in this project's trainer


class TrainerConstraints(Frozen):
    """Constraints and step options of a trainer; defaults are this project's."""

    name: TargetName | None = None  # None for this project's own
    title: str = "OmniBal"  # name as its users write it
    version: str = ""  # version or commit that was read, empty for this project's own
    stages: StageRules = StageRules()
    packs: PackRules = PackRules()
    shardings: tuple[WeightSharding, ...] = tuple(WeightSharding)  # supported weight shardings
    runtime: RuntimeOptions = OWN_RUNTIME  # default step options if an export does not set them
    schedules: frozenset[str] = frozenset({"1f1b"})
    """Supported pipeline schedules (`omnibal.pipeline.schedules.ScheduleName`)."""
    fills_groups: bool = True
    """Whether interleaving needs a multiple of the stages as number of micro-batches, as
    Megatron-core (`core/pipeline_parallel/schedules.py:995-1015` of 0.16.1) by default."""
    most_pipeline: Annotated[int | None, Field(ge=1)] = None
    """Max pipeline stages, or None if unlimited."""
    most_tensor: Annotated[int | None, Field(ge=1)] = None
    tensor_across_nodes: bool = False
    """Whether tensor-parallel ranks may be on several nodes, as in a launch line that says so."""
    has_experts: bool = True  # whether expert parallelism is supported
    has_adapters: bool = False  # whether exports include adapter flags for a frozen language model
    has_alibi: bool = True  # whether positions may be ALiBi's, which Megatron-core 0.16.1 has not

    @property
    def always_shards(self) -> bool:
        """Whether weights are always sharded over all data-parallel ranks."""
        return self.shardings == _FULLY

    def held(self, parallel: Parallel) -> Parallel:
        """Return sizes with the trainer's default sharding."""
        if not self.always_shards or parallel.sharded > 1:
            return parallel
        return parallel.model_copy(update={"sharded": parallel.data})

    def model_obstacle(self, model: ModelConfig) -> str | None:
        """Explain why the trainer cannot build a model, or return None."""
        if self.has_alibi or model.language.positions != "alibi":
            return None
        return f"{model.name} has ALiBi positions, and {self.title} has none"

    def check_shardings(self, shardings: Collection[WeightSharding]) -> None:
        """Raise unless the trainer supports any of these shardings."""
        if not set(shardings).intersection(self.shardings):
            raise UserError(
                f"--sharding {', '.join(shardings)} was given for {self.title}, whose weights are "
                f"{' or '.join(self.shardings)}: leave it out, or give one of these"
            )

    def schedule_obstacle(self, name: str, stages: int, micro_batches: int) -> str | None:
        """Explain why a schedule with these micro-batches per rank cannot run, or return None."""
        if name not in self.schedules:
            return f"{self.title} runs {words(sorted(self.schedules))}"
        if name == "interleaved" and self.fills_groups and micro_batches % stages:
            return (
                f"a step has {micro_batches} micro-batches a rank, and {self.title} interleaves "
                f"multiples of the {stages} pipeline stages"
            )
        return None

    def limit_sizes(self, parallel: Parallel) -> Iterator[tuple[str, str, int, int]]:
        """Yield option, name, value and limit of every size that the trainer does not support."""
        most_expert = None if self.has_experts else 1
        for option, name, size, most in (
            ("--pp", "pipeline", parallel.pipeline, self.most_pipeline),
            ("--tp", "tensor-parallel", parallel.tensor, self.most_tensor),
            ("--ep", "expert-parallel", parallel.expert, most_expert),
        ):
            if most is not None and size > most:
                yield option, name, size, most

    def check_sizes(self, parallel: Parallel) -> None:
        """Raise if the trainer does not support these parallel sizes."""
        for option, name, size, most in self.limit_sizes(parallel):
            raise UserError(
                f"{option} {size} was given for {self.title}, whose {name} size is at most "
                f"{most}: plan with `omnibal plan --for {self.name} {option} {most}`"
            )
        if parallel.data > 1:
            self.check_shardings((parallel.sharding,))


OWN = TrainerConstraints(
    has_adapters=True,
    schedules=frozenset({"1f1b", "interleaved", "zb-h1", "zb-v"}),
    fills_groups=False,
)
"""This project's trainer, which takes any plan."""

_FULLY = (WeightSharding.FULL,)
_MEGATRON_STAGES = StageRules(
    encoders_on_first=True, head_on_all_tokens=True, recompute=RecomputeFreedom.LANGUAGE
)
_ENGINE = RuntimeOptions(transformer_engine=True, accumulates_in_products=True)
_FULL_STEPS = PackRules(full_steps=True)
_NEXT_FIT = PackRules(full_steps=True, tokens_alone=True, next_fit=True)

_MEGATRON: dict[str, Any] = {
    "shardings": (WeightSharding.REPLICATED,),
    "schedules": frozenset({"1f1b", "interleaved"}),
    # Of Megatron-LM exports, which request overlap and a loss per token.
    "runtime": _ENGINE.model_copy(update={"fused_loss": False, "kept_logits": 2}),
    "has_alibi": False,
}
_FULLY_SHARDED: dict[str, Any] = {
    "stages": StageRules(head_on_all_tokens=True, recompute=RecomputeFreedom.ALL),
    "shardings": _FULLY,
    "runtime": RuntimeOptions(scatters_weights_precision=True),
    "most_pipeline": 1,
    "most_tensor": 1,
    "has_experts": False,
}

TARGETS = {
    target.name: target
    for target in (
        TrainerConstraints(
            name=TargetName.MS_SWIFT,
            title="ms-swift (Megatron)",
            version="4.6.0",
            has_adapters=True,
            stages=_MEGATRON_STAGES.model_copy(update={"encoders_whole": True}),
            packs=_NEXT_FIT,
            **_MEGATRON,
        ),
        TrainerConstraints(
            name=TargetName.MS_SWIFT_DEEPSPEED,
            title="ms-swift (DeepSpeed)",
            version="4.6.0",
            has_adapters=True,
            packs=_NEXT_FIT,
            **_FULLY_SHARDED,
        ),
        TrainerConstraints(
            name=TargetName.XTUNER,
            title="XTuner v1",
            version="5cda4fb",
            packs=_FULL_STEPS.model_copy(update={"padded": Padding.EVERYWHERE}),
            **_FULLY_SHARDED,
        ),
        TrainerConstraints(
            name=TargetName.MEGATRON_LM,
            title="Megatron-LM",
            version="core 0.16.1",
            stages=_MEGATRON_STAGES,
            packs=_FULL_STEPS.model_copy(update={"padded": Padding.PIPELINES}),
            **_MEGATRON,
        ),
        TrainerConstraints(
            name=TargetName.MEGATRON_BRIDGE,
            title="Megatron-Bridge",
            version="003e863",
            stages=_MEGATRON_STAGES,
            packs=_FULL_STEPS.model_copy(update={"padded": Padding.PIPELINES}),
            **_MEGATRON
            | {"runtime": _ENGINE.model_copy(update={"fused_routing": True, "dispatcher": "flex"})},
        ),
    )
    if target.name is not None
}
"""Other trainers by name."""


def trainer_of(name: TargetName | None) -> TrainerConstraints:
    """Constraints of the trainer in `made_for` of a plan, None is this project's."""
    return OWN if name is None else TARGETS[name]
