"""Trainers that plans can be made for, and their constraints (sources: docs/trainers.md)."""

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
    STAGES = "stages"  # a number n per stage: first min(n, held) layers of every tower
    LANGUAGE = "language"  # one n: first min(n, held) language layers per stage; encoders as ALL
    ALL = "all"  # all layers or none, by tower


class StageRules(Frozen):
    """Constraints on stages, recomputation and encoder division."""

    encoders_on_first: bool = False  # stage 0 must hold all encoders and the language embedding
    encoders_whole: bool = False  # tensor-parallel ranks replicate encoders
    head_on_all_tokens: bool = False  # logits of tokens without loss too (Megatron, Transformers)
    language_everywhere: bool = False  # every stage must hold a language layer
    recompute: RecomputeFreedom = RecomputeFreedom.LAYERS

    @property
    def is_free(self) -> bool:
        """Whether stages and recomputation are unconstrained."""
        # Encoder division and head tokens affect costs only.
        costs = {"encoders_whole": False, "head_on_all_tokens": False}
        return self.model_copy(update=costs) == FREE


FREE = StageRules()  # this project's trainer


class Padding(StrEnum):
    """Condition under which packs are padded to the longest."""

    NOWHERE = "nowhere"
    PIPELINES = "pipelines"  # with several stages, which exchange micro-batches of equal length
    EVERYWHERE = "everywhere"

    def applies(self, pipeline: int) -> bool:
        """Return whether packs are padded with `pipeline` stages."""
        return self is Padding.EVERYWHERE or (self is Padding.PIPELINES and pipeline > 1)


class PackRules(Frozen):
    """Constraints on packs."""

    tokens_alone: bool = False  # tokens are the only cap, not encoder items
    next_fit: bool = False  # the trainer packs by next fit, in the plan's order of samples
    one_medium: bool = False  # text-only samples and samples with items must not share a pack
    padded: Padding = Padding.NOWHERE
    full_steps: bool = False  # of equally many packs; the remainder is dropped


ANY_PACKS = PackRules()  # this project's trainer


class TrainerConstraints(Frozen):
    """Constraints and step options of a trainer; defaults are this project's."""

    name: TargetName | None = None  # None: this project's
    title: str = "OmniBal"  # as its users write it
    version: str = ""  # version or commit that was read
    stages: StageRules = StageRules()
    packs: PackRules = PackRules()
    shardings: tuple[WeightSharding, ...] = tuple(WeightSharding)
    runtime: RuntimeOptions = OWN_RUNTIME  # default step options, unless an export sets them
    schedules: frozenset[str] = frozenset({"1f1b"})  # of `omnibal.pipeline.schedules`
    # Interleaving needs micro-batches in multiples of the stages, as Megatron-core 0.16.1 by
    # default (`core/pipeline_parallel/schedules.py:995-1015`).
    fills_groups: bool = True
    max_pipeline: Annotated[int | None, Field(ge=1)] = None  # stages, None if unlimited
    max_tensor: Annotated[int | None, Field(ge=1)] = None
    tensor_across_nodes: bool = False  # set for launch lines that do so
    has_experts: bool = True  # expert parallelism
    has_adapters: bool = False  # exports of LoRA on a frozen language model
    has_alibi: bool = True  # Megatron-core 0.16.1 has none

    @property
    def always_shards(self) -> bool:
        """Whether weights are always sharded over all data-parallel ranks."""
        return self.shardings == _FULLY

    def with_default_sharding(self, parallel: Parallel) -> Parallel:
        """Return the sizes, with replicated weights sharded over all ranks if `always_shards`."""
        if not self.always_shards or parallel.sharded > 1:
            return parallel
        return parallel.model_copy(update={"sharded": parallel.data})

    def model_obstacle(self, model: ModelConfig) -> str | None:
        """Return why the trainer cannot build a model, or None."""
        if self.has_alibi or model.language.positions != "alibi":
            return None
        return f"{model.name} has ALiBi positions, and {self.title} has none"

    def check_shardings(self, shardings: Collection[WeightSharding]) -> None:
        """Raise UserError unless the trainer supports one of these shardings."""
        if not set(shardings).intersection(self.shardings):
            supported = f"{self.title}, which supports {' or '.join(self.shardings)}"
            given = f"--sharding {', '.join(shardings)} was given for {supported}"
            raise UserError(f"{given}: leave --sharding out or change it")

    def schedule_obstacle(self, name: str, stages: int, micro_batches: int) -> str | None:
        """Return why a schedule with these micro-batches per rank cannot run, or None."""
        if name not in self.schedules:
            return f"{self.title} runs {words(sorted(self.schedules))}"
        if name == "interleaved" and self.fills_groups and micro_batches % stages:
            step = f"a step has {micro_batches} micro-batches a rank"
            return f"{step}, and {self.title} interleaves multiples of the {stages} pipeline stages"
        return None

    def limit_sizes(self, parallel: Parallel) -> Iterator[tuple[str, str, int, int]]:
        """Yield option, name, value and max of every size above the trainer's max."""
        max_expert = None if self.has_experts else 1
        for option, name, size, max_size in (
            ("--pp", "pipeline", parallel.pipeline, self.max_pipeline),
            ("--tp", "tensor-parallel", parallel.tensor, self.max_tensor),
            ("--ep", "expert-parallel", parallel.expert, max_expert),
        ):
            if max_size is not None and size > max_size:
                yield option, name, size, max_size

    def check_sizes(self, parallel: Parallel) -> None:
        """Raise UserError unless the trainer supports these sizes, and the sharding if DP > 1."""
        for option, name, size, max_size in self.limit_sizes(parallel):
            given = f"{option} {size} was given for {self.title}, with {name} size"
            remedy = f"plan with `omnibal plan --for {self.name} {option} {max_size}`"
            raise UserError(f"{given} {max_size} at most: {remedy}")
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
    # Exports for Megatron-LM set overlap and a loss per token.
    "runtime": _ENGINE.model_copy(update={"fused_loss": False, "kept_logits": 2}),
    "has_alibi": False,
}
_FULLY_SHARDED: dict[str, Any] = {
    "stages": StageRules(head_on_all_tokens=True, recompute=RecomputeFreedom.ALL),
    "shardings": _FULLY,
    "runtime": RuntimeOptions(scatters_weights_precision=True),
    "max_pipeline": 1,
    "max_tensor": 1,
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


def trainer_of(name: TargetName | None) -> TrainerConstraints:
    """Return the constraints of a plan's `made_for`; None is this project's trainer."""
    return OWN if name is None else TARGETS[name]
