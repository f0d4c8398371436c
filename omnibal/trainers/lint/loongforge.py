"""LoongForge's constraints, for predictions of its launch lines, and its flags of layers."""

from collections.abc import Iterable

from omnibal.job.plan import Plan
from omnibal.model.targets import TARGETS, PackRules, RecomputeFreedom, TargetName
from omnibal.trainers.export.layout import first_layers
from omnibal.trainers.export.megatron_flags import flag_lines, plan_layout

_MEGATRON_LM = TARGETS[TargetName.MEGATRON_LM]
LOONGFORGE_TRAINER = _MEGATRON_LM.model_copy(
    update={
        "name": None,
        "title": "LoongForge",
        "stages": _MEGATRON_LM.stages.model_copy(
            update={"language_everywhere": True, "recompute": RecomputeFreedom.STAGES}
        ),
        "packs": PackRules(full_steps=True, one_medium=True),
    }
)


def layer_flags(plan: Plan) -> list[str]:
    """Return flag lines of the split and recomputation of a plan."""
    return flag_lines({**_split_flags(plan), **_recompute_flags(plan)})


def _split_flags(plan: Plan) -> dict[str, str]:
    """Return the flag of layers by stage, or by chunk in model order. Empty for one stage."""
    layout = plan_layout(plan)
    if layout.virtual > 1:
        by_virtual = zip(*layout.layers_by_chunk, strict=True)
        return {
            "num-virtual-stages-per-pipeline-rank": str(layout.virtual),
            "custom-virtual-pipeline-layers": _join(sum(by_virtual, ())),
        }
    return {"custom-pipeline-layers": _join(layout.layers)} if layout.pipeline > 1 else {}


def _recompute_flags(plan: Plan) -> dict[str, str]:
    """Return the flags of full recomputation, with a number of first layers per chunk by stage."""
    parts = plan.stages_at(0)
    # LoongForge has one number per stage for all its chunks and towers.
    counts = [
        max(first_layers(parts[n], t) or 0 for n in plan.parts_of(stage) for t in plan.model.towers)
        for stage in range(plan.parallel.pipeline)
    ]
    if not any(counts):
        return {}
    full = {"recompute-granularity": "full", "recompute-method": "block"}
    if len(counts) == 1:
        return full | {"recompute-num-layers": str(counts[0])}
    return full | {"custom-pipeline-recompute-layers": _join(counts)}


def _join(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
