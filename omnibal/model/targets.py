"""Trainers that a plan can be made for, and what of a plan each can be told.

A trainer's constraints limit the search: which stages encoders may stand in, which layers may be
recomputed, how samples may be packed. What it cannot be told is not planned for it. Where the
limits are from is said in docs/trainers.md, trainer by trainer, with the version that was read.
"""

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from omnibal.base.errors import UserError
from omnibal.base.frozen import Frozen
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
    """What the choice of recomputed layers is free in, from most to least."""

    LAYERS = "layers"
    """Any layers of any stage."""
    STAGES = "stages"
    """One number a stage: of every tower the stage recomputes so many of its first layers, or all
    where it holds fewer."""
    LANGUAGE = "language"
    """One number for the language model, the same for all stages: each recomputes so many of the
    first layers that it holds, or all if it holds fewer. Of an encoder all layers or none."""
    ALL = "all"
    """All layers of the language model or none; of an encoder all or none."""


class StageRules(Frozen):
    """What stages may hold and recompute, and how a trainer divides encoders."""

    encoders_on_first: bool = False
    """Whether the first stage must hold all encoders and the language embed."""
    encoders_whole: bool = False
    """Whether every tensor-parallel rank computes all of the encoders, instead of a share."""
    head_on_all_tokens: bool = False
    """Whether the head computes logits of tokens without loss too, as Megatron's and Transformers'
    models do."""
    language_everywhere: bool = False
    """Whether every stage must hold a layer of the language model."""
    recompute: RecomputeFreedom = RecomputeFreedom.LAYERS

    @property
    def is_free(self) -> bool:
        """Whether the search for stages is not limited by them; the division of encoders and the
        head's tokens are matters of cost."""
        costs = {"encoders_whole": False, "head_on_all_tokens": False}
        return self.model_copy(update=costs) == FREE


FREE = StageRules()
"""No limits: what this project's trainer can be told."""


class Padding(StrEnum):
    """Where a trainer pads every pack to the tokens of the longest, and computes the padding."""

    NOWHERE = "nowhere"
    PIPELINES = "pipelines"
    """Where there are several stages, which then exchange micro-batches of one length."""
    EVERYWHERE = "everywhere"

    def applies(self, pipeline: int) -> bool:
        """Whether packs are padded on so many stages."""
        return self is Padding.EVERYWHERE or (self is Padding.PIPELINES and pipeline > 1)


class PackRules(Frozen):
    """What packs may be."""

    tokens_alone: bool = False
    """Whether packs are limited by their tokens alone, and not by items of encoders."""
    next_fit: bool = False
    """Whether the trainer packs samples itself, one after another: a pack ends where the next
    sample would not fit. A plan's packs are then what that makes of the plan's order."""
    one_medium: bool = False
    """Whether samples of text alone and samples with images (or other items) must not share one."""
    padded: Padding = Padding.NOWHERE
    full_steps: bool = False
    """Whether every step has as many packs as any other: the trainer leaves out what is over."""


ANY_PACKS = PackRules()
"""No limits: packs as this project's trainer takes them."""


class TrainerConstraints(Frozen):
    """What a trainer can be told of a plan, and how it runs a step; defaults are this project's."""

    name: TargetName | None = None
    """None for this project's own."""
    title: str = "OmniBal"
    """Name as its users write it."""
    version: str = ""
    """Version, or commit, whose files and flags were read; of this project's own, none."""
    stages: StageRules = StageRules()
    packs: PackRules = PackRules()
    shardings: tuple[WeightSharding, ...] = tuple(WeightSharding)
    """Ways in which data-parallel ranks may hold weights."""
    runtime: RuntimeOptions = OWN_RUNTIME
    """How it runs a step where an export says nothing of it."""
    schedules: frozenset[str] = frozenset({"1f1b"})
    """Pipeline schedules that it runs, by name (`omnibal.pipeline.schedules.ScheduleName`)."""
    fills_groups: bool = True
    """Whether chunks of stages need a number of micro-batches that is a multiple of the stages, as
    in Megatron-core (`core/pipeline_parallel/schedules.py:995-1015` of 0.16.1, whose groups have as
    many micro-batches as there are stages unless a flag says otherwise)."""
    most_pipeline: Annotated[int | None, Field(ge=1)] = None
    """Most pipeline stages; None where there is no limit."""
    most_tensor: Annotated[int | None, Field(ge=1)] = None
    has_experts: bool = True
    """Whether ranks can share out experts."""
    has_adapters: bool = False
    """Whether an export says its flags for adapters of the language model, all else frozen."""

    @property
    def always_shards(self) -> bool:
        """Whether all data-parallel ranks divide weights, whatever is asked for."""
        return self.shardings == _FULLY

    def held(self, parallel: Parallel) -> Parallel:
        """Sizes as the trainer holds weights where nobody says how: divided over all data-parallel
        ranks, if it always divides them."""
        if not self.always_shards or parallel.sharded > 1:
            return parallel
        return parallel.model_copy(update={"sharded": parallel.data})

    def check_shardings(self, shardings: Collection[WeightSharding]) -> None:
        """Refuse ways of holding weights of which the trainer has none."""
        if not set(shardings).intersection(self.shardings):
            raise UserError(
                f"--sharding {', '.join(shardings)} was given for {self.title}, whose weights are "
                f"{' or '.join(self.shardings)}: leave it out, or give one of these"
            )

    def schedule_obstacle(self, name: str, stages: int, micro_batches: int) -> str | None:
        """Why it cannot run steps of so many micro-batches a rank in a schedule, in words.

        Args:
            micro_batches: of every rank in a step.

        Returns:
            None if it can.
        """
        if name not in self.schedules:
            return f"{self.title} runs {words(sorted(self.schedules))}"
        if name == "interleaved" and self.fills_groups and micro_batches % stages:
            return (
                f"a step has {micro_batches} micro-batches a rank, and {self.title} interleaves "
                f"multiples of the {stages} pipeline stages"
            )
        return None

    def check_sizes(self, parallel: Parallel) -> None:
        """Refuse parallel sizes that the trainer does not have."""
        most_expert = None if self.has_experts else 1
        for option, name, size, most in (
            ("--pp", "pipeline", parallel.pipeline, self.most_pipeline),
            ("--tp", "tensor-parallel", parallel.tensor, self.most_tensor),
            ("--ep", "expert-parallel", parallel.expert, most_expert),
        ):
            if most is not None and size > most:
                raise UserError(
                    f"{option} {size} was given for {self.title}, whose {name} size is at most "
                    f"{most}: plan with `omnibal plan --for {self.name} {option} {most}`"
                )
        if parallel.data > 1:
            self.check_shardings((parallel.sharding,))


_FULLY = (WeightSharding.FULL,)
_WHOLE = (WeightSharding.REPLICATED,)
OWN = TrainerConstraints(
    has_adapters=True,
    schedules=frozenset({"1f1b", "interleaved", "zb-h1", "zb-v"}),
    fills_groups=False,
)
"""This project's trainer, which takes any plan."""

_MEGATRON = StageRules(
    encoders_on_first=True, head_on_all_tokens=True, recompute=RecomputeFreedom.LANGUAGE
)
_WITH_CHUNKS = frozenset({"1f1b", "interleaved"})
"""Schedules of Megatron-core."""
_SHARDED = StageRules(head_on_all_tokens=True, recompute=RecomputeFreedom.ALL)
_ENGINE = RuntimeOptions(transformer_engine=True, accumulates_in_products=True)
_MEGATRON_RUNTIME = _ENGINE.model_copy(update={"fused_loss": False})
"""As Megatron-LM runs exports, which ask for hidden exchanges and a loss per token."""
_GIVEN = PackRules(full_steps=True)
_NEXT_FIT = PackRules(full_steps=True, tokens_alone=True, next_fit=True)

_OF_MEGATRON: dict[str, Any] = {
    "shardings": _WHOLE,
    "schedules": _WITH_CHUNKS,
    "runtime": _MEGATRON_RUNTIME,
}
_OF_FULLY_SHARDED: dict[str, Any] = {
    "stages": _SHARDED,
    "shardings": _FULLY,
    "runtime": RuntimeOptions(scatters_weights_precision=True),
    "most_pipeline": 1,
    "most_tensor": 1,
    "has_experts": False,
}

TARGETS = {
    each.name: each
    for each in (
        TrainerConstraints(
            name=TargetName.MS_SWIFT,
            title="ms-swift (Megatron)",
            version="4.6.0",
            has_adapters=True,
            stages=_MEGATRON.model_copy(update={"encoders_whole": True}),
            packs=_NEXT_FIT,
            **_OF_MEGATRON,
        ),
        TrainerConstraints(
            name=TargetName.MS_SWIFT_DEEPSPEED,
            title="ms-swift (DeepSpeed)",
            version="4.6.0",
            has_adapters=True,
            packs=_NEXT_FIT,
            **_OF_FULLY_SHARDED,
        ),
        TrainerConstraints(
            name=TargetName.XTUNER,
            title="XTuner v1",
            version="5cda4fb",
            packs=_GIVEN.model_copy(update={"padded": Padding.EVERYWHERE}),
            **_OF_FULLY_SHARDED,
        ),
        TrainerConstraints(
            name=TargetName.MEGATRON_LM,
            title="Megatron-LM",
            version="core 0.16.1",
            stages=_MEGATRON,
            packs=_GIVEN.model_copy(update={"padded": Padding.PIPELINES}),
            **_OF_MEGATRON,
        ),
        TrainerConstraints(
            name=TargetName.MEGATRON_BRIDGE,
            title="Megatron-Bridge",
            version="003e863",
            stages=_MEGATRON,
            shardings=_WHOLE,
            schedules=_WITH_CHUNKS,
            runtime=_ENGINE.model_copy(update={"fused_routing": True}),
            packs=_GIVEN.model_copy(update={"padded": Padding.PIPELINES}),
        ),
    )
    if each.name is not None
}
"""Every other trainer, by its name."""


def trainer_of(name: TargetName | None) -> TrainerConstraints:
    """The constraints of a trainer, given by `made_for` of a plan; None is this project's."""
    return OWN if name is None else TARGETS[name]
