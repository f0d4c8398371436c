"""Export for MindSpeed-MM: both towers' layers by stage and recompute numbers, for its model.json.

Read: docs/zh/features/virtual_pipeline_parallel.md and examples/qwen2.5vl/README.md (Megatron back
end, core 0.12.1), and `ParallelConfig` of checkpoint/common/converter.py.
"""

import json
from collections.abc import Iterator
from typing import Any

from omnibal.base.errors import UserError
from omnibal.export.exported import Exported, ExportInput, text_file
from omnibal.export.megatron_flags import (
    Batch,
    batch_flags,
    command,
    flag_lines,
    optimizer_flags,
    parallel_flags,
    recompute_fields,
    torchrun,
)
from omnibal.export.recomputed_layers import one_number
from omnibal.job.plan import Plan
from omnibal.model.units import LANGUAGE, projector_name, projector_unit

_PLACES = {
    "vision": ("image_encoder", "vision_encoder"),
    "audio": ("audio_encoder", "audio_encoder"),
    LANGUAGE: ("text_decoder",),
}
"""Tables of model.json that hold a tower, from the outermost."""
_CONVERTED = {"vision": "vit_pp_layers", "audio": "audio_pp_layers", LANGUAGE: "llm_pp_layers"}
"""Names of the towers' lists in mm-convert."""
_FILE = "model.json"


def export(given: ExportInput) -> Exported:
    """Write what of a plan goes into MindSpeed-MM's model.json, and into its script.

    Raises:
        UserError: the model has an encoder that MindSpeed-MM has no table for.
    """
    plan, batch = given.files.plan, Batch.of(given)
    text = json.dumps(model_json(plan), indent=4) + "\n"
    variables = (
        f"TP={plan.parallel.tensor} PP={plan.parallel.pipeline} CP=1 MBS=1 "
        f"GRAD_ACC_STEP={batch.packs_per_step // plan.parallel.data}"
    )
    lines = flag_lines(parallel_flags(plan), batch_flags(batch), optimizer_flags(plan))
    return Exported(
        files={_FILE: text_file(text)},
        command=f"{convert_line(plan)}\n\n# in the script of your model: {variables}\n"
        + command([torchrun(plan, "pretrain_vlm.py"), *lines]),
        settings=text,
        given_up=tuple(_given_up(plan)),
        notes=(
            f"`{_FILE}` holds fragments: put every field into the same table of your model.json.",
            "Weights are converted for these lists; convert them anew for every other split.",
            "Flags of the model, the data and checkpoints are those of the example script.",
        ),
    )


def model_json(plan: Plan) -> dict[str, Any]:
    """Fragments of model.json: of every tower its layers by stage and what is recomputed.

    Raises:
        UserError: the model has an encoder that there is no table for.
    """
    unknown = [name for name in plan.model.encoders if name not in _PLACES]
    if unknown:
        raise UserError(
            f"{plan.model.name} has an encoder {unknown[0]!r}, and MindSpeed-MM's model.json has "
            f"tables for {' and '.join(name for name in _PLACES if name != LANGUAGE)}; name it so "
            "in the model file, or export the plan for another trainer"
        )
    written: dict[str, Any] = {}
    for tower in plan.model.towers:
        table = written
        for name in _PLACES[tower]:
            table = table.setdefault(name, {})
        table |= _tower_fields(plan, tower)
    return written


def layers_by_stage(plan: Plan, tower: str) -> list[int]:
    """Layers of a tower on every stage."""
    return [len(stage.layers(tower)) for stage in plan.stages]


def _tower_fields(plan: Plan, tower: str) -> dict[str, Any]:
    layers = layers_by_stage(plan, tower)
    fields: dict[str, Any] = {"num_layers": sum(layers), "pipeline_num_layers": layers}
    number = one_number(plan.stages_at(0), tower)
    assert number is not None  # as the plan was found expressible
    # Nulls take back what the model.json at hand, or a flag of the script, may have.
    fields |= {f"recompute_{name}": value for name, value in recompute_fields(number).items()}
    return fields | {"freeze": tower in plan.frozen}


def convert_line(plan: Plan) -> str:
    """The command that converts released weights for the split."""
    lines = [
        "mm-convert YOUR_CONVERTER hf_to_mm",
        "--cfg.mm_dir MM_FOLDER",
        "--cfg.hf_config.hf_dir HF_FOLDER",
    ]
    for tower in reversed(plan.model.towers):
        layers = ",".join(map(str, layers_by_stage(plan, tower)))
        lines.append(f"--cfg.parallel_config.{_CONVERTED[tower]} [[{layers}]]")
    lines.append(f"--cfg.parallel_config.tp_size {plan.parallel.tensor}")
    if plan.parallel.expert > 1:
        lines.append(f"--cfg.parallel_config.ep_size {plan.parallel.expert}")
    return command(lines)


def _given_up(plan: Plan) -> Iterator[str]:
    yield (
        "MindSpeed-MM packs samples itself, and takes neither packs nor an order: the prediction "
        "is of the plan's packs, whose sizes its own will not have."
    )
    yield from _moved_units(plan)
    projectors = [projector_name(plan.model, name) for name in plan.model.encoders]
    frozen = [part for part in projectors if part in plan.frozen]
    if frozen:
        yield f"{', '.join(frozen)} is frozen in the plan; freeze it in your model.json."
    for number, stage in enumerate(plan.stages):
        if stage.parts <= set(plan.frozen):
            yield (
                f"All of stage {number} is frozen: its ranks have nothing to train, for which "
                "MindSpeed-MM needs `--enable-dummy-optimizer`."
            )


def _moved_units(plan: Plan) -> Iterator[str]:
    """Units that are no layers and stand on another stage than in MindSpeed-MM, where they go with
    the layers beside them."""
    beside = [("language embed", LANGUAGE, 0), ("head", LANGUAGE, -1)]
    for name in plan.model.encoders:
        beside += [(f"{name} embed", name, 0), (projector_unit(plan.model, name), name, -1)]
    for unit, tower, end in beside:
        holding = [number for number, stage in enumerate(plan.stages) if stage.holds(unit)]
        layered = [number for number, stage in enumerate(plan.stages) if stage.layers(tower)]
        if holding and layered and holding[0] != layered[end]:
            yield (
                f"The {unit} is on stage {holding[0]} in the plan, and on stage {layered[end]} in "
                f"MindSpeed-MM, with the {'first' if end == 0 else 'last'} layer of {tower}."
            )
