"""Export for Megatron-Bridge (003e863): overrides of a recipe, and packs for Energon."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omnibal.job.plan import Plan
from omnibal.model.fp8 import FP8_FORMAT, TRAINED_FP8
from omnibal.model.units import LANGUAGE
from omnibal.trainers.export.energon import energon_files, energon_notes, without_packs
from omnibal.trainers.export.exported import Exported, ExportInput
from omnibal.trainers.export.layout import Layout
from omnibal.trainers.export.megatron_flags import (
    Batch,
    join_command,
    launch_variables,
    parallel_fields,
    plan_layout,
    recompute_fields,
    recomputed_encoders,
    torchrun,
)

_RUNNER = 'scripts/training/run_recipe.py --recipe "$RECIPE"'
_YOURS = (
    "\"checkpoint.pretrained_checkpoint='$MODEL'\"",
    "\"checkpoint.save='$OUTPUT'\"",
    "optimizer.lr=$LR",
)
"""Overrides that the plan does not decide, with names quoted for Hydra."""
_FROZEN = {
    LANGUAGE: "model.freeze_language_model",
    "vision": "model.freeze_vision_model",
    "projector": "model.freeze_vision_projection",
}
_FP8 = {
    "mixed_precision.fp8": FP8_FORMAT,
    "mixed_precision.fp8_recipe": TRAINED_FP8.recipe,
    "mixed_precision.fp8_param_gather": not TRAINED_FP8.keeps_bf16_weights,
    "mixed_precision.first_last_layers_bf16": False,
}
"""FP8 settings, with no bf16 layers at the model's ends."""


def export(given: ExportInput) -> Exported:
    """Write a plan as Megatron-Bridge recipe overrides, and packs for Energon."""
    plan, batch, files = given.plan, Batch.of(given), energon_files(given)
    values = overrides(given, batch)
    names = given.checkpoint or plan.model.name, str(given.folder)
    checkpoint, folder = (name.replace("'", r"\'") for name in names)
    quoted = replace(given, checkpoint=checkpoint, folder=Path(folder))
    return Exported(
        files=files,
        variables=launch_variables(quoted, RECIPE="YOUR_RECIPE"),
        command=join_command([torchrun(plan, _RUNNER), *_override_words(values), *_YOURS]),
        settings=_settings(values, plan_layout(plan)),
        given_up=tuple(_given_up(plan, batch, bool(files))),
        notes=(*_notes(plan, bool(files)), *energon_notes(given, files)),
    )


def overrides(given: ExportInput, batch: Batch) -> Mapping[str, Any]:
    """Recipe fields set by the plan."""
    plan, overlaps = given.plan, given.plan.parallel.data > 1
    return {
        **_of_model(parallel_fields(plan)),
        **_layer_fields(plan),
        "model.seq_length": batch.sequence_length,
        "dataset.seq_length": batch.sequence_length,
        "train.micro_batch_size": 1,
        "train.global_batch_size": given.packs_per_step,
        **({} if given.full_steps is None else {"train.train_iters": given.full_steps}),
        "model.calculate_per_token_loss": True,
        "ddp.average_in_collective": False,
        "ddp.use_distributed_optimizer": True,
        "ddp.overlap_grad_reduce": overlaps,
        "ddp.overlap_param_gather": overlaps,
        **(_FP8 if plan.precision == "fp8" else {}),
        **{_FROZEN[part]: True for part in plan.frozen if part in _FROZEN},
    }


def layer_flags(plan: Plan) -> list[str]:
    """Return overrides of the split and recomputation."""
    return _override_words(_layer_fields(plan))


def _of_model(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {f"model.{name}": value for name, value in fields.items()}


def _layer_fields(plan: Plan) -> Mapping[str, Any]:
    """Return all fields of the split and recomputation, None for unused fields of a recipe."""
    layout = plan_layout(plan)
    first, last = (None, None) if layout.is_even else layout.ends or (None, None)
    in_full = first is None and not layout.is_even
    has_chunks = layout.virtual > 1
    # With batched messages, two stages of several chunks would take each other's.
    messages = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    fields = {
        "virtual_pipeline_model_parallel_size": layout.virtual if has_chunks else None,
        **(messages if has_chunks else {}),
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": layout.short_text if in_full else None,
        **recompute_fields(plan),
    }
    return _of_model(fields)


def _override_words(values: Mapping[str, Any]) -> list[str]:
    """Format values as command line overrides."""

    def text(value: Any) -> str:
        # A shell needs quotes around a layout, and Hydra takes its letters and signs without any.
        quoted = isinstance(value, str) and not value.isalnum()
        return f"'{value}'" if quoted else "null" if value is None else str(value)

    return [f"{name}={text(value)}" for name, value in values.items()]


def _settings(values: Mapping[str, Any], layout: Layout) -> str:
    """Format values as recipe statements, with the layout as lists."""
    lines = [f"cfg.{name} = {value!r}" for name, value in values.items()]
    lists = [f"    {list(chunk)!r}," for chunk in layout.chunks]
    return "\n".join(
        [
            "# in a recipe, whose ConfigContainer is cfg",
            *lines,
            "# the split as lists, for a recipe's own table of layouts",
            *("layout = [", *lists, "]\n"),
        ]
    )


def _given_up(plan: Plan, batch: Batch, has_packs: bool) -> Iterator[str]:
    if plan.parallel.pipeline > 1 or plan.parallel.expert > 1:
        yield from batch.padding_notes(
            "Megatron-Bridge pads to the sequence length when it trains a vision-language model "
            "on several pipeline stages or expert-parallel ranks"
        )
    if not has_packs:
        yield without_packs("Megatron-Bridge")
    encoders = recomputed_encoders(plan)
    if encoders:
        yield (
            f"All layers of {encoders} are recomputed in the plan, and the command does "
            "not say so: Megatron-Bridge has no field for it that all models share. See your "
            "model's provider for one; without, the first stage takes more memory than planned."
        )
    unknown = ", ".join(part for part in plan.frozen if part not in _FROZEN)
    if unknown:
        yield (
            f"No field of Megatron-Bridge's models freezes {unknown}, which the plan "
            "freezes; freeze it in the model."
        )


def _notes(plan: Plan, has_packs: bool) -> Iterator[str]:
    yield (
        "`YOUR_RECIPE` is the recipe of your model, whose other fields stay as they are. The "
        "overrides also reset fields by which a recipe may have said another split."
    )
    yield (
        "The first stage holds the encoders beside its layers of the language model; the split "
        "counts layers of the language model alone."
    )
    if plan.precision == "fp8":
        yield (
            "`mixed_precision` must be a MixedPrecisionConfig in the recipe, not the name of one, "
            "for its fields to be overridden."
        )
    if has_packs:
        yield (
            "Its EnergonProvider passes no `parallel_shard_iters`, without which Energon refuses "
            "to keep the order: use a DatasetProvider of your own that hands out "
            "`get_savable_loader(planned_dataset(...))`. That its step takes joined packs of your "
            "TaskEncoder was not tried."
        )
